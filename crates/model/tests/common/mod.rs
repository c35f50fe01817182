//! The parts of the tests that all models share.

use faultless::Mutant;
use stateright::{Checker, HasDiscoveries, Model};
use std::collections::BTreeSet;
use std::fmt::Debug;
use std::hash::Hash;

/// The properties hold in each state that `model` can reach.
pub fn hold<M>(model: M)
where
    M: Model + Send + Sync + 'static,
    M::State: Clone + Debug + Hash + PartialEq + Send + Sync,
    M::Action: Clone + Debug + PartialEq + Send + Sync,
{
    let checker = model.checker().spawn_bfs().join();
    checker.assert_properties();
    println!("{} states, {} of them unique", checker.state_count(), checker.unique_state_count());
    assert!(checker.is_done());
}

/// `law` breaks in `model`, which is one without `mutant`. The search ends at the first state that
/// breaks the law.
pub fn breaks<M>(model: M, mutant: Mutant, law: &'static str)
where
    M: Model + Send + Sync + 'static,
    M::State: Clone + Debug + Hash + PartialEq + Send + Sync,
    M::Action: Clone + Debug + PartialEq + Send + Sync,
{
    let found = HasDiscoveries::AllOf(BTreeSet::from([law]));
    let checker = model.checker().finish_when(found).spawn_bfs().join();
    let path = checker.discovery(law).unwrap_or_else(|| panic!("{law}: holds without {mutant:?}"));
    println!("without {mutant:?}, {law} is broken after {} steps", path.into_actions().len());
}
