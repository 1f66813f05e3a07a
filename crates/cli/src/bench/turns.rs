//! `bench --turns`: times one case for each line read from standard input, so that another program can
//! time other allocators in between.
//!
//! A line is a case and a configuration, such as `pair:512B backend:native`. The configuration `driver`
//! is the device's stream-ordered pool, used directly. The case `floor:lock_pair` needs no
//! configuration. The output is a row as of `--json`, or `null` if the allocator does not support the
//! case.

use std::io::{BufRead, Write};

use super::super::outcome::{BadArguments, Result, out};
use super::cases::{Effort, Together};
use super::loops::Loops;
use super::results::{CaseResult, Subject};
use super::{Bench, Outcome, Timed, TimedKind, cells, one, settings};

pub(super) fn run(args: &Bench, loops: &Loops) -> Result<Outcome> {
    // Keeps the device's context alive between lines.
    let _open = args.device.open(None)?;
    let device = args.device.to_string();
    for line in std::io::stdin().lock().lines() {
        let line = line?;
        let (case, conf) = line.split_once(' ').unwrap_or((line.as_str(), ""));
        let subject = Subject { conf: conf.to_owned(), device: device.clone() };
        let timed = time(args, loops, case, conf)?;
        match CaseResult::of(case, 1, &subject, timed.into_iter().collect()) {
            Some(row) => row.print_json()?,
            None => writeln!(out(), "null")?,
        }
        out().flush()?;
    }
    Ok(Outcome::Good)
}

fn time(args: &Bench, loops: &Loops, case: &str, conf: &str) -> Timed<Together> {
    if case == "floor:lock_pair" {
        return Ok(Some(one(super::floors::lock_pair(1).ns)));
    }
    let (_, cell) = cells::alone().find(|(name, _)| *name == case).ok_or_else(|| {
        let known: Vec<_> = cells::alone().map(|(name, _)| name).collect();
        BadArguments(format!("no case of one thread is {case:?}; expected {}", known.join(", ")))
    })?;
    let config = match conf {
        "driver" => None,
        conf => Some(settings::parse("configuration", conf)?),
    };
    let what = config.as_ref().map_or(TimedKind::DriverPool, TimedKind::Allocator);
    cells::time(cell, 1, what, args, loops, Effort::BRIEF)
}
