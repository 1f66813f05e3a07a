//! Finds the same code in two recordings, although it may have moved to other lines between them.
//!
//! A frame is the same if its file, without the folders that labels omit, and its function are the same and
//! its line corresponds to the other recording's. Lines of a function that differ between the recordings are
//! paired in their order: first lines whose requests have the same sizes, then equal lines, then the others.

use std::collections::{BTreeMap, HashMap};

use super::Request;
use crate::{Callers, Category};
use stratalloc_recording::Frame;

/// The code of two recordings: a number for each caller of either. Callers with the same code have the same
/// number.
#[derive(Debug)]
pub(super) struct Codes {
    of_callers: [Vec<u32>; 2],
}

/// The number of different sizes that are compared for each line of code.
const SIZES_MAX: usize = 8;

/// The lines of two functions are paired by size if the product of their numbers is at most this. Otherwise
/// only equal lines are paired.
const PAIRS_MAX: usize = 1 << 13;

/// The lines of one function that are in stacks, each with sizes that they requested.
type Lines = BTreeMap<u32, Vec<u64>>;

impl Codes {
    pub(super) fn of(callers: [&Callers<'_>; 2], requests: [&[Request]; 2]) -> Self {
        let frames = callers.map(Callers::short_frames);
        let mut functions: BTreeMap<(&str, &str), [Lines; 2]> = BTreeMap::new();
        for side in 0..2 {
            let sizes = sizes_of(callers[side], requests[side]);
            for (caller, sizes) in (0..).zip(&sizes) {
                for number in callers[side].frames(caller) {
                    let Frame { file, line, function } = frames[side][number as usize];
                    let lines = &mut functions.entry((file, function)).or_default()[side];
                    add_sizes(lines.entry(line).or_default(), sizes);
                }
            }
        }
        let mut numbers: HashMap<(&str, &str, u32), [u32; 2]> = HashMap::new();
        let mut count = 0;
        for ((file, function), [a, b]) in &functions {
            for pair in pairs(a, b) {
                for (side, line) in pair.into_iter().enumerate() {
                    if let Some(line) = line {
                        numbers.entry((file, function, line)).or_default()[side] = count;
                    }
                }
                count += 1;
            }
        }
        let mut known = HashMap::new();
        let of_callers = [0, 1].map(|side| {
            let number = |number: u32| {
                let Frame { file, line, function } = frames[side][number as usize];
                numbers[&(file, function, line)][side]
            };
            let code = |caller: u32| {
                let category = match callers[side].category(caller) {
                    Category::Activations => Category::Unknown,
                    category => category,
                };
                let frames: Vec<u32> = callers[side].frames(caller).map(number).collect();
                let new = u32::try_from(known.len()).unwrap_or(u32::MAX);
                *known.entry((frames, category, callers[side].bare(caller))).or_insert(new)
            };
            (0..callers[side].count()).map(code).collect()
        });
        Self { of_callers }
    }

    /// Returns the number of a caller's code. `side` is 0 or 1.
    pub(super) fn of_caller(&self, side: usize, caller: u32) -> u32 {
        self.of_callers[side][caller as usize]
    }
}

/// Returns some of the sizes that each caller requested.
fn sizes_of(callers: &Callers<'_>, requests: &[Request]) -> Vec<Vec<u64>> {
    let mut sizes = vec![Vec::new(); callers.count() as usize];
    for request in requests {
        if let Some(stack) = request.stack {
            add_sizes(&mut sizes[callers.of_stack(stack) as usize], &[request.bytes]);
        }
    }
    sizes
}

fn add_sizes(to: &mut Vec<u64>, sizes: &[u64]) {
    for size in sizes {
        if to.len() < SIZES_MAX && !to.contains(size) {
            to.push(*size);
        }
    }
}

/// Pairs the lines of a function in two recordings, in their order. A line without a counterpart is in a
/// pair of its own.
fn pairs(a: &Lines, b: &Lines) -> Vec<[Option<u32>; 2]> {
    let is_same = a.keys().eq(b.keys());
    if is_same || a.len() * b.len() > PAIRS_MAX {
        let alone = b.keys().filter(|line| !a.contains_key(line)).map(|line| [None, Some(*line)]);
        let pair = |line: &u32| [Some(*line), Some(*line).filter(|line| b.contains_key(line))];
        return a.keys().map(pair).chain(alone).collect();
    }
    let a: Vec<(u32, &Vec<u64>)> = a.iter().map(|(line, sizes)| (*line, sizes)).collect();
    let b: Vec<(u32, &Vec<u64>)> = b.iter().map(|(line, sizes)| (*line, sizes)).collect();
    let score = |i: usize, j: usize| {
        let shared = a[i].1.iter().filter(|size| b[j].1.contains(size)).count();
        4 * shared + 2 * usize::from(a[i].0 == b[j].0) + 1
    };
    // The best sum of scores for the lines from `i` and from `j` on.
    let mut best = vec![vec![0; b.len() + 1]; a.len() + 1];
    for i in (0..a.len()).rev() {
        for j in (0..b.len()).rev() {
            let paired = score(i, j) + best[i + 1][j + 1];
            best[i][j] = paired.max(best[i + 1][j]).max(best[i][j + 1]);
        }
    }
    let (mut i, mut j) = (0, 0);
    let mut found = Vec::new();
    while i < a.len() || j < b.len() {
        let both = i < a.len() && j < b.len();
        let pair = match both {
            true if best[i][j] == score(i, j) + best[i + 1][j + 1] => [true, true],
            true if best[i][j] == best[i][j + 1] => [false, true],
            true => [true, false],
            false => [i < a.len(), j < b.len()],
        };
        found.push([pair[0].then(|| a[i].0), pair[1].then(|| b[j].0)]);
        i += usize::from(pair[0]);
        j += usize::from(pair[1]);
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(of: &[(u32, &[u64])]) -> Lines {
        of.iter().map(|(line, sizes)| (*line, sizes.to_vec())).collect()
    }

    #[test]
    fn lines_are_paired_by_the_sizes_that_they_request() {
        let a = lines(&[(10, &[4]), (11, &[8])]);
        let moved = lines(&[(12, &[4]), (13, &[8])]);
        let paired = |a, b| [Some(a), Some(b)];
        assert_eq!(pairs(&a, &moved), [paired(10, 12), paired(11, 13)]);
        let inserted = lines(&[(10, &[4]), (11, &[1000]), (12, &[8])]);
        assert_eq!(pairs(&a, &inserted), [paired(10, 10), [None, Some(11)], paired(11, 12)]);
        assert_eq!(pairs(&inserted, &a), [paired(10, 10), [Some(11), None], paired(12, 11)]);
        let other_sizes = lines(&[(10, &[5]), (11, &[9]), (30, &[7])]);
        assert_eq!(pairs(&a, &other_sizes), [paired(10, 10), paired(11, 11), [None, Some(30)]]);
        assert_eq!(pairs(&a, &a), [paired(10, 10), paired(11, 11)]);
        assert_eq!(pairs(&Lines::new(), &a), [[None, Some(10)], [None, Some(11)]]);
    }

    #[test]
    fn functions_with_very_many_lines_are_compared_line_by_line() {
        let many = |from: u32| (from..from + 400).map(|line| (line, vec![8])).collect::<Lines>();
        let found = pairs(&many(0), &many(1));
        assert_eq!((found[0], found[1]), ([Some(0), None], [Some(1), Some(1)]));
        assert_eq!((found.len(), found[400]), (401, [None, Some(400)]));
    }
}
