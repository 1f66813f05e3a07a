//! The sentences about the program's memory: which code holds the most, and how much less memory the program
//! would need without that code's blocks.

use super::{counted_as, near, percent};
use crate::callers::Callers;
use crate::categories::Category;
use crate::causes::{Moment, Picture};
use crate::holders::{CodeHolder, Holders};
use crate::lives::{Block, LiveBytes, Lives};
use crate::passes::are_kept;

/// The sentences. A sentence is empty if the recording has no data for it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Summary {
    /// The moment, its live bytes, and the code that holds the most of them.
    pub memory: String,
    /// The part of the program's code that determines the peak, and by how many bytes the peak exceeds
    /// the one without that code.
    pub code: String,
    /// The peak of live bytes without the blocks of the code that holds the most.
    pub peak_without_bytes: Option<u64>,
}

impl Summary {
    /// Builds the sentences for a recording without history from the memory at its end.
    pub(crate) fn of_dump(callers: &Callers<'_>, picture: &Picture) -> Self {
        let holders = &picture.holders;
        let rows = holders.by_code(callers, usize::MAX);
        let held = largest_code(callers, holders, &rows);
        let held = held.unwrap_or_else(|| largest_size(holders));
        let memory = live_at("At the moment of the dump", holders) + &held;
        Self { memory, ..Self::default() }
    }

    /// Builds the sentences from the most important moment. `reserved_bytes` is the peak of reserved bytes.
    pub(crate) fn of(
        lives: &Lives,
        callers: &Callers<'_>,
        main: &Picture,
        reserved_bytes: u64,
    ) -> Self {
        let holders = &main.holders;
        let moment = match main.moment {
            Moment::FirstFailure => "At the first failed request",
            _ => "At the peak of live bytes",
        };
        let begin = live_at(moment, holders);
        if holders.blocks == 0 {
            return Self::default();
        }
        let all_bytes = holders.requested_bytes;
        let share = |bytes| format!("{} MiB ({} %)", near(bytes), percent(bytes, all_bytes));
        let rows = holders.by_code(callers, usize::MAX);
        let Some(held) = largest_code(callers, holders, &rows) else {
            let of = match callers.count() {
                0 => "The recording has no stacks",
                _ => "None of them has a recorded stack",
            };
            let memory = format!(
                "{begin}{}{} {of}: torch.cuda.memory._record_memory_history() records the code that requests \
                 memory.",
                largest_size(holders),
                cached(lives, reserved_bytes)
            );
            return Self { memory, ..Self::default() };
        };
        let before_bytes = unknown_before_bytes(&rows);
        let held_bytes = rows.first().map_or(0, |row| row.holder.requested_bytes);
        let mut memory = format!("{begin}{held}");
        if before_bytes > 0 {
            let bytes = share(before_bytes);
            memory += &format!(
                " {bytes} lived before the recording began: their requests are not recorded."
            );
        }
        memory += &cached(lives, reserved_bytes);
        let is_small = held_bytes < all_bytes / 20;
        if is_small && before_bytes > all_bytes / 2 {
            let code = "Start the recording before the model is built: then the code that holds the rest is recorded \
                        too.";
            return Self { memory, code: code.to_owned(), ..Self::default() };
        }
        let peak_without_bytes = rows.first().and_then(|row| row.caller);
        let peak_without_bytes =
            peak_without_bytes.map(|caller| peak_without(lives, callers, caller));
        let code = peak_without_bytes
            .map(|rest| code(lives, callers, &rows, main, rest))
            .unwrap_or_default();
        Self { memory, code, peak_without_bytes }
    }
}

/// Returns a sentence about the live bytes at a moment.
fn live_at(moment: &str, holders: &Holders) -> String {
    let all = counted_as(holders.blocks, "block", "blocks");
    format!("{moment}, {} MiB are live in {all}.", near(holders.requested_bytes))
}

