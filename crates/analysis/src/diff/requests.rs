//! Aligns the requests of two recordings, so that an inserted request does not make all later ones differ.
//!
//! A part with few differences gets the alignment with the fewest (E. Myers, "An O(ND) difference
//! algorithm"). A part with more is divided at runs of requests that both recordings have, and the parts
//! between are aligned in the same way. So the time is at most some thousand steps for each request,
//! and the memory is proportional to the number of requests.

use std::hash::Hash;
use std::ops::Range;

use hashbrown::HashMap;

/// The most differences of a part for which the best alignment is searched.
pub(crate) const DIFFERENCES_MAX: usize = 512;

/// The lengths of runs at which a part is divided, if it has too many differences. The shorter one is used
/// where the longer one divides no further.
const RUNS: [usize; 2] = [16, 1];

/// The differences between the requests of two recordings.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RequestDiff {
    /// The requests that both recordings have.
    pub same: usize,
    /// Pairs of requests at the same place that differ.
    pub changed: usize,
    /// The requests that only the first and only the second recording have.
    pub only: [usize; 2],
    /// The requests that differ, in order: those of the first recording, and those of the second in their
    /// place. One of the two ranges may be empty.
    pub places: Vec<[Range<usize>; 2]>,
}

/// Recordings with fewer requests are not judged by the number of those that are the same.
const JUDGED_MIN: usize = 20;

impl RequestDiff {
    /// Returns true if less than a tenth of the requests are the same.
    #[must_use]
    pub fn are_unrelated(&self) -> bool {
        let most = self.same + self.changed + self.only[0].max(self.only[1]);
        most >= JUDGED_MIN && self.same < most / 10
    }

    /// Compares two lists of requests, each given by the values in which equal requests agree.
    pub(super) fn of<K: Copy + Eq + Hash>(keys: [&[K]; 2]) -> Self {
        let mut known: HashMap<K, u32> = HashMap::new();
        let mut token = |key: &K| {
            let new = u32::try_from(known.len()).unwrap_or(u32::MAX);
            *known.entry(*key).or_insert(new)
        };
        let tokens = keys.map(|keys| keys.iter().map(&mut token).collect::<Vec<u32>>());
        let [a, b] = [&tokens[0], &tokens[1]];
        let mut alignment = Alignment { a, b, pairs: Vec::new() };
        alignment.align(0..a.len(), 0..b.len(), &RUNS);
        let mut found = Self { same: alignment.pairs.len(), ..Self::default() };
        let mut next = [0, 0];
        let ends = std::iter::once([a.len(), b.len()]);
        for [at_a, at_b] in alignment.pairs.into_iter().chain(ends) {
            let place = [next[0]..at_a, next[1]..at_b];
            next = [at_a + 1, at_b + 1];
            let [in_a, in_b] = [place[0].len(), place[1].len()];
            if in_a + in_b > 0 {
                let changed = in_a.min(in_b);
                found.changed += changed;
                found.only[0] += in_a - changed;
                found.only[1] += in_b - changed;
                found.places.push(place);
            }
        }
        found
    }
}

/// Two lists of tokens, and the pairs of indices of equal tokens found so far, in rising order of both.
struct Alignment<'a> {
    a: &'a [u32],
    b: &'a [u32],
    pairs: Vec<[usize; 2]>,
}

impl Alignment<'_> {
    /// Adds the pairs of a part of both lists. The part is divided at runs of the lengths in `runs`.
    fn align(&mut self, mut a: Range<usize>, mut b: Range<usize>, runs: &[usize]) {
        while !a.is_empty() && !b.is_empty() && self.a[a.start] == self.b[b.start] {
            self.pairs.push([a.start, b.start]);
            (a.start, b.start) = (a.start + 1, b.start + 1);
        }
        let ends = self.a[a.clone()].iter().rev().zip(self.b[b.clone()].iter().rev());
        let common = ends.take_while(|(a, b)| a == b).count();
        (a.end, b.end) = (a.end - common, b.end - common);
        if !a.is_empty() && !b.is_empty() {
            let same = |x: usize, y: usize| self.a[a.start + x] == self.b[b.start + y];
            match fewest([a.len(), b.len()], same) {
                Some(pairs) => {
                    self.pairs.extend(pairs.into_iter().map(|[x, y]| [a.start + x, b.start + y]));
                }
                None => self.divide(a.clone(), b.clone(), runs),
            }
        }
        self.pairs.extend((a.end..).zip(b.end..).take(common).map(|(a, b)| [a, b]));
    }

    /// Divides a part at runs that both lists have, and aligns the parts between them.
    fn divide(&mut self, a: Range<usize>, b: Range<usize>, runs: &[usize]) {
        let Some((length, shorter)) = runs.split_first() else { return };
        let common = common_runs(&self.a[a.clone()], &self.b[b.clone()], *length);
        if common.is_empty() {
            return self.divide(a, b, shorter);
        }
        let mut next = [a.start, b.start];
        for [x, y] in common {
            let [x, y] = [a.start + x, b.start + y];
            if x > next[0] || y > next[1] {
                self.align(next[0]..x, next[1]..y, shorter);
            }
            self.pairs.push([x, y]);
            next = [x + 1, y + 1];
        }
        self.align(next[0]..a.end, next[1]..b.end, shorter);
    }
}

