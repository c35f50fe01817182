//! What the models share: how they explore, how they wait, and how a line is taken out of the code to see
//! that a model notices.
#![allow(dead_code, unused_macros, reason = "no file of models uses all of it")]

pub mod machine;

use faultless::CpuId;
use faultless::sync::mutant;
use faultless::sync::percpu::Local;
use faultless::sync::wait::Wait;
use loom::cell::UnsafeCell;
use loom::model::Builder;
use loom::thread;

/// The variable that limits the number of executions of each model.
const EXECUTIONS: &str = "FAULTLESS_EXECUTIONS";

/// Explores the executions with at most `preemptions` forced switches (`None`: any number).
///
/// Explores all of these executions, or the first `FAULTLESS_EXECUTIONS` of them if that variable is
/// set. A model of a mutant has no such limit, because its first failure ends the search.
pub fn explore(preemptions: Option<usize>, model: impl Fn() + Sync + Send + 'static) {
    let mut builder = Builder::new();
    builder.preemption_bound = preemptions;
    builder.max_branches = 20_000;
    if let (Ok(limit), None) = (std::env::var(EXECUTIONS), mutant::in_force()) {
        let limit = limit.parse().expect("FAULTLESS_EXECUTIONS is a number of executions");
        builder.max_permutations = Some(limit);
        // The checker compares the count with the limit at each checkpoint.
        builder.checkpoint_interval = builder.checkpoint_interval.min(limit.max(1));
    }
    builder.check(model);
}

/// Tests that fail, as they must: each runs a check on the code without the line of a mutant, and names
/// what the check then says.
macro_rules! caught {
    ($($name:ident: without $mutant:ident, $check:expr, says $what:literal;)*) => {$(
        #[test]
        #[should_panic(expected = $what)]
        fn $name() {
            faultless::sync::mutant::with(faultless::sync::mutant::Mutant::$mutant, || $check);
        }
    )*};
}

/// The proof of being on a CPU.
pub fn local(cpu: u16) -> Local {
    // SAFETY: each thread of a model claims another CPU, once.
    unsafe { Local::claim(CpuId(cpu)) }
}

/// Looks again and again, as any waiter. Two that wait by turns while a third does not run are an
/// execution without end, so what comes after a third vain look is run, by a fair schedule, but its
/// alternatives are not explored.
pub struct Fair;

impl Wait for Fair {
    fn wait(&self, looks: u32) {
        if looks >= 2 {
            loom::skip_branch();
        }
        thread::yield_now();
    }
}

/// A counter that fails the model when two threads are at it without order between them.
pub struct Guarded(UnsafeCell<u32>);

impl Guarded {
    pub fn new() -> Self {
        Self(UnsafeCell::new(0))
    }

    pub fn add(&self) {
        // SAFETY: none is claimed; that the accesses are ordered is what the model checker checks.
        self.0.with_mut(|value| unsafe { *value += 1 });
    }

    pub fn get(&self) -> u32 {
        // SAFETY: as in `add`.
        self.0.with(|value| unsafe { *value })
    }
}

// SAFETY: the model checker checks each access, which is the purpose of the models.
unsafe impl Sync for Guarded {}
// SAFETY: an integer.
unsafe impl Send for Guarded {}