/// Returns the bytes of blocks from before the recording that have no recorded stack.
fn unknown_before_bytes(rows: &[CodeHolder]) -> u64 {
    let row = rows.iter().find(|row| row.holder.lived_before);
    row.map_or(0, |row| row.holder.requested_bytes)
}

/// Returns a sentence about the code that holds the most bytes, in `rows` the first one. `None` if no block
/// has a recorded stack.
fn largest_code(callers: &Callers<'_>, holders: &Holders, rows: &[CodeHolder]) -> Option<String> {
    let largest = rows.first()?;
    let label = callers.label_of(largest.caller?).replacen(" < ", ", called by ", 1);
    let (held_bytes, blocks) = largest.holder.sum();
    let of_code = match unknown_before_bytes(rows) > held_bytes {
        true => "Of the recorded code, ",
        false => "",
    };
    let blocks = counted_as(blocks, "block", "blocks");
    let share = percent(held_bytes, holders.requested_bytes);
    Some(format!(" {of_code}{label} holds most: {} MiB ({share} %) in {blocks}.", near(held_bytes)))
}

/// Returns a sentence about the size that holds the most bytes.
fn largest_size(holders: &Holders) -> String {
    let Some(largest) = holders.by_size.first() else { return String::new() };
    format!(
        " Of all sizes, blocks of {} MiB hold most: {} MiB ({} %) in {}.",
        near(largest.each_bytes),
        near(largest.requested_bytes),
        percent(largest.requested_bytes, holders.requested_bytes),
        counted_as(largest.blocks, "block", "blocks")
    )
}

/// Returns a sentence about free memory in the cache, if there is much.
fn cached(lives: &Lives, reserved: u64) -> String {
    let live = lives.peak_live.bytes;
    match reserved > live.saturating_add(live / 5) {
        true => format!(
            " The allocator reserves up to {} MiB: the rest is free memory that it keeps.",
            near(reserved)
        ),
        false => String::new(),
    }
}

/// Returns the sentences about the program's code. The first row is the code that holds the most, without
/// which the peak of live bytes is `rest`.
fn code(
    lives: &Lives,
    callers: &Callers<'_>,
    rows: &[CodeHolder],
    main: &Picture,
    rest: u64,
) -> String {
    let holders = &main.holders;
    let all_bytes = holders.requested_bytes;
    let Some((largest, caller)) = rows.first().and_then(|row| Some((row, row.caller?))) else {
        return String::new();
    };
    let peak = lives.peak_live.bytes;
    let blocks = match largest.holder.blocks {
        1 => "this block".to_owned(),
        some => format!("these {}", counted_as(some, "block", "blocks")),
    };
    let less = percent(peak.saturating_sub(rest), peak);
    let mut text = format!(
        "Without {blocks} the peak of live bytes would be {} MiB instead of {} MiB ({less} % less).",
        near(rest),
        near(peak)
    );
    let (category, together) = largest_category(callers, largest, holders);
    let attention = callers.function_with(caller, "attention");
    if let (Some(_), Some(attention)) = (callers.function_with(caller, "softmax"), attention) {
        let is_in_it = |caller| callers.function_with(caller, attention) == Some(attention);
        let in_it = bytes_of(rows, &is_in_it);
        text += &format!(
            " These are attention weights: torch.nn.functional.scaled_dot_product_attention computes attention without storing \
             them. In all, the program's function {attention} holds {} MiB ({} %).",
            near(in_it),
            percent(in_it, all_bytes)
        );
    }
    text += &copies_of_all_parameters(callers, rows, all_bytes);
    if category == Category::Unknown {
        return text;
    }
    let name = match category {
        Category::KvCache => "blocks of the KV cache",
        Category::Workspace => "workspaces",
        Category::Temporary => "temporary blocks",
        Category::OptimizerState => "blocks of optimizer state",
        Category::BackwardPass => "blocks of the backward pass",
        _ => category.name(),
    };
    text += &format!(
        " All {name} together hold {} MiB ({} %)",
        near(together),
        percent(together, all_bytes)
    );
    let mut rows = rows.iter().filter(|row| row.category == category);
    if category != largest.category
        && let Some(first) = rows.find_map(|row| row.caller)
    {
        text += &format!(", the largest part by {}", callers.label_of(first));
    }
    let hint = match category {
        Category::ActivationsKept => STORED,
        Category::Activations if callers.has_backward_pass() => STORED,
        Category::Activations if are_kept(lives, callers, main.at) => {
            ". No backward pass is recorded: if none follows, torch.no_grad() or torch.inference_mode() frees each \
             as soon as the next operators have used it. Else a smaller batch makes them smaller"
        }
        Category::Activations => ": a smaller batch makes them smaller",
        Category::Recomputed => {
            ": torch.utils.checkpoint over smaller parts, such as one layer each, recomputes fewer at a time"
        }
        Category::AutocastCopies => {
            ": parameters that are stored in the lower type need no copy, and a copy lives until autocast ends or the \
             backward pass has read it"
        }
        Category::OptimizerState => {
            ": an optimizer with 8-bit state, or one that shards it (ZeRO, FSDP), keeps less"
        }
        Category::KvCache => ": shorter sequences, or fewer at once, take less",
        _ => "",
    };
    text + hint + "."
}

