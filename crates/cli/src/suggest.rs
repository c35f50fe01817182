//! What a user may have meant.

/// How alike names are at least; clap's own measure.
const ALIKE: f64 = 0.7;

/// Which of `known` is most like `wrong`, if one is, as the end of a sentence: `; did you mean pft?`
pub fn hint<'a>(wrong: &str, known: impl IntoIterator<Item = &'a str>) -> String {
    let rated = known.into_iter().map(|name| (strsim::jaro(wrong, name), name));
    let best = rated.filter(|(like, _)| *like > ALIKE).max_by(|a, b| a.0.total_cmp(&b.0));
    best.map_or(String::new(), |(_, name)| format!("; did you mean {name}?"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_most_alike_and_nothing_else() {
        assert_eq!(hint("sice", ["threads", "size", "passes"]), "; did you mean size?");
        assert_eq!(hint("pyhton", ["java", "python", "sort"]), "; did you mean python?");
        assert_eq!(hint("colour", ["java", "python", "sort"]), "");
    }
}
