//! Common parts of the models: the exploration, the waiting, and the removal of a protocol step to
//! check that a model detects the loss.
#![allow(dead_code, unused_macros, reason = "no file of models uses all parts")]

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
/// Explores all of these executions, or the first `FAULTLESS_EXECUTIONS` of them if that variable
/// is set. A model of a mutant has no such limit, because its first failure ends the search.
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

/// Tests that fail, as required: each test runs a check on the code without the step of a mutant,
/// and names the expected message of the failure.
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

/// Waits like every waiter, with repeated checks. Two waiters that alternate while a third thread
/// does not run form an endless execution. After a third unsuccessful check, the model therefore
/// continues with a fair schedule, and does not explore its alternatives.
pub struct Fair;

impl Wait for Fair {
    fn wait(&self, looks: u32) {
        if looks >= 2 {
            loom::skip_branch();
        }
        thread::yield_now();
    }
}

/// A counter that fails the model if two threads access the counter without an order.
pub struct Guarded(UnsafeCell<u32>);

impl Guarded {
    pub fn new() -> Self {
        Self(UnsafeCell::new(0))
    }

    pub fn add(&self) {
        // SAFETY: none is claimed; the model checker checks the order of the accesses.
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
