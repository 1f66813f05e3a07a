//! The first sentences of a page: which code holds the most memory, and how much less memory the program
//! would need without that code's blocks. The sentence about settings comes from `advise` and follows
//! them.

use serde::Serialize;

use super::holders::{Holder, Holders};
use stratalloc_analysis::lives::{Lives, NEVER};
use stratalloc_analysis::{Callers, Category, counted_as, near};
use stratalloc_recording::NoHistory;

/// The sentences. A sentence is empty if the recording has no data for it.
#[derive(Debug, Default, PartialEq, Eq, Serialize)]
pub(crate) struct Headline {
    /// The moment, its live bytes, and the code that holds the most of them.
    pub memory: String,
    /// The part of the program's code that determines the peak, and by how many bytes the peak exceeds
    /// the one without that code.
    pub code: String,
}

impl Headline {
    /// Builds the sentences for a recording without history from the holders at its end.
    pub(crate) fn of_dump(no_history: &NoHistory, holders: &Holders) -> Self {
        let mut memory =
            format!("{} {}", no_history.sentence(), live_at("At that moment", holders));
        if let Some(largest) = holders.holders.first() {
            memory += &format!(" {}", largest_size(largest, holders.requested_bytes));
        }
        Self { memory, code: String::new() }
    }

    /// Builds the sentences from the holders at a moment. `is_failure` is true if a request fails at
    /// that moment.
    pub(crate) fn of(
        lives: &Lives,
        callers: &Callers<'_>,
        holders: &Holders,
        is_failure: bool,
    ) -> Self {
        let Some(largest) = holders.holders.first() else {
            return Self::default();
        };
        let all_bytes = holders.requested_bytes;
        let share = |bytes| format!("{} MiB ({} %)", near(bytes), percent(bytes, all_bytes));
        let moment =
            if is_failure { "At the first failed request" } else { "At the peak of live bytes" };
        let begin = live_at(moment, holders);
        let held = format!(
            "{} in {}",
            share(largest.requested_bytes),
            counted_as(largest.blocks, "block", "blocks")
        );
        let Some(stack) = largest.stack else {
            let memory = format!(
                "{begin} {}{} The events have no stacks: torch.cuda.memory._record_memory_history() records \
                 the code that requests memory.",
                largest_size(largest, all_bytes),
                cached(lives)
            );
            return Self { memory, code: String::new() };
        };
        let caller = callers.of_stack(stack);
        let label = callers.labels(&[caller]).concat().replacen(" < ", ", called by ", 1);
        let before = holders.without_stack.iter().find(|holder| holder.lived_before);
        let before_bytes = before.map_or(0, |before| before.requested_bytes);
        let of_code = match before_bytes > largest.requested_bytes {
            true => "Of the recorded code, ",
            false => "",
        };
        let mut memory = format!("{begin} {of_code}{label} holds most: {held}.");
        if before_bytes > 0 {
            let bytes = share(before_bytes);
            memory += &format!(
                " {bytes} lived before the recording began: their requests are not recorded."
            );
        }
        memory += &cached(lives);
        let is_small = largest.requested_bytes < all_bytes / 20;
        let code = match is_small && before_bytes > all_bytes / 2 {
            true => "Start the recording before the model is built: then the code that holds the rest is recorded too."
                .to_owned(),
            false => code(lives, callers, holders, largest, caller),
        };
        Self { memory, code }
    }
}

/// Returns a sentence about the live bytes at a moment.
fn live_at(moment: &str, holders: &Holders) -> String {
    let all = counted_as(holders.blocks, "block", "blocks");
    format!("{moment}, {} MiB are live in {all}.", near(holders.requested_bytes))
}

/// Returns a sentence about the size that holds the most bytes.
fn largest_size(largest: &Holder, all_bytes: u64) -> String {
    format!(
        "Of all sizes, blocks of {} MiB hold most: {} MiB ({} %) in {}.",
        near(largest.each_bytes),
        near(largest.requested_bytes),
        percent(largest.requested_bytes, all_bytes),
        counted_as(largest.blocks, "block", "blocks")
    )
}

