//! The reader's position in the snapshot, for error messages: `device_traces[0][17].size`.
//!
//! A step is added before an item is read, and removed after the item was read without error. So after a
//! failure the path leads to the item that failed.

use std::fmt;

enum PathStep {
    Key(&'static str),
    Index(usize),
}

/// The steps from the root to the reader's position.
#[derive(Default)]
pub(super) struct Path {
    steps: Vec<PathStep>,
}

impl Path {
    pub(super) fn enter_key(&mut self, key: &'static str) {
        self.steps.push(PathStep::Key(key));
    }

    pub(super) fn enter_index(&mut self, index: usize) {
        self.steps.push(PathStep::Index(index));
    }

    pub(super) fn leave(&mut self) {
        self.steps.pop();
    }
}

impl fmt::Display for Path {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.steps.is_empty() {
            return f.write_str("the snapshot");
        }
        for (i, step) in self.steps.iter().enumerate() {
            match step {
                PathStep::Key(key) if i == 0 => f.write_str(key)?,
                PathStep::Key(key) => write!(f, ".{key}")?,
                PathStep::Index(index) => write!(f, "[{index}]")?,
            }
        }
        Ok(())
    }
}
