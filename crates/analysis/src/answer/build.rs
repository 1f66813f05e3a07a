//! Makes the answer about a recording from its moments, its limit and the search for settings.

use super::{
    Answer, Basis, CategorySource, CodeFigures, FrameFigures, HeapFigures, HolderList,
    LimitFigures, MainCauses, MomentCauses, MomentFigures, OverTime, Question, Recorded, Setting,
    VERSION,
};
use crate::advice::{Advice, Tried};
use crate::callers::{Callers, Compared, Files};
use crate::categories::Category;
use crate::causes::Picture;
use crate::dump::Dump;
use crate::graph_pools::{GraphPools, ProgramPools};
use crate::growth::StepGrowth;
use crate::holders::{CodeHolder, Holders};
use crate::host::HostFigures;
use crate::lives::Lives;
use crate::moments::{Moments, Timeline};
use crate::recording::Recording;
use crate::streams::Streams;
use crate::temporary::Temporary;
use crate::torch::{ForTorch, is_of_rocm};
use crate::trial::{failed_requests, failures_are_replayed};
use crate::verdict::Verdict;
use crate::words::{
    Sentences, StreamNumbers, Summary, categories_sentence, devices_sentence, remarks,
    totals_sentence, unknown,
};
use stratalloc_recording::{Frame, FrameKind, Progress, ReplayError, StackId};

/// Answers a question about a recording. Replays it many times if settings are searched. `name` is the name
/// to show. `progress` gets the number of settings done and the number known so far, and can cancel.
///
/// # Errors
///
/// [`ReplayError`] when a replay fails for a reason other than memory.
pub fn answer(
    name: &str,
    recording: &Recording,
    question: &Question,
    progress: &mut dyn Progress,
) -> Result<Answer, ReplayError> {
    if recording.no_history.is_some() || question.unsearched.is_some() {
        return described(name, recording, question);
    }
    let progress = &*progress;
    let found = Advice::search_with(recording, &question.advice, &question.settings, progress);
    let mut advice = match found {
        Err(ReplayError::OutOfTime) => {
            let mut all = described(name, recording, question)?;
            all.verdict = Verdict::NotSearched { why: NOTHING_IN_TIME.to_owned() };
            all.is_cut_short = true;
            (all.headline, all.sentence) = all.result();
            all.evidence = Basis::of(&all, recording);
            return Ok(all);
        }
        found => found?,
    };
    let within = question.within_bytes.iter();
    let within: Vec<Option<Tried>> = within
        .map(|bytes| advice.cheapest_within(recording, *bytes, progress))
        .collect::<Result<_, _>>()?;
    let timeline = Timeline::judged(recording)?;
    let moments = Moments::of(recording, &timeline);
    let mut all = facts(name, recording, question, &timeline, &moments)?;
    let is_searched = advice.tried.iter().any(|tried| tried.conf != advice.recorded.conf);
    all.verdict = match is_searched {
        true => advice.verdict(recording, moments.main()),
        false if advice.is_cut_short => Verdict::NotSearched { why: ONLY_RECORDED.to_owned() },
        false => Verdict::NotSearched { why: ENOUGH.to_owned() },
    };
    (all.passed_over, all.is_cut_short) = (advice.passed_over, advice.is_cut_short);
    (all.headline, all.sentence) = all.result();
    let setting = |tried: &Tried| Setting::new(tried, advice.paste(tried));
    all.choice = advice.worth_it(recording).map(setting);
    all.choices = advice.choices(recording);
    all.set = all.choices.iter().map(|choice| choice.set.clone()).collect();
    let need = &advice.recorded.need;
    all.recorded.needs_bytes = need.needs_bytes;
    all.recorded.needs_with_luck_bytes = need.with_luck_bytes;
    all.recorded.replayed = Some(setting(&advice.recorded));
    all.best = advice.best().map(setting);
    all.least_need_bytes = advice.best().and_then(|tried| tried.need.needs_bytes);
    let modelled = advice.modelled.iter();
    let modelled = modelled.map(|tried| Setting { is_model: true, ..setting(tried) });
    all.tried = advice.tried.iter().map(setting).chain(modelled).collect();
    all.asked = advice.asked.iter().map(setting).collect();
    all.within = within.iter().map(|tried| tried.as_ref().map(setting)).collect();
    all.evidence = Basis::of(&all, recording);
    Ok(all)
}