/// Returns a sentence about free memory in the cache, if there is much.
fn cached(lives: &Lives) -> String {
    let (reserved, live) = (lives.peak_reserved.bytes, lives.peak_live.bytes);
    match reserved > live.saturating_add(live / 5) {
        true => format!(
            " The allocator reserves up to {} MiB: the rest is free memory that it keeps.",
            near(reserved)
        ),
        false => String::new(),
    }
}

/// Returns the sentences about the program's code.
fn code(
    lives: &Lives,
    callers: &Callers<'_>,
    holders: &Holders,
    largest: &Holder,
    caller: u32,
) -> String {
    let peak = lives.peak_live.bytes;
    let rest = peak_without(lives, callers, caller);
    let blocks = match largest.blocks {
        1 => "this block".to_owned(),
        some => format!("these {}", counted_as(some, "block", "blocks")),
    };
    let less = percent(peak.saturating_sub(rest), peak);
    let mut text = format!(
        "Without {blocks} the peak of live bytes would be {} MiB instead of {} MiB ({less} % less).",
        near(rest),
        near(peak)
    );
    let category = callers.category(caller);
    let is_of_category = |holder: &Holder| {
        holder.stack.is_some_and(|stack| callers.category(callers.of_stack(stack)) == category)
    };
    let together = bytes_of(holders, &is_of_category);
    let attention = callers.function_with(caller, "attention");
    if let (Some(_), Some(attention)) = (callers.function_with(caller, "softmax"), attention) {
        let is_in_it = |holder: &Holder| {
            let caller = holder.stack.map(|stack| callers.of_stack(stack));
            caller.is_some_and(|caller| callers.function_with(caller, attention) == Some(attention))
        };
        let in_it = bytes_of(holders, &is_in_it);
        text += &format!(
            " These are attention weights: torch.nn.functional.scaled_dot_product_attention computes attention without storing \
             them. In all, the program's function {attention} holds {} MiB ({} %).",
            near(in_it),
            percent(in_it, holders.requested_bytes)
        );
    }
    let all = format!(
        "{} together hold {} MiB ({} %)",
        category.name(),
        near(together),
        percent(together, holders.requested_bytes)
    );
    let hint = match category {
        Category::Activations if callers.has_backward_pass() => {
            "torch.utils.checkpoint recomputes them in the backward pass instead of storing them, and a smaller \
             batch makes them smaller"
        }
        Category::Activations => "a smaller batch makes them smaller",
        Category::Gradients => {
            "zero_grad(set_to_none=True) frees them until the next backward pass"
        }
        Category::OptimizerState => {
            "an optimizer with 8-bit state, or one that shards it (ZeRO, FSDP), keeps less"
        }
        Category::Parameters => "bfloat16 takes half of what float32 takes",
        _ => return text,
    };
    format!("{text} All {all}: {hint}.")
}

/// Returns the requested bytes of the holders for which `is_one` returns true.
fn bytes_of(holders: &Holders, is_one: &dyn Fn(&Holder) -> bool) -> u64 {
    let some = holders.holders.iter().filter(|holder| is_one(holder));
    some.fold(0, |sum, holder| holder.requested_bytes.saturating_add(sum))
}

/// Returns the peak that the live bytes would have without a caller's blocks. This is the largest sum
/// over all moments, not the difference at the actual peak, because the peak may move to another moment.
fn peak_without(lives: &Lives, callers: &Callers<'_>, caller: u32) -> u64 {
    let mut changes = vec![0_i64; lives.events as usize + 2];
    for block in &lives.blocks {
        if block.stack.is_some_and(|stack| callers.of_stack(stack) == caller) {
            continue;
        }
        let bytes = i64::try_from(block.requested_bytes).unwrap_or(i64::MAX);
        changes[block.born as usize] = changes[block.born as usize].saturating_add(bytes);
        if block.freed != NEVER {
            changes[block.freed as usize] = changes[block.freed as usize].saturating_sub(bytes);
        }
    }
    let mut live = 0_i64;
    let live = changes.into_iter().map(|change| {
        live = live.saturating_add(change);
        live
    });
    u64::try_from(live.max().unwrap_or(0)).unwrap_or(0)
}

fn percent(part: u64, of: u64) -> u64 {
    let of = u128::from(of.max(1));
    u64::try_from((u128::from(part) * 100 + of / 2) / of).unwrap_or(100)
}
