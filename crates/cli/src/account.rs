//! `stratalloc info --pid`: the owners of the memory that a device uses, as seen by a running process.
//!
//! A process whose Python program calls `stratalloc.watch()` sends its account through a socket (`request`).
//! For other processes the account has only what the list of processes contains.

use std::collections::BTreeMap;
use std::io::{self, Write};

use serde::{Deserialize, Serialize};
use serde_json::json;

use stratalloc::driver::ProcessUsage;
use stratalloc::error::DriverError;

use super::device::Device;
use super::outcome::{Outcome, Result, out, write_note};
use super::show::{columns, is_json, joined, near, progress, signed_near, table};

#[cfg(target_os = "linux")]
mod request;

/// A part of a device's used memory.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
struct OwnedBytes {
    owner: String,
    kind: String,
    bytes: i64,
    /// The way in which the bytes were found.
    found_by: String,
}

/// The account of a device.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
struct Account {
    device: u64,
    used_bytes: u64,
    total_bytes: u64,
    rows: Vec<OwnedBytes>,
}

/// The text that a process sends.
#[derive(Deserialize)]
#[serde(untagged)]
enum Sent {
    Error { error: String },
    Accounts { accounts: Vec<Account> },
}

/// Prints the account of each of `devices` that the process uses.
pub(crate) fn run(process: u32, devices: &[Device]) -> Result<Outcome> {
    let bar = progress(1, &format!("asking process {process}"));
    let sent = asked(process);
    bar.finish_and_clear();
    let accounts = match sent {
        Ok(mut accounts) => {
            let is_listed = |number: u64| {
                devices
                    .iter()
                    .any(|device| matches!(device, Device::Cuda(own) if u64::from(*own) == number))
            };
            accounts.retain(|account| is_listed(account.device));
            accounts
        }
        Err(error) => {
            write_note(format_args!(
                "process {process} sends no account ({error}); the list of processes has less: \
                 stratalloc.watch() in the program sends it"
            ));
            from_outside(process, devices)
        }
    };
    if accounts.is_empty() {
        return Err(format!("process {process} uses no CUDA device that is visible here").into());
    }
    for account in &accounts {
        write_account(process, account)?;
    }
    Ok(Outcome::Good)
}

fn write_account(process: u32, account: &Account) -> io::Result<()> {
    let Account { device, used_bytes, total_bytes, rows } = account;
    if is_json() {
        return writeln!(out(), "{}", joined([json!({"process": process}), json!(account)]));
    }
    let (used, total) = (near(*used_bytes), near(*total_bytes));
    writeln!(out(), "cuda:{device}: {used} of {total} MiB used, as seen by process {process}")?;
    let cells = |row: &OwnedBytes| {
        let share = 100.0 * row.bytes as f64 / (*used_bytes).max(1) as f64;
        let (bytes, share) = (signed_near(row.bytes), format!("{share:.1}"));
        vec![row.owner.clone(), row.kind.clone(), bytes, share, row.found_by.clone()]
    };
    let heading = columns("owner | kind | MiB: | % of used: | found by");
    table(&mut out(), &heading, &rows.iter().map(cells).collect::<Vec<_>>())
}

/// Asks a process for its account.
#[cfg(target_os = "linux")]
fn asked(process: u32) -> Result<Vec<Account>, String> {
    parsed(&request::text_of(process).map_err(|error| error.to_string())?)
}

#[cfg(not(target_os = "linux"))]
fn asked(_: u32) -> Result<Vec<Account>, String> {
    Err("only on Linux".to_owned())
}

fn parsed(text: &[u8]) -> Result<Vec<Account>, String> {
    match serde_json::from_slice(text).map_err(|error| format!("it sent no account: {error}"))? {
        Sent::Error { error } => Err(error),
        Sent::Accounts { accounts } => Ok(accounts),
    }
}

/// Returns what the devices' lists of processes contain, for those that list `process`.
fn from_outside(process: u32, devices: &[Device]) -> Vec<Account> {
    let mut accounts = Vec::new();
    for device in devices {
        let Device::Cuda(number) = *device else {
            continue;
        };
        match account_from_outside(process, number, *device) {
            Ok(account) => accounts.extend(account),
            // A full device has no room for the context of this program.
            Err(error) => write_note(format_args!("{device}: {error}")),
        }
    }
    accounts
}

