//! The results of a sweep: groups of recordings, those that differ, and the setting that suits all.

use hashbrown::HashMap;

use super::{Advised, Difference, Fingerprint, Scanned};
use crate::{counted_as, grouped};
use stratalloc_recording::DeviceFigures;

/// Recordings with equal fingerprints.
#[derive(Debug)]
pub struct Group {
    /// The indices of the recordings, in order.
    pub members: Vec<usize>,
    /// The one that was analysed: the first that could be read again.
    pub analysed: usize,
    /// The advice for them, or the error of their analysis.
    pub advised: Result<Advised, String>,
    /// How they differ from the largest group; `None` for that group itself, and if they were not compared.
    pub difference: Option<Difference>,
    /// The need under each of [`Found::confs`]; `None` if no device suffices, or if it was not searched.
    pub needs: Vec<Option<u64>>,
}

/// The results of a sweep.
#[derive(Debug)]
pub struct Found {
    /// The recordings that could not be read, with the error.
    pub unread: Vec<(usize, String)>,
    /// The groups, the largest first.
    pub groups: Vec<Group>,
    /// The settings that were tried on all groups.
    pub confs: Vec<String>,
    /// The recordings that could be read and their figures, in the order of [`DeviceFigures::order`]: first
    /// the one that failed first, or else the one with the most reserved bytes.
    pub ranks: Vec<(usize, DeviceFigures)>,
}

impl Found {
    /// Groups recordings. Of groups with the same number of recordings, the one with the first recording is
    /// first.
    pub fn of(scanned: &[Result<Scanned, String>]) -> Self {
        let read = scanned.iter().enumerate();
        let read = read.filter_map(|(at, one)| Some((at, one.as_ref().ok()?.figures)));
        let mut ranks: Vec<(usize, DeviceFigures)> = read.collect();
        ranks.sort_by_key(|(index, figures)| (figures.order(), *index));
        let mut unread = Vec::new();
        let mut members: Vec<Vec<usize>> = Vec::new();
        let mut group_of: HashMap<&Fingerprint, usize> = HashMap::new();
        for (index, scanned) in scanned.iter().enumerate() {
            match scanned {
                Err(error) => unread.push((index, error.clone())),
                Ok(Scanned { fingerprint, .. }) => {
                    let group = *group_of.entry(fingerprint).or_insert(members.len());
                    if group == members.len() {
                        members.push(Vec::new());
                    }
                    members[group].push(index);
                }
            }
        }
        members.sort_by_key(|members| std::cmp::Reverse(members.len()));
        let group = |members: Vec<usize>| Group {
            analysed: members[0],
            members,
            advised: Err("it was not analysed".to_owned()),
            difference: None,
            needs: Vec::new(),
        };
        let groups = members.into_iter().map(group).collect();
        Self { unread, groups, confs: Vec::new(), ranks }
    }

    /// Returns the groups that were analysed.
    pub fn analysed(&self) -> impl Iterator<Item = (&Group, &Advised)> {
        self.groups.iter().filter_map(|group| Some((group, group.advised.as_ref().ok()?)))
    }

    /// Returns the number of recordings with a result and of those without, as text. `None` if all have one.
    pub fn partial(&self) -> Option<String> {
        let count = |group: &Group| group.members.len() as u64;
        let all = self.unread.len() as u64 + self.groups.iter().map(count).sum::<u64>();
        let with_result: u64 = self.analysed().map(|(group, _)| count(group)).sum();
        let without = counted_as(all - with_result, "has no result", "have no result");
        (with_result < all)
            .then(|| format!("{} of {} recordings ({without})", grouped(with_result), grouped(all)))
    }

    /// Returns the name of the recording with which others are compared.
    pub fn largest<'a>(&self, names: &'a [String]) -> &'a str {
        self.groups.first().map_or("", |group| names[group.analysed].as_str())
    }

    /// Returns the settings to try on all groups: the best ones of each group and `more`.
    pub fn candidates(&self, more: impl Iterator<Item = String>) -> Vec<String> {
        let best = self.analysed().map(|(_, advised)| advised.best_conf.clone());
        let mut all: Vec<String> = best.chain(more).collect();
        all.sort();
        all.dedup();
        all
    }

    /// Returns the group that needs the most memory as it is, the first of several.
    pub fn worst(&self) -> Option<&Group> {
        let need = |advised: &Advised| advised.needs_bytes.unwrap_or(u64::MAX);
        let groups = self.analysed();
        let worst = groups.max_by_key(|(group, advised)| {
            (need(advised), std::cmp::Reverse(group.members.first().copied()))
        });
        worst.map(|(group, _)| group)
    }

    /// Returns the setting under which all analysed recordings run in the least memory, and the need of the
    /// one that needs most. Of several such settings, the one with the smallest sum of needs. `None` if no
    /// setting that was tried suits all.
    pub fn advice(&self) -> Option<(&str, u64)> {
        let fit = |(at, conf): (usize, &'_ String)| {
            let (mut most, mut sum) = (None, 0_u128);
            for (group, _) in self.analysed() {
                let bytes = (*group.needs.get(at)?)?;
                most = most.max(Some(bytes));
                sum += u128::from(bytes) * group.members.len() as u128;
            }
            Some((most?, sum, at, conf.len()))
        };
        let (most, _, at, _) = self.confs.iter().enumerate().filter_map(fit).min()?;
        Some((&self.confs[at], most))
    }
}