/// Returns a sentence about what an optimizer allocates to update all parameters at once, if that is at
/// least a tenth of the live bytes.
fn copies_of_all_parameters(callers: &Callers<'_>, rows: &[CodeHolder], all_bytes: u64) -> String {
    let is_of_it = |caller: u32| {
        callers.category(caller) == Category::OptimizerStep
            && callers.function_with(caller, "_multi_tensor_").is_some()
    };
    let bytes = bytes_of(rows, &is_of_it);
    if bytes < all_bytes / 10 {
        return String::new();
    }
    format!(
        " The optimizer's step holds {} MiB ({} %) for a moment, because it updates all parameters at once: \
         foreach=False, or fused=True where the optimizer has it, takes less.",
        near(bytes),
        percent(bytes, all_bytes)
    )
}

/// Returns the category to describe, and its bytes: that of the largest caller, or one whose callers together
/// hold more.
fn largest_category(
    callers: &Callers<'_>,
    largest: &CodeHolder,
    holders: &Holders,
) -> (Category, u64) {
    let all = holders.categories(callers);
    let of = |category: &Category| {
        let row = all.iter().find(|row| row.category == category.name());
        row.map_or(0, |row| row.requested_bytes)
    };
    let first = largest.category;
    let bytes = match first {
        Category::Unknown => largest.holder.requested_bytes,
        _ => of(&first),
    };
    let is_purpose = |category: &Category| {
        use Category::{BackwardPass, OptimizerStep, Temporary, Unknown};
        !matches!(category, BackwardPass | OptimizerStep | Temporary | Unknown)
    };
    let most = Category::ALL.into_iter().filter(is_purpose).map(|one| (one, of(&one)));
    let most = most.max_by_key(|(_, bytes)| *bytes).filter(|(_, most)| *most > bytes);
    most.unwrap_or((first, bytes))
}

/// The hint about activations that are stored for the backward pass.
const STORED: &str = ": torch.utils.checkpoint recomputes them in the backward pass instead of storing them, and a \
    smaller batch makes them smaller";

/// Returns the requested bytes of the callers for which `is_one` returns true.
fn bytes_of(rows: &[CodeHolder], is_one: &dyn Fn(u32) -> bool) -> u64 {
    let some = rows.iter().filter(|row| row.caller.is_some_and(is_one));
    some.fold(0, |sum, row| row.holder.requested_bytes.saturating_add(sum))
}

/// Returns the peak that the live bytes would have without a caller's blocks. This is the largest sum
/// over all moments, not the difference at the actual peak, because the peak may move to another moment.
fn peak_without(lives: &Lives, callers: &Callers<'_>, caller: u32) -> u64 {
    let is_other =
        |block: &Block| block.stack.is_none_or(|stack| callers.of_stack(stack) != caller);
    LiveBytes::of(lives, is_other).peak(0..=lives.events)
}