fn account_from_outside(
    process: u32,
    number: u32,
    device: Device,
) -> Result<Option<Account>, DriverError> {
    let opened = device.open(None)?;
    let driver = &*opened.driver;
    let Some(processes) = driver.processes() else {
        return Ok(None);
    };
    let memory = driver.memory_info()?;
    let rows = rows_from_outside(process, std::process::id(), &processes.list()?);
    Ok(rows.map(|rows| account_of(number, memory.total_bytes, memory.free_bytes, rows)))
}

/// The rows of other processes, and the bytes of this program's own context.
struct FromOutside {
    rows: Vec<OwnedBytes>,
    own_bytes: u64,
}

/// Returns the rows of an account from a list of processes, or `None` if `process` is not in it. This
/// program, `own`, is in the list with the bytes of a bare context. If it is not, the list has the numbers of
/// another pid namespace, as it may in a container, and names other processes.
fn rows_from_outside(process: u32, own: u32, list: &[ProcessUsage]) -> Option<FromOutside> {
    let bytes: BTreeMap<u32, u64> =
        list.iter().map(|usage| (usage.process, usage.used_bytes)).collect();
    let (all, own_bytes) = (*bytes.get(&process)?, *bytes.get(&own)?);
    let context = own_bytes.min(all);
    let row = |owner: String, kind: &str, bytes: u64, found_by: &str| OwnedBytes {
        owner,
        kind: kind.to_owned(),
        bytes: i64::try_from(bytes).unwrap_or(i64::MAX),
        found_by: found_by.to_owned(),
    };
    let mut rows = Vec::new();
    if context > 0 {
        let kind = "of a process that does nothing";
        rows.push(row("context".to_owned(), kind, context, "a bare process"));
    }
    let owner = format!("process {process}");
    rows.push(row(owner, "allocators, libraries and kernels", all - context, "process list"));
    let others = bytes.iter().filter(|(other, _)| ![process, own].contains(other));
    let others = others
        .map(|(other, bytes)| row(format!("process {other}"), "all of it", *bytes, "process list"));
    rows.extend(others);
    Some(FromOutside { rows, own_bytes })
}

/// Returns the account with the rows and the remainder. This program's own context is not counted.
fn account_of(number: u32, total_bytes: u64, free_bytes: u64, found: FromOutside) -> Account {
    let FromOutside { mut rows, own_bytes } = found;
    let used_bytes = total_bytes.saturating_sub(free_bytes).saturating_sub(own_bytes);
    let owned: i64 = rows.iter().map(|row| row.bytes).sum();
    let bytes = i64::try_from(used_bytes).unwrap_or(i64::MAX).saturating_sub(owned);
    let (owner, found_by) = ("unknown".to_owned(), "remainder".to_owned());
    rows.push(OwnedBytes { owner, kind: String::new(), bytes, found_by });
    Account { device: number.into(), used_bytes, total_bytes, rows }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    #[test]
    fn an_account_from_outside_adds_up_and_leaves_this_program_out() {
        let usage = |process, near| ProcessUsage { process, used_bytes: near * MIB };
        let list = [usage(7, 3000), usage(8, 500), usage(9, 600)];
        let found = rows_from_outside(7, 8, &list).expect("it is listed");
        let account = account_of(0, 80_000 * MIB, 75_800 * MIB, found);
        let rows: Vec<_> =
            account.rows.iter().map(|row| (row.owner.as_str(), row.bytes / MIB as i64)).collect();
        let expected =
            [("context", 500), ("process 7", 2500), ("process 9", 600), ("unknown", 100)];
        assert_eq!((account.used_bytes / MIB, rows), (3700, expected.to_vec()));
        assert!(rows_from_outside(6, 8, &list).is_none());
        assert!(rows_from_outside(7, 6, &list).is_none(), "the list has other numbers");
    }

    #[test]
    fn a_text_that_is_no_account_is_refused() {
        let row = json!({"owner": "a", "kind": "", "bytes": -5, "found_by": "b"});
        let account = |row: serde_json::Value| {
            let one = json!({"device": 0, "used_bytes": 1, "total_bytes": 2, "rows": [row]});
            json!({ "accounts": [one] })
        };
        let parsed = |sent: &serde_json::Value| parsed(sent.to_string().as_bytes());
        let parsed_rows = parsed(&account(row)).expect("it is one");
        assert_eq!(parsed_rows[0].rows[0].bytes, -5);
        for sent in [json!({}), json!([]), account(json!({"owner": 5})), json!({"accounts": [{}]})]
        {
            let error = parsed(&sent).expect_err("it is no account");
            assert!(error.starts_with("it sent no account"), "{sent}: {error}");
        }
        assert_eq!(parsed(&json!({"error": "busy"})), Err("busy".to_owned()));
    }
}