/// Answers what needs no search for settings: the facts of the recording, its limit and its moments.
///
/// # Errors
///
/// [`ReplayError`] when a replay fails for a reason other than memory.
pub fn described(
    name: &str,
    recording: &Recording,
    question: &Question,
) -> Result<Answer, ReplayError> {
    described_on(name, recording, question, &Timeline::judged(recording)?)
}

/// Does the same as [`described`], with the timeline of [`Timeline::judged`] or one with more columns.
///
/// # Errors
///
/// The same as [`described`].
pub fn described_on(
    name: &str,
    recording: &Recording,
    question: &Question,
    timeline: &Timeline<'_>,
) -> Result<Answer, ReplayError> {
    let moments = Moments::of(recording, timeline);
    facts(name, recording, question, timeline, &moments)
}

/// Returns an answer without a search. `timeline` is the one of the moments.
fn facts(
    name: &str,
    recording: &Recording,
    question: &Question,
    timeline: &Timeline<'_>,
    moments: &Moments,
) -> Result<Answer, ReplayError> {
    let callers = Callers::of(&recording.trace.stacks, question.compared);
    let lists = Lists {
        recording,
        question,
        callers,
        is_replay: timeline.is_replay && !recording.trace.requests_only,
    };
    let host = recording.trace.host.as_ref();
    let host = host.map(|host| HostFigures::of(host, &lists.callers, question.holders));
    let by_code = (question.compared != Compared::Code)
        .then(|| Callers::of(&recording.trace.stacks, Compared::Code));
    let by_code = by_code.as_ref().unwrap_or(&lists.callers);
    let summary = summary(recording, &timeline.lives, by_code, moments);
    let verdict = match recording.no_history {
        Some(no_history) => Verdict::NoHistory(no_history),
        None => Verdict::NotSearched { why: question.unsearched.unwrap_or_default().to_owned() },
    };
    let has_history = recording.no_history.is_none();
    let torch = ForTorch::of(recording, question.advice.torch);
    let is_rocm = question.advice.is_rocm || is_of_rocm(recording);
    let causes = |picture: &Picture| lists.causes(picture, &moments.streams);
    let main = moments.main().map(causes);
    let reserved = moments.reserved().map(causes).or_else(|| main.clone());
    let figures = moments.pictures.iter().map(|picture| lists.moment(picture, &moments.streams));
    let figures: Vec<MomentFigures> = figures.collect();
    let rows = question.holders.min(GROWTH_ROWS);
    let growth = StepGrowth::of(recording, timeline, &lists.callers, rows);
    let missing = recording.trace.missing;
    let is_whole = has_history && missing.frees + missing.allocations == 0;
    let temporary = is_whole.then(|| {
        Temporary::of(&timeline.lives, &lists.callers, growth.as_ref().ok(), question.holders)
    });
    // Advice about other code would hide the code that grows.
    let is_growing = growth.as_ref().is_ok_and(|growth| growth.is_decisive);
    let summary = match is_growing {
        true => Summary { memory: summary.memory, ..Summary::default() },
        false => summary,
    };
    let mut all = Answer {
        version: VERSION,
        trace: name.to_owned(),
        device: recording.trace.device,
        devices: recording.trace.devices.clone(),
        devices_sentence: devices_sentence(&recording.trace.devices),
        sentence: Sentences::default(),
        headline: "",
        verdict,
        memory: summary.memory,
        code: summary.code,
        peak_without_bytes: summary.peak_without_bytes,
        peak_without_activations_bytes: summary.peak_without_activations_bytes,
        evidence: Vec::new(),
        choice: None,
        torch: torch_text(torch),
        torch_sentence: torch.sentence(),
        platform: is_rocm.then_some("ROCm"),
        set: Vec::new(),
        choices: Vec::new(),
        not_shown: unknown(recording, torch),
        remarks: remarks(recording),
        no_history: recording.no_history,
        limit: LimitFigures::of(recording),
        unknown_entries: recording.trace.unknown.entries,
        host,
        totals: recording.trace.totals.clone(),
        recorded: Recorded {
            conf: recording.trace.conf.clone(),
            #[expect(clippy::cast_precision_loss, reason = "a displayed number")]
            duration_ms: recording
                .figures
                .duration_us
                .map(|us| us as f64 / 1e3)
                .filter(|_| has_history),
            is_default_instead: recording.config.is_none(),
            ..Recorded::default()
        },
        best: None,
        least_need_bytes: None,
        live_peak_bytes: has_history.then_some(recording.live_peak_bytes),
        failures: if has_history { Some(failed_requests(recording)?) } else { None },
        failures_are_replayed: failures_are_replayed(recording),
        tried: Vec::new(),
        asked: Vec::new(),
        passed_over: 0,
        is_cut_short: false,
        holders: figures.first().map(|moment| moment.holders.clone()),
        causes: main.map(|main| MainCauses {
            main,
            peak_reserved: reserved,
            live_peak_bytes: has_history.then_some(moments.streams.peak_live_bytes),
            streams_busy_together: has_history.then_some(moments.streams.busy_together),
            streams: moments.streams.streams.clone(),
        }),
        moments: figures,
        over_time: OverTime::of(&timeline.lives).filter(|_| has_history),
        stream_numbers: StreamNumbers::of(timeline.lives.streams.items.iter().copied()),
        free_ranges: match has_history {
            true => Vec::new(),
            false => Dump::of(&recording.trace).free,
        },
        within: Vec::new(),
        temporary,
        no_steps: growth.as_ref().err().copied(),
        growth: growth.ok(),
    };
    (all.headline, all.sentence) = all.result();
    all.evidence = Basis::of(&all, recording);
    Ok(all)
}

