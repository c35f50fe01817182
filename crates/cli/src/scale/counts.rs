//! Numbers of CPUs on the command line: `1,2,4..512`.

use faultless::MAX_CPUS;
use std::str::FromStr;

/// Numbers of CPUs, in order, without repetition.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Counts(pub Vec<usize>);

impl Counts {
    /// Returns 1, 2, 4, and so on up to `most`, and `most`.
    pub fn doubling(most: usize) -> Self {
        let mut counts: Vec<_> = powers(1, most).chain([most]).collect();
        counts.dedup();
        Self(counts)
    }
}

/// Returns `first`, its double, and so on up to `last`.
fn powers(first: usize, last: usize) -> impl Iterator<Item = usize> {
    std::iter::successors(Some(first), |count| count.checked_mul(2))
        .take_while(move |count| *count <= last)
}

impl FromStr for Counts {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let number = |part: &str| {
            let count = part.trim().parse().ok().filter(|count| (1..=MAX_CPUS).contains(count));
            count.ok_or_else(|| format!("{part:?} is not a number of CPUs from 1 to {MAX_CPUS}"))
        };
        let mut counts = Vec::new();
        for part in text.split(',') {
            match part.split_once("..") {
                None => counts.push(number(part)?),
                Some((first, last)) => {
                    let (first, last) = (number(first)?, number(last)?);
                    if last < first {
                        return Err(format!("{part:?} ends before it begins"));
                    }
                    counts.extend(powers(first, last));
                }
            }
        }
        counts.sort_unstable();
        counts.dedup();
        Ok(Self(counts))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_and_doublings() {
        let parse = |text: &str| text.parse::<Counts>().map(|counts| counts.0);
        assert_eq!(parse("1,2,4..32"), Ok(vec![1, 2, 4, 8, 16, 32]));
        assert_eq!(parse("3..20,6, 1"), Ok(vec![1, 3, 6, 12]));
        assert_eq!(Counts::doubling(12).0, [1, 2, 4, 8, 12]);
        assert_eq!(Counts::doubling(4).0, [1, 2, 4]);
        for (bad, says) in [
            ("", "\"\" is not"),
            ("0", "\"0\" is not"),
            ("4,x", "\"x\" is not"),
            ("2000", "from 1 to 1024"),
            ("8..4", "ends before"),
            ("1...8", "\".8\" is not"),
        ] {
            let error = parse(bad).expect_err("invalid");
            assert!(error.contains(says), "{bad}: {error}");
        }
    }
}
