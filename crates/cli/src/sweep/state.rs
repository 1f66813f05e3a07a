//! The state file of a sweep: a line of JSON for each finished piece of work.
//!
//! Each line has a key, which is a hash of the inputs of the work, and a checksum of key and result. A line
//! whose checksum is wrong is ignored, so its work is done again. Lines are only appended, each with one
//! call. So an interrupted program leaves at most its last line incomplete.

use std::collections::HashMap;
use std::fs::{File, OpenOptions};
use std::io::{self, BufRead, BufReader, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use parking_lot::Mutex;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use stratalloc_analysis::Fingerprint;

/// The first line of every state file.
const HEADER: &str = "{\"format\":\"stratalloc sweep state\",\"version\":1}";
/// Longer lines are ignored.
const LINE_MAX_BYTES: u64 = 1 << 20;

/// A line of the file. `result` is the result as JSON in a string, so that the checksum is that of its bytes.
#[derive(Serialize, Deserialize)]
struct StateLine {
    key: Fingerprint,
    check: Fingerprint,
    result: String,
}

impl StateLine {
    fn new(key: Fingerprint, result: String) -> Self {
        Self { check: Self::check(&key, &result), key, result }
    }

    fn check(key: &Fingerprint, result: &str) -> Fingerprint {
        Fingerprint::of_texts(&[HEADER, key.as_str(), result])
    }
}

/// The results of finished work, from a file or from this run.
#[derive(Debug, Default)]
pub(super) struct State {
    known: HashMap<Fingerprint, String>,
    file: Option<(PathBuf, Mutex<File>)>,
}

impl State {
    /// Opens a state file, or creates it if there is none.
    ///
    /// # Errors
    ///
    /// [`io::Error`] when the file cannot be read and written, or is not empty and no state file.
    pub(super) fn open(path: &Path) -> io::Result<Self> {
        let named = |error: io::Error| in_file(path, &error);
        let open = OpenOptions::new().read(true).append(true).create(true).open(path);
        let mut file = open.map_err(named)?;
        let (known, is_whole) = read(&file).map_err(named)?;
        file.seek(SeekFrom::End(0)).map_err(named)?;
        let begin = match is_whole {
            None => format!("{HEADER}\n"),
            Some(true) => String::new(),
            Some(false) => "\n".to_owned(),
        };
        file.write_all(begin.as_bytes()).map_err(named)?;
        Ok(Self { known, file: Some((path.to_owned(), Mutex::new(file))) })
    }

    /// Returns the result of earlier work with the same inputs.
    pub(super) fn known<T: DeserializeOwned>(&self, key: &Fingerprint) -> Option<T> {
        serde_json::from_str(self.known.get(key)?).ok()
    }

    /// Returns true if the result of earlier work is known.
    pub(super) fn has(&self, key: &Fingerprint) -> bool {
        self.known.contains_key(key)
    }

    /// Adds the result of finished work to the file.
    ///
    /// # Errors
    ///
    /// [`io::Error`] when the file cannot be written.
    pub(super) fn add<T: Serialize>(&self, key: Fingerprint, result: &T) -> io::Result<()> {
        let Some((path, file)) = &self.file else { return Ok(()) };
        let mut line = serde_json::to_string(&StateLine::new(key, serde_json::to_string(result)?))?;
        line.push('\n');
        file.lock().write_all(line.as_bytes()).map_err(|error| in_file(path, &error))
    }
}

fn in_file(path: &Path, error: &io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("state file {}: {error}", path.display()))
}

type Known = HashMap<Fingerprint, String>;

/// Returns the undamaged lines of a file, and whether its last line is complete; `None` for an empty file.
fn read(file: &File) -> io::Result<(Known, Option<bool>)> {
    let mut known = HashMap::new();
    let (mut lines, mut line) = (BufReader::new(file), Vec::new());
    let mut is_whole = None;
    loop {
        line.clear();
        lines.by_ref().take(LINE_MAX_BYTES).read_until(b'\n', &mut line)?;
        let Some(last) = line.last() else { return Ok((known, is_whole)) };
        let is_first = is_whole.is_none();
        is_whole = Some(*last == b'\n');
        if is_first && line.strip_suffix(b"\n") != Some(HEADER.as_bytes()) {
            let text = format!("it was not written by `sweep`: its first line is not {HEADER}");
            return Err(io::Error::new(io::ErrorKind::InvalidData, text));
        }
        if let Ok(StateLine { key, check, result }) = serde_json::from_slice(&line)
            && check == StateLine::check(&key, &result)
        {
            known.insert(key, result);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(name: &str, bytes: &[u8]) -> PathBuf {
        let path = std::env::temp_dir().join(format!("stratalloc-{name}-{}", std::process::id()));
        std::fs::write(&path, bytes).unwrap();
        path
    }

    #[test]
    fn damaged_lines_are_ignored_and_the_others_are_known() {
        let path = file("state", b"");
        let [a, b, c] = ["a", "b", "c"].map(|name| Fingerprint::of_texts(&[name]));
        let state = State::open(&path).unwrap();
        state.add(a.clone(), &1234567_u64).unwrap();
        state.add(b.clone(), &7654321_u64).unwrap();
        let whole = std::fs::read(&path).unwrap();
        // Any byte of the lines may be wrong, and the file may end anywhere behind its first line.
        for at in (HEADER.len() + 1..whole.len()).step_by(3) {
            let mut damaged = whole.clone();
            damaged[at] ^= 1;
            for bytes in [&damaged, &whole[..at]] {
                std::fs::write(&path, bytes).unwrap();
                let state = State::open(&path).unwrap();
                for (key, value) in [(&a, 1234567_u64), (&b, 7654321)] {
                    assert!([None, Some(value)].contains(&state.known(key)), "{at}");
                }
                assert!(
                    state.known::<u64>(&a).is_some()
                        || state.known::<u64>(&b).is_some()
                        || at < 200
                );
                state.add(c.clone(), &5_u64).unwrap();
                assert_eq!(State::open(&path).unwrap().known(&c), Some(5_u64), "{at}");
            }
        }
        std::fs::remove_file(path).unwrap();
    }

    #[test]
    fn other_files_are_refused_and_stay_as_they_are() {
        for bytes in [&b"model.py"[..], b"\n", b"{}\n", &[0xff; 3 << 20], &HEADER.as_bytes()[..9]] {
            let path = file("foreign", bytes);
            let error = State::open(&path).unwrap_err().to_string();
            assert!(error.contains("not written by `sweep`"), "{error}");
            assert_eq!(std::fs::read(&path).unwrap(), bytes);
            std::fs::remove_file(path).unwrap();
        }
        assert!(State::open(Path::new("/no/such/folder/state")).is_err());
    }
}
