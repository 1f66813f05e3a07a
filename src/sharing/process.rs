//! Which process it is: a number, and when it started, so that a reused number is noticed.

use std::fs;

/// A process of this machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct ProcessMark {
    /// Its number, as it sees itself.
    pub(crate) process: u32,
    /// When it started, in clock ticks since boot; 0 when the system does not say.
    pub(crate) started: u64,
}

impl ProcessMark {
    /// This very process.
    pub(crate) fn own() -> Self {
        let process = std::process::id();
        Self { process, started: started("self").unwrap_or(0) }
    }

    pub(crate) fn is_own(&self) -> bool {
        *self == Self::own()
    }

    /// Whether it may still be there: a process of that number that started then, as far as the
    /// system says.
    pub(super) fn may_live(&self) -> bool {
        match started(&self.process.to_string()) {
            Some(started) => self.started == 0 || started == self.started,
            // Without process files nothing is known.
            None => started("self").is_none(),
        }
    }
}

/// Field 22 of the process's state. The name before it may hold anything, also brackets.
///
/// Source: `proc_pid_stat(5)`.
fn started(process: &str) -> Option<u64> {
    let text = fs::read(format!("/proc/{process}/stat")).ok()?;
    let after_name = text.iter().rposition(|byte| *byte == b')')? + 1;
    let text = str::from_utf8(&text[after_name..]).ok()?;
    let mut fields = text.split_ascii_whitespace();
    // A process that ended and was not waited for has let go of its files.
    let state = fields.next()?;
    (!matches!(state, "Z" | "X")).then(|| fields.nth(18)?.parse().ok())?
}

#[cfg(test)]
mod tests {
    use super::*;

    #[cfg(target_os = "linux")]
    #[test]
    fn a_process_is_known_by_its_number_and_its_start() {
        let own = ProcessMark::own();
        assert!(own.started > 0 && own.is_own() && own.may_live());
        assert!(!ProcessMark { started: own.started + 1, ..own }.may_live());
        assert!(!ProcessMark { process: u32::MAX, ..own }.may_live());
    }
}
