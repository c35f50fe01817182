//! The subsystem against the host's Linux: all cases that once failed, and some new cases.

use faultless_oracle::{Case, Generator, Oracle};
use std::path::Path;

#[test]
fn cases_that_once_failed() {
    let mut oracle = Oracle::new().expect("Linux");
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("cases");
    let mut count = 0;
    for entry in std::fs::read_dir(folder).expect("the folder of cases") {
        let path = entry.expect("an entry").path();
        let text = std::fs::read_to_string(&path).expect("a case");
        let case: Case = text.parse().unwrap_or_else(|error| panic!("{path:?}: {error}"));
        if let Err(failure) = oracle.run(&case).expect("a case that Linux runs") {
            panic!("{path:?}: {failure}");
        }
        count += 1;
    }
    assert!(count > 0, "a folder with cases");
}

#[test]
fn random_cases() {
    let mut oracle = Oracle::new().expect("Linux");
    for seed in 0..300 {
        let case = Generator::new(seed).case(60);
        if let Err(failure) = oracle.run(&case).expect("a case that Linux runs") {
            panic!("seed {seed}:\n{case}{failure}");
        }
    }
}
