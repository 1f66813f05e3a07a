//! Finds the frames in which a thread starts, where these have the name of another function.
//!
//! The functions with which libc starts a thread are not exported. An unwinder without debug information
//! names such a frame after the exported function that lies before it in the library, such as `__xmknodat`.
//! These names depend on the build of libc, so the frames are found by their position and form.

use super::frames::{FrameKind, Runtime};
use super::stacks::Stacks;

/// The number of libc's frames in which a thread starts: the system call and the function that runs the
/// thread.
const THREAD_FRAMES: usize = 2;

/// The properties of a frame that decide.
#[derive(Clone, Copy, Default)]
struct EntryMarks {
    /// A compiled function without a file, with the name of a function in C.
    may_be_entry: bool,
    /// A function that starts a process or a thread by its own name.
    is_system: bool,
    /// A function of C++.
    is_cpp: bool,
}

/// Returns for each frame whether it is the start of a thread: in each of its stacks it is one of the two
/// outermost frames, has no file, has a name of C, and there is a frame of C++ further in. Without one the
/// program itself may be written in C.
#[must_use]
pub fn thread_entries(stacks: &Stacks) -> Vec<bool> {
    let marks = |number| {
        let frame = stacks.frame(number);
        let kind = frame.kind();
        let has_file = !matches!(frame.file, "" | "??") && !frame.file.ends_with(".o");
        let is_plain = !frame.function.contains([':', '(', '<', ' ']);
        let is_entry_by_name = frame.function == "main" || frame.function.starts_with("_Z");
        EntryMarks {
            may_be_entry: kind == FrameKind::Compiled && !has_file && is_plain && !is_entry_by_name,
            is_system: kind == FrameKind::Runtime(Runtime::System),
            is_cpp: frame.function.contains("::") || frame.function.starts_with("_Z"),
        }
    };
    let marks: Vec<EntryMarks> = (0..stacks.frame_count()).map(marks).collect();
    let mut is_entry: Vec<bool> = marks.iter().map(|mark| mark.may_be_entry).collect();
    if !is_entry.contains(&true) {
        return is_entry;
    }
    for stack in stacks.ids() {
        let numbers = stacks.frame_numbers(stack);
        let has_cpp = numbers.iter().any(|&number| marks[number as usize].is_cpp);
        let mut entries_left = if has_cpp { THREAD_FRAMES } else { 0 };
        for &number in numbers.iter().rev() {
            let mark = marks[number as usize];
            let is_start = mark.may_be_entry || mark.is_system;
            entries_left = if is_start { entries_left } else { 0 };
            if entries_left == 0 {
                is_entry[number as usize] = false;
            }
            entries_left = entries_left.saturating_sub(1);
        }
    }
    is_entry
}
