//! Suggestions for wrong names.

/// The least similarity of a suggested name, the same as in clap.
const ALIKE: f64 = 0.7;

/// Returns the name in `known` most similar to `wrong`, as the end of a sentence:
/// `; did you mean pft?`. Returns an empty string if no name is similar.
pub fn hint<'a>(wrong: &str, known: impl IntoIterator<Item = &'a str>) -> String {
    let rated = known.into_iter().map(|name| (strsim::jaro(wrong, name), name));
    let best = rated.filter(|(like, _)| *like > ALIKE).max_by(|a, b| a.0.total_cmp(&b.0));
    best.map_or(String::new(), |(_, name)| format!("; did you mean {name}?"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hint_suggests_only_a_similar_name() {
        assert_eq!(hint("sice", ["threads", "size", "passes"]), "; did you mean size?");
        assert_eq!(hint("pyhton", ["java", "python", "sort"]), "; did you mean python?");
        assert_eq!(hint("colour", ["java", "python", "sort"]), "");
    }
}
