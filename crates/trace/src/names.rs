//! Lists of names in notes.

/// The most names of a list.
const NAMES: usize = 5;

/// Returns the different `names` in order, separated by commas: at most five, and then dots.
pub(crate) fn listed(mut names: Vec<String>) -> String {
    names.sort();
    names.dedup();
    let more = if names.len() > NAMES { ", ..." } else { "" };
    names.truncate(NAMES);
    names.join(", ") + more
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn list_has_at_most_five_different_names() {
        let names = |count: usize| (0..count).map(|at| format!("p{at}")).rev().collect::<Vec<_>>();
        assert_eq!(listed(names(5)), "p0, p1, p2, p3, p4");
        assert_eq!(listed(names(6)), "p0, p1, p2, p3, p4, ...");
        assert_eq!(listed(vec!["sleep".into(); 900]), "sleep");
    }
}
