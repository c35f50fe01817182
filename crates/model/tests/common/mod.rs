//! What the tests of all models do.

use faultless::Mutant;
use stateright::{Checker, Model};
use std::fmt::Debug;
use std::hash::Hash;

/// Every state that `model` can reach.
pub fn explored<M>(model: M) -> impl Checker<M>
where
    M: Model + Send + Sync + 'static,
    M::State: Clone + Debug + Hash + PartialEq + Send + Sync,
    M::Action: Clone + Debug + PartialEq + Send + Sync,
{
    model.checker().spawn_bfs().join()
}

/// The properties hold in every state.
pub fn hold<M>(checker: &impl Checker<M>)
where
    M: Model<State: Clone + Debug + Hash + PartialEq, Action: Clone + Debug + PartialEq>,
{
    checker.assert_properties();
    println!("{} states, {} of them unique", checker.state_count(), checker.unique_state_count());
    assert!(checker.is_done());
}

/// `law` breaks in the model without `mutant`.
pub fn breaks<M>(checker: &impl Checker<M>, mutant: Mutant, law: &'static str)
where
    M: Model<State: Clone + Debug + Hash + PartialEq, Action: Clone + Debug + PartialEq>,
{
    let path = checker.discovery(law).unwrap_or_else(|| panic!("{law}: holds without {mutant:?}"));
    println!("without {mutant:?}, {law} is broken after {} steps", path.into_actions().len());
}