/// The maximum number of callers that are listed as growing, and as filled once.
const GROWTH_ROWS: usize = 10;

/// The result if the recorded setting met the strictest condition.
const ENOUGH: &str = "No other setting was tried, because the recorded one needs no more than the conditions ask for.";

/// The result if time ran out before the need of the recorded setting was known.
const NOTHING_IN_TIME: &str = "No need is known.";

/// The result if time ran out before another setting was searched.
const ONLY_RECORDED: &str = "No setting besides the recorded one was searched to the end.";

fn torch_text(torch: ForTorch) -> Option<String> {
    match torch {
        ForTorch::Unknown => None,
        ForTorch::Set(version) | ForTorch::Shown(version) => Some(version.to_string()),
    }
}

fn summary(
    recording: &Recording,
    lives: &Lives,
    callers: &Callers<'_>,
    moments: &Moments,
) -> Summary {
    let Some(main) = moments.main() else {
        let totals = recording.trace.totals.as_ref();
        let memory = totals.map(totals_sentence).map(Sentences::one).unwrap_or_default();
        return Summary { memory, ..Summary::default() };
    };
    match recording.no_history {
        Some(_) => Summary::of_dump(callers, main),
        None => Summary::of(lives, callers, main, moments.peak_reserved_bytes()),
    }
}

impl LimitFigures {
    /// Returns the limit, in bytes, unless it is only possible.
    #[must_use]
    pub fn known_bytes(&self) -> Option<u64> {
        self.limit_bytes.filter(|_| self.limit_certainty != Some("possible"))
    }

    fn of(recording: &Recording) -> Self {
        let limit = recording.limit;
        let evidence = limit.and_then(|limit| limit.source.evidence(recording.figures.ooms));
        Self {
            limit_failures: evidence.map(|evidence| evidence.ooms),
            limit_retries: evidence.map(|evidence| evidence.retries),
            limit_releases: evidence.map(|evidence| evidence.releases),
            limit_collections: evidence.map(|evidence| evidence.collections),
            limit_bytes: limit.map(|limit| limit.bytes),
            limit_below_bytes: limit.and_then(|limit| limit.below_bytes),
            limit_from: limit.map(|limit| limit.source.to_string()),
            limit_inferred: recording.limit_is_inferred(),
            limit_certainty: limit.map(|limit| limit.source.certainty()),
            limit_sentence: recording.limit_sentence(),
        }
    }
}

