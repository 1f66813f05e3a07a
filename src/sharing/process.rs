//! Identity of a process: its id and its start time, so that a reused id is detected.

use std::fs;

/// A process of this machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct ProcessMark {
    /// The process id, in the pid namespace of that process.
    pub(crate) process: u32,
    /// The start time in clock ticks since boot. 0 if it is not known.
    pub(crate) started: u64,
}

impl ProcessMark {
    /// Returns the identity of this process.
    pub(crate) fn own() -> Self {
        let process = std::process::id();
        Self { process, started: started("self").unwrap_or(0) }
    }

    pub(crate) fn is_own(&self) -> bool {
        *self == Self::own()
    }

    /// Returns false if `/proc` lists processes, but none with this id and start time. The process has
    /// then ended, or is in another pid namespace.
    pub(super) fn may_live(&self) -> bool {
        match started(&self.process.to_string()) {
            Some(started) => self.started == 0 || started == self.started,
            // If `/proc` does not list the calling process either, `/proc` is not available.
            None => started("self").is_none(),
        }
    }
}

/// Returns the start time, field 22 of `/proc/PROCESS/stat`. The fields are counted from the last
/// parenthesis, because the name in field 2 may contain any characters. Returns `None` for a process
/// that has ended.
///
/// Source: `proc_pid_stat(5)`.
fn started(process: &str) -> Option<u64> {
    let text = fs::read(format!("/proc/{process}/stat")).ok()?;
    let after_name = text.iter().rposition(|byte| *byte == b')')? + 1;
    let text = str::from_utf8(&text[after_name..]).ok()?;
    let mut fields = text.split_ascii_whitespace();
    // A zombie has closed its files, so it counts as ended.
    let state = fields.next()?;
    (!matches!(state, "Z" | "X")).then(|| fields.nth(18)?.parse().ok())?
}

#[cfg(test)]
mod tests {
    use super::*;

    #[cfg(target_os = "linux")]
    #[test]
    fn a_process_is_identified_by_its_id_and_its_start() {
        let own = ProcessMark::own();
        assert!(own.started > 0 && own.is_own() && own.may_live());
        assert!(!ProcessMark { started: own.started + 1, ..own }.may_live());
        assert!(!ProcessMark { process: u32::MAX, ..own }.may_live());
    }
}
