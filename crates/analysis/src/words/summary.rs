//! The sentences about the program's memory: which code holds the most, and how much less memory the program
//! would need without that code's blocks.

use super::{Sentences, counted_as, near, percent};
use crate::callers::Callers;
use crate::categories::Category;
use crate::causes::{Moment, Picture};
use crate::holders::{CodeHolder, Holders};
use crate::lives::{Block, LiveBytes, Lives};
use crate::passes::{are_kept, is_activation};

/// The sentences. A sentence is empty if the recording has no data for it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Summary {
    /// The moment, its live bytes, and the code that holds the most of them.
    pub memory: Sentences,
    /// The part of the program's code that determines the peak, and by how many bytes the peak exceeds
    /// the one without that code.
    pub code: Sentences,
    /// The peak of live bytes without the blocks of the code that holds the most.
    pub peak_without_bytes: Option<u64>,
    /// The peak of live bytes without activations, if these are kept although no backward pass is recorded.
    pub peak_without_activations_bytes: Option<u64>,
}

/// Bytes, and those of which they are a part.
#[derive(Clone, Copy)]
struct Share {
    bytes: u64,
    of_bytes: u64,
}

/// The peak of live bytes, and the same without some blocks.
#[derive(Clone, Copy)]
struct Peaks {
    bytes: u64,
    /// Without the blocks of the code that holds the most.
    without_bytes: u64,
    /// Without activations, if these are kept although no backward pass is recorded.
    without_activations_bytes: Option<u64>,
}

impl Summary {
    /// Builds the sentences for a recording without history from the memory at its end.
    pub(crate) fn of_dump(callers: &Callers<'_>, picture: &Picture) -> Self {
        let holders = &picture.holders;
        let rows = holders.by_code(callers, usize::MAX);
        let held = largest_code(callers, holders, &rows);
        let held = held.unwrap_or_else(|| largest_size(holders));
        let live = live_at("At the moment of the dump", holders);
        let memory = Sentences::default().and_more(live).and(held);
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
            let no_code = format!(
                "{of}: torch.cuda.memory._record_memory_history() records the code that requests memory."
            );
            let memory = Sentences::default().and_more(begin).and_more(largest_size(holders));
            let memory = memory.and_more(cached(lives, reserved_bytes)).and(no_code);
            return Self { memory, ..Self::default() };
        };
        let before_bytes = unknown_before_bytes(&rows);
        let held_bytes = rows.first().map_or(0, |row| row.holder.requested_bytes);
        let mut memory = Sentences::default().and_more(begin).and(held);
        if before_bytes > 0 {
            let bytes = share(before_bytes);
            let before = format!(
                "{bytes} lived before the recording began: their requests are not recorded."
            );
            memory = memory.and_more(before);
        }
        let memory = memory.and_more(cached(lives, reserved_bytes));
        let is_small = held_bytes < all_bytes / 20;
        if is_small && before_bytes > all_bytes / 2 {
            let code = "Start the recording before the model is built: then the code that holds the rest is recorded \
                        too.";
            return Self { memory, code: Sentences::one(code), ..Self::default() };
        }
        let peak_without_bytes = rows.first().and_then(|row| row.caller);
        let peak_without_bytes =
            peak_without_bytes.map(|caller| peak_without(lives, callers, caller));
        let all = Self { memory, peak_without_bytes, ..Self::default() };
        let Some(without_bytes) = peak_without_bytes else { return all };
        let (category, category_bytes) = largest_category(callers, &rows[0], holders);
        let keeps_graph = category == Category::Activations
            && !callers.has_backward_pass()
            && are_kept(lives, callers, main.at);
        let peaks = Peaks {
            bytes: lives.peak_live.bytes,
            without_bytes,
            without_activations_bytes: keeps_graph.then(|| {
                let is_other = |block: &Block| !is_activation(callers, block);
                LiveBytes::of(lives, is_other).peak(0..=lives.events)
            }),
        };
        let code = code(callers, &rows, holders, peaks, (category, category_bytes));
        Self { code, peak_without_activations_bytes: peaks.without_activations_bytes, ..all }
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
    Some(format!("{of_code}{label} holds most: {} MiB ({share} %) in {blocks}.", near(held_bytes)))
}

