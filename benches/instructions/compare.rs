//! Compares the number of instructions counted by valgrind with the stored figures: `compare KEPT <
//! SUMMARIES`.
//!
//! Standard input is gungraun's JSON output, one object per line. A case that takes more instructions than
//! its stored figure fails, if the difference is over 2 % (50 % for cases over large hash tables). If a
//! case takes as much less, and at least 5 %, a message asks for the new figure to be stored. With
//! `STRATALLOC_WRITE_FIGURES` set, the figures are stored instead of compared.

use std::collections::BTreeMap;
use std::io::Read;
use std::process::ExitCode;

use serde_json::{Map, Value};
use stratalloc_instructions::{CASES, ROUNDS_BETWEEN};

const BETTER: f64 = 0.95;

/// Returns the number of instructions (`Ir`) in a summary.
fn instructions(value: &Value) -> Option<u64> {
    match value {
        Value::Object(fields) => match fields.get("Ir") {
            Some(found) => first_number(found),
            None => fields.values().find_map(instructions),
        },
        Value::Array(values) => values.iter().find_map(instructions),
        _ => None,
    }
}

/// Returns the first whole number in a value. A summary has the new number first, then the old one.
fn first_number(value: &Value) -> Option<u64> {
    match value {
        Value::Number(number) => number.as_u64(),
        Value::Object(fields) => fields
            .get("values")
            .map_or_else(|| fields.values().find_map(first_number), first_number),
        Value::Array(values) => values.iter().find_map(first_number),
        _ => None,
    }
}

/// Returns the counted instructions for each benchmark id (`few_0`, `many_0`, ..).
fn counted(text: &str) -> Result<BTreeMap<String, u64>, String> {
    let mut all = BTreeMap::new();
    for summary in serde_json::Deserializer::from_str(text).into_iter::<Value>() {
        let summary = summary.map_err(|error| format!("this is no summary: {error}"))?;
        let id = summary["id"].as_str().ok_or("a summary without an id")?.to_owned();
        let total = &summary["profiles"][0]["data"]["total"];
        let count = instructions(total).ok_or_else(|| format!("{id} has no count: {total}"))?;
        all.insert(id, count);
    }
    Ok(all)
}

/// Returns the instructions per operation, by case, rounded to a tenth.
fn measured(text: &str) -> Result<Vec<(String, f64)>, String> {
    let all = counted(text)?;
    let of = |id: String| all.get(&id).copied().ok_or(format!("{id} was not counted"));
    CASES
        .iter()
        .enumerate()
        .map(|(at, case)| {
            let between = of(format!("many_{at}"))?.saturating_sub(of(format!("few_{at}"))?);
            #[expect(clippy::cast_precision_loss, reason = "counts are far below 2^52")]
            let each = between as f64 / (case.operations() * u64::from(ROUNDS_BETWEEN)) as f64;
            Ok((case.name(), (each * 10.0).round() / 10.0))
        })
        .collect()
}

fn compare(path: &str) -> Result<bool, String> {
    let mut text = String::new();
    std::io::stdin().read_to_string(&mut text).map_err(|error| error.to_string())?;
    let measured = measured(&text)?;
    if std::env::var_os("STRATALLOC_WRITE_FIGURES").is_some() {
        let figures: Map<_, _> =
            measured.into_iter().map(|(name, each)| (name, Value::from(each))).collect();
        let text = serde_json::to_string_pretty(&figures).map_err(|error| error.to_string())?;
        std::fs::write(path, text + "\n").map_err(|error| format!("{path}: {error}"))?;
        return Ok(true);
    }
    let kept = std::fs::read_to_string(path).map_err(|error| format!("{path}: {error}"))?;
    let kept: Map<String, Value> =
        serde_json::from_str(&kept).map_err(|error| format!("{path}: {error}"))?;
    let mut good = kept.len() == measured.len();
    println!("{:<22} {:>10} {:>10} {:>8}", "instructions", "kept", "now", "change");
    for ((name, now), case) in measured.into_iter().zip(CASES) {
        let Some(kept) = kept.get(&name).and_then(Value::as_f64) else {
            println!("{name:<22} {:>10} {now:>10.1}  no figure is kept", "-");
            good = false;
            continue;
        };
        let most = case.most();
        let verdict = if now > kept * most {
            good = false;
            format!("  over {:.0} % more", (most - 1.0) * 100.0)
        } else if now < kept * BETTER.min(1.0 / most) {
            "  write it down: STRATALLOC_WRITE_FIGURES=1".to_owned()
        } else {
            String::new()
        };
        let change = (now / kept - 1.0) * 100.0;
        println!("{name:<22} {kept:>10.1} {now:>10.1} {change:>+7.1}%{verdict}");
    }
    Ok(good)
}

fn main() -> ExitCode {
    let Some(path) = std::env::args().nth(1) else {
        eprintln!("usage: compare KEPT < SUMMARIES");
        return ExitCode::from(2);
    };
    match compare(&path) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => {
            eprintln!("the figures differ from {path}");
            ExitCode::FAILURE
        }
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}
