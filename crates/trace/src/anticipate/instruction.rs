//! The effect of the faulting instruction on the prediction: an experiment with a policy that the
//! subsystem does not have.
//!
//! A kernel knows the instruction of every fault, and an instruction that has filled a buffer will
//! do so again. [`predicted`] changes the direction and size of [`Streams`]' windows of adjacent
//! pages, according to counts of earlier windows. Other windows (strided, or in previously mapped
//! memory) stay unchanged.
//!
//! The pages beside a fault are counted in levels, at distances of 1, 2–3, 4–7, … pages, with the
//! used part of each level. Counts are kept for each context, from the widest to the narrowest: the
//! run before the fault; this run in one thread; the instruction, in any thread and process; the
//! instruction with the run. The probability of a level in a context follows from its count, with
//! the probability in the next wider context as the prior. A window contains the levels whose
//! probability reaches a threshold, which controls the trade-off between faults saved and unused
//! pages. A thread earns credit as in `Streams`.

use super::{Anticipate, Fault, Outcome, Pages, Policy, look, walk};
use crate::event::Trace;
use crate::plan::PlanError;
use faultless::prefault::{Predictor, Seen, Streams};
use std::collections::{HashMap, VecDeque};
use std::ops::Range;

/// The number of counted levels: a window has at most 2^LEVELS pages.
const LEVELS: usize = 6;
/// The length from which runs are not distinguished, in the classes of [`Streams`].
const RUN: u64 = 16;
/// Windows of a thread that wait for their check.
const WAITING: usize = 32;
/// Used pages that compensate for an unused page, and the largest credit.
const PRICE: u64 = 8;
const MOST_CREDIT: u64 = PRICE << LEVELS;
/// The factor by which a count decays at the next count: about the last ten matter.
const FADE: f32 = 0.9;
/// The probability without any count.
const UNKNOWN: f32 = 0.5;

/// Returns the outcome of `trace` with windows of at most `2^max_order` pages whose probability of
/// use is at least `threshold`. Without `instructions` those contexts are ignored, for comparison.
///
/// # Errors
/// The trace does not pass [`Trace::check`].
pub fn predicted(
    trace: &Trace,
    max_order: u8,
    threshold: f32,
    instructions: bool,
) -> Result<Outcome, PlanError> {
    let mut sized = Sized {
        streams: Anticipate::new(trace, max_order),
        threshold,
        instructions,
        counts: HashMap::new(),
        credit: vec![0; trace.threads.len()],
        waiting: trace.threads.iter().map(|_| VecDeque::new()).collect(),
    };
    walk(trace, &mut sized)
}

/// The context of a count.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Context {
    thread: Option<usize>,
    instruction: Option<u16>,
    /// The direction, and the class of the run before the fault.
    run: Option<(bool, u32)>,
}

/// Used parts, and all checked parts.
#[derive(Clone, Copy, Debug, Default)]
struct Count {
    used: f32,
    all: f32,
}

/// A window that waits for a check.
struct Window {
    page: u64,
    down: bool,
    /// Mapped pages, including the faulting page.
    mapped: u64,
    /// The extent of the check, in pages.
    steps: u64,
    /// The page at which its stream continues.
    leads_to: Option<u64>,
    contexts: Vec<Context>,
}

impl Window {
    fn at(&self, step: u64) -> u64 {
        if self.down { self.page - step } else { self.page + step }
    }
}

/// [`Streams`], with windows of other sizes.
struct Sized {
    streams: Anticipate<Streams>,
    threshold: f32,
    instructions: bool,
    counts: HashMap<Context, [Count; LEVELS]>,
    /// Pages that may be unused, times [`PRICE`]; by thread.
    credit: Vec<u64>,
    /// By thread.
    waiting: Vec<VecDeque<Window>>,
}

