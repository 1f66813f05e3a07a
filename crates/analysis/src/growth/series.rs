//! Decides whether bytes that live at the ends of steps grow steadily.
//!
//! What matters is the part that never goes away again: at each step's end, the least bytes from then on. A
//! buffer that is filled and emptied leaves this part flat; so does one large input.

/// The growth of a series.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Rate {
    /// The growth over `steps` steps.
    pub(super) grown: u64,
    /// The number of steps over which it was measured.
    pub(super) steps: usize,
    /// The first step with growth, from 1.
    pub(super) first_step: usize,
    /// The last step with growth.
    pub(super) last_step: usize,
}

impl Rate {
    /// Returns the growth of a step, rounded to a whole number.
    pub(super) fn each(&self) -> u64 {
        let steps = self.steps.max(1) as u64;
        self.grown.saturating_add(steps / 2) / steps
    }
}

/// The course of a series that has numbers at the begin of the first step and at the end of each step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Course {
    /// It grows until the end.
    Grows(Rate),
    /// It has grown by `bytes` between the first and the last of two steps, and not after.
    Filled { bytes: u64, in_steps: [usize; 2] },
    /// Neither.
    Level,
}

/// Returns the least number from each place on.
pub(super) fn kept(series: &[u64]) -> Vec<u64> {
    let mut kept = series.to_vec();
    for at in (1..kept.len()).rev() {
        kept[at - 1] = kept[at - 1].min(kept[at]);
    }
    kept
}

impl Course {
    /// Classifies a series by its [`kept`] numbers.
    ///
    /// It grows if it does so in each third of the last half of the steps (and of at least three), and if the
    /// time since it last grew is not much longer than the times between. If that fails, all steps but the
    /// first take the place of the last half: a leak at every tenth step grows rarely.
    pub(super) fn of(kept: &[u64]) -> Self {
        let Some(steps) = kept.len().checked_sub(1).filter(|steps| *steps > 3) else {
            return Self::Level;
        };
        let last_half = steps - (steps.div_ceil(2)).max(3);
        let rate = steady(kept, last_half.max(1)).or_else(|| steady(kept, 1));
        if let Some(rate) = rate {
            return Self::Grows(rate);
        }
        let Some(first_step) = grown_at(kept, 0).next() else { return Self::Level };
        let last_step = grown_at(kept, 0).last().unwrap_or(first_step);
        match steps - last_step >= (steps / 4).max(2) {
            true => {
                Self::Filled { bytes: kept[steps] - kept[0], in_steps: [first_step, last_step] }
            }
            false => Self::Level,
        }
    }
}

/// Returns the places after `from` at which the numbers have grown.
fn grown_at(kept: &[u64], from: usize) -> impl Iterator<Item = usize> {
    (from + 1..kept.len()).filter(|&at| kept[at] > kept[at - 1])
}

fn steady(kept: &[u64], from: usize) -> Option<Rate> {
    let steps = kept.len() - 1;
    let (length, grown) = (steps - from, kept[steps] - kept[from]);
    // Half of what a third would have if the growth were even.
    let is_third_enough = |third: usize| {
        let [begin, end] = [third, third + 1].map(|part| kept[from + length * part / 3]);
        (end - begin).saturating_mul(6) >= grown
    };
    if grown == 0 || length < 3 || !(0..3).all(is_third_enough) {
        return None;
    }
    let first = grown_at(kept, from).next()?;
    let (mut pause, mut last) = (first - from, first);
    for at in grown_at(kept, first) {
        pause = pause.max(at - last);
        last = at;
    }
    if steps - last > pause + 1 {
        return None;
    }
    // Steps before `from` that grew likewise.
    let mut first_step = last;
    for at in (1..=last).rev().filter(|&at| kept[at] > kept[at - 1]) {
        if first_step - at > 2 * pause {
            break;
        }
        first_step = at;
    }
    // From one step with growth to another, so that pauses between count whole.
    let (grown, steps) = match last - first {
        0 => (grown, length),
        between => (kept[last] - kept[first], between),
    };
    Some(Rate { grown, steps, first_step, last_step: last })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn course(series: impl IntoIterator<Item = u64>) -> Course {
        Course::of(&kept(&series.into_iter().collect::<Vec<_>>()))
    }

    fn each(course: Course) -> Option<(u64, usize)> {
        match course {
            Course::Grows(rate) => Some((rate.each(), rate.first_step)),
            Course::Filled { .. } | Course::Level => None,
        }
    }

    #[test]
    fn a_series_that_grows_at_every_or_every_third_step_grows() {
        assert_eq!(each(course((0..=40).map(|step| 100 + 12 * step))), Some((12, 1)));
        assert_eq!(each(course((0..=40).map(|step| 100 + 12 * (step / 3)))), Some((4, 3)));
        assert_eq!(each(course((0..=40).map(|step| 12 * (step / 10)))), Some((1, 10)));
        assert_eq!(each(course([5, 100, 112, 124, 136])), Some((12, 1)));
    }

    #[test]
    fn growth_that_begins_late_has_its_first_step() {
        let series = (0..=40_u64).map(|step| 100 + 12 * step.saturating_sub(16));
        assert_eq!(each(course(series)), Some((12, 17)));
    }

    #[test]
    fn growth_is_found_in_noise() {
        let noise = [3, 90, 41, 77, 12, 60, 28, 99, 5, 51];
        let series = (0..=60_usize).map(|step| 12 * step as u64 + noise[step % 10]);
        let (each, _) = each(course(series)).expect("it grows");
        assert!((9..=15).contains(&each), "{each}");
    }

    #[test]
    fn caches_that_fill_are_no_growth() {
        for end in [1, 10, 20, 30, 36] {
            let found = course((0..=40).map(|step: u64| 7 * step.min(end)));
            let last_step = usize::try_from(end).unwrap();
            match end {
                36 => assert_eq!(found, Course::Level),
                _ => assert_eq!(found, Course::Filled { bytes: 7 * end, in_steps: [1, last_step] }),
            }
        }
    }

    #[test]
    fn buffers_that_are_emptied_and_single_large_steps_are_level() {
        assert_eq!(course((0..=40).map(|step| 10 * (step % 8))), Course::Level);
        assert_eq!(course((0..=40).map(|step| if step == 33 { 900 } else { 10 })), Course::Level);
        assert_eq!(course(vec![10; 41]), Course::Level);
        let noise = [3, 90, 41, 77, 12, 60, 28, 99, 5, 51];
        assert_eq!(course((0..=47_usize).map(|step| noise[step * 7 % 10])), Course::Level);
    }

    #[test]
    fn three_steps_decide_nothing() {
        assert_eq!(course([0, 1, 2, 3]), Course::Level);
        assert_eq!(course([]), Course::Level);
    }
}