/// Returns a sentence about the size that holds the most bytes.
fn largest_size(holders: &Holders) -> String {
    let Some(largest) = holders.by_size.first() else { return String::new() };
    format!(
        "Of all sizes, blocks of {} MiB hold most: {} MiB ({} %) in {}.",
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
            "The allocator reserves up to {} MiB: the rest is free memory that it keeps.",
            near(reserved)
        ),
        false => String::new(),
    }
}

/// Returns the sentences about the program's code. The first row is the code that holds the most. The last
/// argument is the category to describe, and its bytes.
fn code(
    callers: &Callers<'_>,
    rows: &[CodeHolder],
    holders: &Holders,
    peaks: Peaks,
    (category, category_bytes): (Category, u64),
) -> Sentences {
    let all_bytes = holders.requested_bytes;
    let Some((largest, caller)) = rows.first().and_then(|row| Some((row, row.caller?))) else {
        return Sentences::default();
    };
    let blocks = match largest.holder.blocks {
        1 => "this block".to_owned(),
        some => format!("these {}", counted_as(some, "block", "blocks")),
    };
    let Peaks { bytes: peak, without_bytes, .. } = peaks;
    let less = percent(peak.saturating_sub(without_bytes), peak);
    let without = format!(
        "Without {blocks} the peak of live bytes would be {} MiB instead of {} MiB ({less} % less).",
        near(without_bytes),
        near(peak)
    );
    let mut advice = Sentences::default();
    let attention = callers.function_with(caller, "attention");
    if let (Some(_), Some(attention)) = (callers.function_with(caller, "softmax"), attention) {
        let is_in_it = |caller| callers.function_with(caller, attention) == Some(attention);
        let in_it = bytes_of(rows, &is_in_it);
        let weights = "These are attention weights: torch.nn.functional.scaled_dot_product_attention computes attention \
             without storing them.";
        let in_all = format!(
            "In all, the program's function {attention} holds {} MiB ({} %).",
            near(in_it),
            percent(in_it, all_bytes)
        );
        advice = advice.and(weights).and_more(in_all);
    }
    advice = advice.and(copies_of_all_parameters(callers, rows, all_bytes));
    if category != Category::Unknown {
        let share = Share { bytes: category_bytes, of_bytes: all_bytes };
        advice = advice.then(of_category(callers, rows, category, share, peaks));
    }
    // That all memory is held by one line is shown above.
    let is_advised = advice.main().next().is_some() || without_bytes == 0;
    let all = match is_advised {
        true => Sentences::default().and_more(without),
        false => Sentences::one(without),
    };
    all.then(advice)
}

/// Returns the sentences about the category that holds the most, and its bytes.
fn of_category(
    callers: &Callers<'_>,
    rows: &[CodeHolder],
    category: Category,
    share: Share,
    peaks: Peaks,
) -> Sentences {
    let name = match category {
        Category::KvCache => "blocks of the KV cache",
        Category::Workspace => "workspaces",
        Category::Temporary => "temporary blocks",
        Category::OptimizerState => "blocks of optimizer state",
        Category::BackwardPass => "blocks of the backward pass",
        _ => category.name(),
    };
    let mut text = format!(
        "All {name} together hold {} MiB ({} %)",
        near(share.bytes),
        percent(share.bytes, share.of_bytes)
    );
    let is_of_largest = rows.first().is_some_and(|row| row.category == category);
    let mut rows = rows.iter().filter(|row| row.category == category);
    if !is_of_largest && let Some(first) = rows.find_map(|row| row.caller) {
        text += &format!(", the largest part by {}", callers.label_of(first));
    }
    let hint = match category {
        Category::ActivationsKept => STORED,
        Category::Activations if callers.has_backward_pass() => STORED,
        Category::Activations if peaks.without_activations_bytes.is_some() => "",
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
    let text = text + hint + ".";
    let all = match hint.is_empty() {
        true => Sentences::default().and_more(text),
        false => Sentences::one(text),
    };
    match peaks.without_activations_bytes.filter(|_| category == Category::Activations) {
        None => all,
        Some(bytes) => all
            .and(
                "No backward pass is recorded: if none follows, torch.no_grad() or torch.inference_mode() frees each \
                 as soon as the next operators have used it.",
            )
            .and(format!("The peak is then {} MiB and what single operators hold.", near(bytes)))
            .and_more("Else a smaller batch makes them smaller."),
    }
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
        "The optimizer's step holds {} MiB ({} %) for a moment, because it updates all parameters at once: \
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