impl Sized {
    fn contexts(&self, fault: &Fault<'_>, down: bool, run: u64) -> Vec<Context> {
        let run = Some((down, run.checked_ilog2().map_or(0, |log| log + 1)));
        let any = Context { thread: None, instruction: None, run };
        let mut contexts = vec![any, Context { thread: Some(fault.thread), ..any }];
        if let Some(instruction) = fault.instruction.filter(|_| self.instructions) {
            let of = Context { instruction: Some(instruction), ..any };
            contexts.extend([Context { run: None, ..of }, of]);
        }
        contexts
    }

    fn chance(&self, contexts: &[Context], level: usize) -> f32 {
        contexts.iter().fold(UNKNOWN, |chance, context| {
            let count = self.counts.get(context).map_or(Count::default(), |levels| levels[level]);
            (count.used + chance) / (count.all + 1.0)
        })
    }

    /// Counts the used pages of a window.
    fn check(&mut self, thread: usize, window: &Window, pages: &Pages) {
        let used = |steps: Range<u64>| {
            steps.filter(|step| look(pages, window.at(*step)) == Seen::Used).count() as u64
        };
        let (mapped, all) = (used(1..window.mapped), used(1..window.steps));
        let credit = (self.credit[thread] + all).min(MOST_CREDIT);
        self.credit[thread] = credit.saturating_sub(PRICE * (window.mapped - 1 - mapped));
        for level in 0..LEVELS {
            let steps = 1 << level..(2 << level).min(window.steps);
            if steps.is_empty() {
                break;
            }
            let all = (steps.end - steps.start) as f32;
            let part = used(steps) as f32 / all;
            for context in &window.contexts {
                let count = &mut self.counts.entry(*context).or_default()[level];
                *count = Count { used: count.used * FADE + part, all: count.all * FADE + 1.0 };
            }
            // The end of a stream provides no information about later pages.
            if part < 0.5 {
                break;
            }
        }
    }

    fn check_in(&mut self, thread: usize, range: &Range<u64>, pages: &Pages) {
        let waiting = std::mem::take(&mut self.waiting[thread]);
        let (gone, kept) = waiting.into_iter().partition(|window| range.contains(&window.page));
        self.waiting[thread] = kept;
        let gone: VecDeque<Window> = gone;
        gone.iter().for_each(|window| self.check(thread, window, pages));
    }
}

impl Policy for Sized {
    fn fault(&mut self, fault: &Fault<'_>) -> Vec<u64> {
        let (page, reach) = (fault.page, &fault.reach);
        let window = self.streams.window(fault);
        let span = window.span();
        let known = self.streams.history(fault.space).recall(page).known;
        if window.record().is_none()
            || window.stride() > 1
            || known >> (page % faultless::prefault::BLOCK) & 1 == 1
        {
            self.streams.threads[fault.thread].mapped(&window, span);
            return window.pages().collect();
        }
        // If a window continues here, a longer window would have been right.
        let goes_on = |window: &Window| window.leads_to == Some(page);
        if let Some(at) = self.waiting[fault.thread].iter().rposition(goes_on)
            && let Some(window) = self.waiting[fault.thread].remove(at)
        {
            let window = Window { steps: window.mapped + 1, ..window };
            self.check(fault.thread, &window, fault.pages);
        }
        let (below, above) = (page - reach.start, reach.end - 1 - page);
        let row = |down: bool, most: u64, seen| {
            let at = |step| if down { page - step } else { page + step };
            let most = most.min(if down { below } else { above });
            (1..=most).take_while(|step| look(fault.pages, at(*step)) == seen).count() as u64
        };
        let runs = [row(true, RUN, Seen::Used), row(false, RUN, Seen::Used)];
        let of = [false, true].map(|down| self.contexts(fault, down, runs[usize::from(down)]));
        let chances = of.each_ref().map(|contexts| self.chance(contexts, 0));
        let empty = [false, true].map(|down| row(down, 1, Seen::Empty) > 0);
        let down = match empty {
            [true, false] => false,
            [false, true] => true,
            _ if runs[0] != runs[1] => runs[1] > runs[0],
            _ => chances[1] > chances[0],
        };
        let [up_contexts, down_contexts] = of;
        let contexts = if down { down_contexts } else { up_contexts };
        let likely = (0..usize::from(self.streams.max_order).min(LEVELS))
            .take_while(|level| self.chance(&contexts, *level) >= self.threshold)
            .count();
        let risk = self.credit[fault.thread] / PRICE + runs[usize::from(down)] / 2;
        let likely = likely.min(risk.checked_add(1).map_or(0, u64::ilog2) as usize);
        let ahead = row(down, (1 << likely) - 1, Seen::Empty);
        let beyond = row(down, (2 << likely) - 1, Seen::Empty);
        let pages = if down { page - ahead..page + 1 } else { page..page + ahead + 1 };
        let both = span.start.max(pages.start)..span.end.min(pages.end);
        self.streams.threads[fault.thread].mapped(&window, both);
        let waiting = &mut self.waiting[fault.thread];
        let leads_to = if down { page.checked_sub(ahead + 1) } else { Some(page + ahead + 1) };
        waiting.push_back(Window {
            page,
            down,
            mapped: ahead + 1,
            steps: beyond + 1,
            leads_to,
            contexts,
        });
        if waiting.len() > WAITING
            && let Some(window) = waiting.pop_front()
        {
            self.check(fault.thread, &window, fault.pages);
        }
        pages.collect()
    }