/// Returns the pairs of the alignment with the fewest differences of two lists with these lengths, in order.
/// `same` returns true if an item of the first list may be aligned with one of the second. Returns `None` if
/// there are more than [`DIFFERENCES_MAX`] differences.
pub(crate) fn fewest(
    [a, b]: [usize; 2],
    same: impl Fn(usize, usize) -> bool,
) -> Option<Vec<[usize; 2]>> {
    if a.abs_diff(b) > DIFFERENCES_MAX {
        return None;
    }
    // With `d` differences, the furthest index in `a` on each diagonal from `-d` to `d` in steps of 2.
    // Diagonal `k` has the pairs of indices `x` and `x - k`. `None` if the diagonal cannot be reached.
    let mut furthest: Vec<Vec<Option<usize>>> = Vec::new();
    let reached = |furthest: &[Vec<Option<usize>>], d: usize, at: usize| {
        // `at` counts the diagonals from `-d` on: it is `at - 1` and `at` of the diagonals with `d - 1`.
        let Some(before) = d.checked_sub(1).map(|d| &furthest[d]) else { return Some((0, false)) };
        let is_inside = |x: usize| x <= a && x + d >= 2 * at && x + d - 2 * at <= b;
        let removed = at.checked_sub(1).and_then(|at| before[at]).map(|x| x + 1);
        let removed = removed.filter(|x| is_inside(*x));
        let added = before.get(at).copied().flatten().filter(|x| is_inside(*x));
        match (removed, added) {
            (Some(removed), added) if added.is_none_or(|added| removed > added) => {
                Some((removed, true))
            }
            (_, added) => added.map(|added| (added, false)),
        }
    };
    for d in 0..=DIFFERENCES_MAX {
        let mut row = Vec::with_capacity(d + 1);
        for at in 0..=d {
            let end = reached(&furthest, d, at).map(|(x, _)| {
                let both = (x..a).zip(x + d - 2 * at..b);
                x + both.take_while(|(x, y)| same(*x, *y)).count()
            });
            row.push(end);
            if end == Some(a) && a + d - 2 * at == b {
                furthest.push(row);
                let mut pairs = back(&furthest, at, reached);
                pairs.reverse();
                return Some(pairs);
            }
        }
        furthest.push(row);
    }
    None
}

/// Follows the path back from the end. `at` is its diagonal there. Returns its pairs, the last one first.
fn back(
    furthest: &[Vec<Option<usize>>],
    mut at: usize,
    reached: impl Fn(&[Vec<Option<usize>>], usize, usize) -> Option<(usize, bool)>,
) -> Vec<[usize; 2]> {
    let mut pairs = Vec::new();
    for d in (0..furthest.len()).rev() {
        let Some((end, (start, is_removed))) = furthest[d][at].zip(reached(furthest, d, at)) else {
            break;
        };
        pairs.extend((start..end).rev().map(|x| [x, x + d - 2 * at]));
        at -= usize::from(is_removed);
    }
    pairs
}

/// Returns the starts of runs of `length` tokens that both lists have, rising in both. The runs may
/// overlap. Of a run that occurs several times, the first occurrence in one list belongs to the first in
/// the other, and so on.
fn common_runs(a: &[u32], b: &[u32], length: usize) -> Vec<[usize; 2]> {
    const NONE: u32 = u32::MAX;
    let mut first: HashMap<&[u32], u32> = HashMap::new();
    // The next occurrence of the run that begins at each index of `b`.
    let mut later = vec![NONE; b.len()];
    for (from, run) in b.windows(length).enumerate().rev() {
        let at = u32::try_from(from).unwrap_or(NONE);
        later[from] = first.insert(run, at).unwrap_or(NONE);
    }
    let mut pairs: Vec<[usize; 2]> = Vec::new();
    for (x, run) in a.windows(length).enumerate() {
        if let Some(at) = first.get_mut(run).filter(|at| **at != NONE) {
            let y = *at as usize;
            *at = later[y];
            pairs.push([x, y]);
        }
    }
    longest_rising(&pairs)
}

