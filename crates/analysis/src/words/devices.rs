//! The sentences that compare the devices of one process, and the ranks of one job.

use super::{counted_as, grouped, near};
use stratalloc_recording::DeviceFigures;

/// The most devices that the sentence lists.
const LISTED: usize = 16;

/// Returns a sentence that compares devices, which are in the order of [`DeviceFigures::order`]. `None` if
/// there are fewer than two.
#[must_use]
pub fn devices_sentence(devices: &[DeviceFigures]) -> Option<String> {
    let mut text = devices_headline(devices)?.trim_end_matches('.').to_owned();
    let listed: Vec<String> = devices.iter().take(LISTED).map(one_device).collect();
    text += &format!(". Peaks of reserved and of live bytes: {}", listed.join("; "));
    if let more @ 1.. = devices.len().saturating_sub(LISTED) {
        text += &format!("; and {more} more");
    }
    text.push('.');
    Some(text)
}

/// Returns a sentence with the number of devices, which are in the order of [`DeviceFigures::order`], and
/// with the one whose requests failed. `None` if there are fewer than two.
#[must_use]
pub fn devices_headline(devices: &[DeviceFigures]) -> Option<String> {
    let [first, _, ..] = devices else { return None };
    let mut text = counted_as(devices.len() as u64, "device", "devices");
    if first.failures > 0 {
        let alone = devices.iter().filter(|one| one.failures > 0).count() == 1;
        let number = first.device;
        text += &match (alone, first.first_failure_us) {
            (true, _) => format!("; requests failed on device {number} only"),
            (false, Some(_)) => format!("; requests failed first on device {number}"),
            (false, None) => String::new(),
        };
    }
    text.push('.');
    Some(text)
}

fn one_device(figures: &DeviceFigures) -> String {
    let DeviceFigures { device, reserved_peak_bytes, live_peak_bytes, failures, .. } = *figures;
    let (reserved, live) = (near(reserved_peak_bytes), near(live_peak_bytes));
    let end = match device_remark(figures) {
        "" => String::new(),
        end => format!(" {end}"),
    };
    let failed = match failures {
        0 => String::new(),
        some => format!(", {}", counted_as(some, "request failed", "requests failed")),
    };
    format!("device {device} {reserved} and {live} MiB{end}{failed}")
}

/// Returns which memory of a device is known, if not all of it.
#[must_use]
pub fn device_remark(figures: &DeviceFigures) -> &'static str {
    match (figures.events, figures.is_end_only) {
        (0, _) => "at the end, no events",
        (_, true) => "at the end, no history",
        (_, false) => "",
    }
}

/// Returns a sentence that compares the ranks of a job, which are in the order of [`DeviceFigures::order`].
/// `None` if there are fewer than two.
#[must_use]
pub fn ranks_sentence(ranks: &[(usize, DeviceFigures)], names: &[String]) -> Option<String> {
    let [(first, figures), _, ..] = ranks else { return None };
    let reserved = |(_, figures): &&(usize, DeviceFigures)| figures.reserved_peak_bytes;
    let (most, least) =
        (ranks.iter().rev().max_by_key(reserved)?, ranks.iter().min_by_key(reserved)?);
    let of = |(index, figures): &(usize, DeviceFigures)| {
        format!("{} MiB ({})", near(figures.reserved_peak_bytes), names[*index])
    };
    let mut text = String::new();
    if figures.failures > 0 {
        let failed = ranks.iter().filter(|(_, figures)| figures.failures > 0).count() as u64;
        let requests = counted_as(figures.failures, "request", "requests");
        let reserved = near(figures.reserved_peak_bytes);
        let is_first = failed > 1 && figures.first_failure_us.is_some();
        text = format!(
            "{} {} ({requests}, with {reserved} MiB reserved at most). {} of {} recordings had requests that failed. ",
            names[*first],
            if is_first { "failed first" } else { "failed" },
            grouped(failed),
            grouped(ranks.len() as u64)
        );
    }
    text += &match reserved(&most) == reserved(&least) {
        true => format!(
            "The peak of reserved bytes is {} MiB in all {} recordings.",
            near(reserved(&most)),
            grouped(ranks.len() as u64)
        ),
        false => format!("The peaks of reserved bytes are from {} to {}.", of(least), of(most)),
    };
    Some(text)
}