    fn taken(&mut self, thread: usize, space: usize, range: &Range<u64>, pages: &Pages) {
        self.check_in(thread, range, pages);
        self.streams.taken(thread, space, range, pages);
    }

    fn leaves(&mut self, thread: usize, space: usize, pages: &Pages) {
        self.check_in(thread, &(0..u64::MAX), pages);
        self.streams.leaves(thread, space, pages);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::event::{Access, Backing, Kind, Prot, Recorded, StackId};
    use faultless::PAGE_SIZE;

    const FILLS: u16 = 0x123;
    const TOUCHES: u16 = 0x456;

    /// One instruction fills mappings of 16 pages, another touches the first page of such mappings.
    fn trace() -> Trace {
        let mut events = Vec::new();
        for mapping in 0..400 {
            let start = (1 << 40) + mapping * 64 * PAGE_SIZE;
            let prot = Prot::READ | Prot::WRITE;
            let len = 16 * PAGE_SIZE;
            events.push(Kind::Map { start, len, prot, flags: 0x22, backing: Backing::Anon });
            let fills = mapping % 2 == 0;
            events.extend((0..if fills { 16 } else { 1 }).map(|page| Kind::Fault {
                page: start + page * PAGE_SIZE,
                access: Access::Write,
                kernel: false,
                present: false,
                instruction: Some(if fills { FILLS } else { TOUCHES }),
                stack: StackId::NONE,
            }));
        }
        let mut trace = Trace::of_one_thread(events);
        trace.header.recorded = Recorded::USER_FAULTS | Recorded::INSTRUCTIONS;
        trace
    }

    #[test]
    fn instruction_distinguishes_a_buffer_from_a_single_page() {
        let of = |instructions| predicted(&trace(), 4, 0.8, instructions).unwrap();
        let (without, with) = (of(false), of(true));
        assert_eq!((without.faults, with.faults), (200 * 17, 200 * 17));
        // One fault remains for each mapping, and some more during learning, and after the credit
        // is used up.
        assert!((400..800).contains(&with.left) && with.waste() < 0.05, "{with:?}");
        assert!(without.left - 400 > 2 * (with.left - 400), "{without:?} {with:?}");
    }

    #[test]
    fn higher_threshold_saves_less_and_wastes_less() {
        let trace = crate::recordings::find("redis").unwrap().trace().unwrap();
        let [bold, shy] = [0.7, 0.95].map(|at| predicted(&trace, 5, at, true).unwrap());
        assert!(bold.left < shy.left && bold.wasted > shy.wasted, "{bold:?} {shy:?}");
    }
}