/// Lists the holders of moments.
struct Lists<'a> {
    recording: &'a Recording,
    question: &'a Question,
    callers: Callers<'a>,
    is_replay: bool,
}

impl Lists<'_> {
    fn causes(&self, picture: &Picture, streams: &Streams) -> MomentCauses {
        let failed = picture.failed;
        MomentCauses {
            reserved_bytes: picture.causes.total_bytes(),
            causes: picture.causes,
            moment: picture.moment.name(),
            events: picture.at,
            is_replay: self.is_replay,
            operations: picture.operations,
            failed_bytes: failed.map(|failed| failed.requested_bytes),
            failed_by: self.callers.code_of(failed.and_then(|failed| failed.stack)),
            why: picture.sentences(streams),
            graph_pools: GraphPools::at(picture),
            program_pools: ProgramPools::at(picture),
            heaps: picture.heaps.iter().map(HeapFigures::of).collect(),
        }
    }

    fn moment(&self, picture: &Picture, streams: &Streams) -> MomentFigures {
        let categories = picture.holders.categories(&self.callers);
        MomentFigures {
            causes: self.causes(picture, streams),
            holders: self.holders(&picture.holders),
            categories_sentence: categories_sentence(&categories),
            categories,
        }
    }

    fn holders(&self, all: &Holders) -> HolderList {
        let most = self.question.holders;
        let by_stack = all.by_code(&self.callers, most);
        let by_size = &all.by_size[..most.min(all.by_size.len())];
        let sum = |(bytes, blocks): (u64, u64), one: (u64, u64)| {
            (one.0.saturating_add(bytes), one.1 + blocks)
        };
        let listed = match all.has_stacks() {
            true => by_stack.iter().map(|row| row.holder.sum()).fold((0, 0), sum),
            false => by_size.iter().map(|c| (c.requested_bytes, c.blocks)).fold((0, 0), sum),
        };
        let files = self.callers.program_files();
        let figures = by_stack.into_iter().map(|row| CodeFigures {
            category: (row.category != Category::Unknown).then(|| row.category.name()),
            category_from: self.category_from(&row, &files),
            asked_for_by: row.asked_for_by,
            lived_before: row.holder.lived_before,
            frames: row.holder.stack.filter(|_| self.question.frames).map(|s| self.frames(s)),
            holder: row.holder,
        });
        HolderList {
            requested_bytes: all.requested_bytes,
            blocks: all.blocks,
            has_stacks: all.has_stacks(),
            by_stack: figures.collect(),
            by_size: by_size.to_vec(),
            by_age: all.by_age.clone(),
            others_bytes: all.requested_bytes.saturating_sub(listed.0),
            others_blocks: all.blocks.saturating_sub(listed.1),
        }
    }

    fn category_from(&self, row: &CodeHolder, files: &Files<'_>) -> Option<CategorySource> {
        let frame = self.callers.category_frame(row.caller?, files);
        let life = row.fate.sentence();
        (frame.is_some() || life.is_some()).then_some(CategorySource { frame, life })
    }

    fn frames(&self, stack: StackId) -> Vec<FrameFigures> {
        let stacks = &self.recording.trace.stacks;
        let is_shown = |frame: &&u32| {
            self.question.compared == Compared::AllFrames
                || !matches!(self.callers.kind(**frame), FrameKind::Runtime(_))
        };
        let frames = stacks.frame_numbers(stack).iter().filter(is_shown);
        let figures = |number: &u32| {
            let Frame { file, line, function } = stacks.frame(*number);
            FrameFigures { filename: file.to_owned(), line, name: function.to_owned() }
        };
        frames.map(figures).collect()
    }
}
