//! A search of all states of a model that also finds states from which the model cannot end.
//!
//! `stateright` checks laws in each state. A CPU that waits for ever breaks no such law: other CPUs
//! may repeat their steps for ever beside the waiting CPU. [`explore`] therefore records the steps
//! between states, and walks them backwards from the ended states. A state that this walk misses
//! is a state from which the model cannot end: a deadlock, a lost wake-up, or an endless retry.
//!
//! The search is breadth-first, so a trace is the shortest trace. A state is known by a hash of 64
//! bits. Ten million states share a hash with a probability of about 1 in 400,000.

use stateright::{Expectation, Model, Property};
use std::collections::hash_map::Entry;
use std::collections::{HashMap, VecDeque};
use std::hash::{BuildHasher, BuildHasherDefault, DefaultHasher, Hash};

/// The law that each state can reach an ended state.
pub const ENDS: &str = "each state can end";

/// The size of a complete search.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Explored {
    /// The number of different states.
    pub states: usize,
    /// The number of steps between these states.
    pub steps: usize,
    /// The number of ended states.
    pub ended: usize,
    /// The number of steps to the farthest state.
    pub depth: usize,
}

/// A broken law.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Broken<M: Model> {
    /// The name of the law.
    pub law: &'static str,
    /// The first state of the trace.
    pub from: M::State,
    /// The steps from this state to the state that breaks the law. No steps if a law of the kind
    /// "sometimes" holds in no state.
    pub trace: Vec<M::Action>,
    /// The last state of the trace.
    pub state: M::State,
}

/// How the search found a state.
#[derive(Clone, Copy)]
struct Found {
    /// The number of the state before, or of the initial state.
    before: u32,
    /// The number of the step in the model's list of steps; `None` for an initial state.
    step: Option<u16>,
}

/// Visits all states of `model`, and checks its laws; `is_ended` returns whether a state is ended.
/// With `only`, the search checks this law alone.
///
/// # Errors
/// The first law that is broken, in the order of the search.
///
/// # Panics
/// If `model` has more than 2^32 states, or no initial state.
pub fn explore<M>(
    model: &M,
    is_ended: impl Fn(&M::State) -> bool,
    only: Option<&str>,
) -> Result<Explored, Box<Broken<M>>>
where
    M: Model,
    M::State: Clone + Hash,
    M::Action: Clone,
{
    let properties = model.properties();
    let checks = |law: &str| only.is_none_or(|only| only == law);
    let laws: Vec<_> = properties.iter().filter(|law| checks(law.name)).collect();
    let mut unseen: Vec<_> =
        laws.iter().filter(|law| law.expectation == Expectation::Sometimes).collect();
    let hash = |state: &M::State| BuildHasherDefault::<DefaultHasher>::default().hash_one(state);

    let mut known = HashMap::new();
    let (mut found, mut pending) = (Vec::new(), VecDeque::new());
    for (n, state) in model.init_states().into_iter().enumerate() {
        known.insert(hash(&state), n as u32);
        found.push(Found { before: n as u32, step: None });
        pending.push_back((state, 0));
    }
    // For each state, the place behind its last successor in `successors`.
    let (mut ends, mut successors, mut ended) = (Vec::new(), Vec::new(), Vec::new());
    let (mut steps, mut depth) = (Vec::new(), 0);
    while let Some((state, far)) = pending.pop_front() {
        let number = ends.len() as u32;
        depth = far;
        unseen.retain(|law| !(law.condition)(model, &state));
        let is_broken = |law: &&&Property<M>| {
            law.expectation == Expectation::Always && !(law.condition)(model, &state)
        };
        if let Some(law) = laws.iter().find(is_broken) {
            return Err(trace(model, law.name, &found, number));
        }
        if is_ended(&state) {
            ended.push(number);
        }
        model.actions(&state, &mut steps);
        for (at, step) in steps.drain(..).enumerate() {
            let Some(next) = model.next_state(&state, step) else { continue };
            let fresh = u32::try_from(found.len()).expect("at most 2^32 states");
            let next_number = match known.entry(hash(&next)) {
                Entry::Occupied(entry) => *entry.get(),
                Entry::Vacant(entry) => {
                    entry.insert(fresh);
                    found.push(Found { before: number, step: Some(at as u16) });
                    pending.push_back((next, far + 1));
                    fresh
                }
            };
            successors.push(next_number);
        }
        ends.push(successors.len());
    }
    drop(known);
    if let Some(law) = unseen.first() {
        return Err(trace(model, law.name, &found, 0));
    }
    if checks(ENDS)
        && let Some(stuck) = first_stuck(&ends, &successors, &ended)
    {
        return Err(trace(model, ENDS, &found, stuck));
    }
    Ok(Explored { states: found.len(), steps: successors.len(), ended: ended.len(), depth })
}

/// Returns the first state from which no state of `ended` can be reached.
fn first_stuck(ends: &[usize], successors: &[u32], ended: &[u32]) -> Option<u32> {
    // The same steps, sorted by their targets.
    let mut first = vec![0usize; ends.len() + 1];
    successors.iter().for_each(|to| first[*to as usize + 1] += 1);
    (1..first.len()).for_each(|at| first[at] += first[at - 1]);
    let (mut place, mut sources) = (first.clone(), vec![0u32; successors.len()]);
    let mut begin = 0;
    for (from, end) in ends.iter().enumerate() {
        for to in &successors[begin..*end] {
            sources[place[*to as usize]] = from as u32;
            place[*to as usize] += 1;
        }
        begin = *end;
    }
    let mut can_end = vec![false; ends.len()];
    let mut pending = ended.to_vec();
    ended.iter().for_each(|state| can_end[*state as usize] = true);
    while let Some(state) = pending.pop() {
        for from in &sources[first[state as usize]..first[state as usize + 1]] {
            if !std::mem::replace(&mut can_end[*from as usize], true) {
                pending.push(*from);
            }
        }
    }
    can_end.iter().position(|can| !can).map(|at| at as u32)
}

/// Returns `law` as broken in the state with this number.
fn trace<M>(model: &M, law: &'static str, found: &[Found], mut number: u32) -> Box<Broken<M>>
where
    M: Model,
    M::State: Clone,
    M::Action: Clone,
{
    let mut places = Vec::new();
    while let Found { before, step: Some(place) } = found[number as usize] {
        places.push(usize::from(place));
        number = before;
    }
    let from = model.init_states().swap_remove(found[number as usize].before as usize);
    let (mut state, mut trace) = (from.clone(), Vec::new());
    for place in places.into_iter().rev() {
        let mut steps = Vec::new();
        model.actions(&state, &mut steps);
        let step = steps.swap_remove(place);
        trace.push(step.clone());
        state = model.next_state(&state, step).expect("the search took this step");
    }
    Box::new(Broken { law, from, trace, state })
}