/// Returns the longest part of the pairs in which the second numbers rise. The first ones rise already.
fn longest_rising(pairs: &[[usize; 2]]) -> Vec<[usize; 2]> {
    // For each length, the pair with the smallest second number at which a rising part of that length ends.
    let mut ends: Vec<usize> = Vec::new();
    let mut before: Vec<Option<usize>> = Vec::with_capacity(pairs.len());
    for (at, [_, y]) in pairs.iter().enumerate() {
        let length = ends.partition_point(|end| pairs[*end][1] < *y);
        before.push(length.checked_sub(1).map(|shorter| ends[shorter]));
        if length == ends.len() {
            ends.push(at);
        } else {
            ends[length] = at;
        }
    }
    let last = ends.last().copied();
    let mut found: Vec<_> =
        std::iter::successors(last, |at| before[*at]).map(|at| pairs[at]).collect();
    found.reverse();
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use quickcheck::quickcheck;

    fn diff(a: &[u8], b: &[u8]) -> RequestDiff {
        RequestDiff::of([a, b])
    }

    #[test]
    fn an_inserted_request_is_one_difference() {
        let found = diff(b"abcabcabc", b"abcaXbcabc");
        assert_eq!((found.same, found.changed, found.only), (9, 0, [0, 1]));
        assert_eq!(found.places, [[4..4, 4..5]]);
    }

    #[test]
    fn a_changed_a_removed_and_an_inserted_request_are_told_apart() {
        let found = diff(b"abcdefgh", b"aXcdfghY");
        assert_eq!((found.same, found.changed, found.only), (6, 1, [1, 1]));
        assert_eq!(found.places, [[1..2, 1..2], [4..5, 4..4], [8..8, 7..8]]);
    }

    #[test]
    fn equal_lists_and_lists_without_a_common_request_are_compared() {
        assert_eq!(diff(b"abc", b"abc"), RequestDiff { same: 3, ..RequestDiff::default() });
        let found = diff(b"aaa", b"bb");
        assert_eq!((found.same, found.changed, found.only), (0, 2, [1, 0]));
        assert_eq!(diff(b"", b"b").only, [0, 1]);
    }

    /// The lengths of longest common subsequences, computed for all pairs of prefixes.
    fn longest_common(a: &[u8], b: &[u8]) -> usize {
        let mut lengths = vec![vec![0; b.len() + 1]; a.len() + 1];
        for (i, x) in a.iter().enumerate() {
            for (j, y) in b.iter().enumerate() {
                lengths[i + 1][j + 1] = match x == y {
                    true => lengths[i][j] + 1,
                    false => lengths[i + 1][j].max(lengths[i][j + 1]),
                };
            }
        }
        lengths[a.len()][b.len()]
    }

    quickcheck! {
        fn few_differences_have_the_best_alignment(a: Vec<u8>, b: Vec<u8>) -> bool {
            let [a, b] = [a, b].map(|list| list.into_iter().map(|x| x % 4).collect::<Vec<u8>>());
            let found = diff(&a, &b);
            let mut rests = [a.clone(), b.clone()];
            for place in found.places.iter().rev() {
                (0..2).for_each(|side| drop(rests[side].drain(place[side].clone())));
            }
            rests[0] == rests[1] && found.same == rests[0].len() && found.same == longest_common(&a, &b)
        }
    }

    /// A program with 50 equal steps of 1,000 different requests.
    fn steps() -> Vec<u32> {
        (0..50_000).map(|at| at % 1000).collect()
    }

    #[test]
    fn many_inserted_requests_before_repeated_steps_are_one_difference() {
        let a = steps();
        let b: Vec<u32> = (10_000..15_000).chain(steps()).collect();
        let found = RequestDiff::of([&a, &b]);
        assert_eq!((found.same, found.only, found.places.len()), (50_000, [0, 5000], 1));
        // A missing step is found as well.
        let found = RequestDiff::of([&a, &a[1000..]]);
        assert_eq!((found.same, found.only, found.places.len()), (49_000, [1000, 0], 1));
    }

    #[test]
    fn requests_that_did_not_change_are_found_between_many_that_did() {
        let a = steps();
        let grown = |at: u32| if at.is_multiple_of(3) { at } else { at + 1_000_000 };
        let b: Vec<u32> = a.iter().map(|at| grown(*at)).collect();
        let found = RequestDiff::of([&a, &b]);
        assert_eq!((found.same, found.changed, found.only), (16_700, 33_300, [0, 0]));
    }
}
