//! The default amount of work of each simulated CPU: some hundred pages, or calls.
//!
//! A simulated fault takes microseconds on the host, and a scale of 1 to 512 CPUs has a thousand
//! CPUs for each policy. The work of a CPU is therefore the same at each number of CPUs, and small.
//! It is still large enough to make one-time work (the first table of a CPU, its first batch of
//! frames) a small part.

use crate::error::Error;
use faultless_workload::Workload;

/// A parameter, and its value.
enum Amount {
    /// The same for any number of CPUs.
    Each(&'static str, &'static str),
    /// KiB for each CPU, for a parameter that applies to all CPUs together.
    All(&'static str, u64),
}

use Amount::{All, Each};

/// The parameters of each workload.
const SIZES: [(&str, &[Amount]); 20] = [
    ("pft", &[All("size", 1024)]),
    ("page_fault1", &[Each("size", "512K"), Each("passes", "2")]),
    ("page_fault2", &[Each("size", "512K"), Each("passes", "2")]),
    ("page_fault3", &[Each("size", "512K"), Each("passes", "2")]),
    ("page_fault_read", &[All("size", 1024)]),
    ("page_fault1_churn", &[All("size", 1024)]),
    ("text", &[Each("size", "8M"), Each("passes", "2")]),
    ("discard", &[Each("size", "512K"), Each("passes", "2")]),
    ("vma_mmap", &[Each("chunks", "256"), Each("passes", "2")]),
    ("vma_mmap_touch", &[Each("chunks", "256"), Each("passes", "2")]),
    ("vma_fault", &[Each("chunks", "64"), Each("passes", "2")]),
    ("vma_unmap", &[Each("chunks", "64"), Each("passes", "1")]),
    ("vma_unmap_untouched", &[Each("chunks", "256"), Each("passes", "2")]),
    ("brk1", &[Each("passes", "30")]),
    ("mmap1", &[Each("passes", "20")]),
    ("small_allocs", &[Each("size", "800K")]),
    ("ebizzy", &[Each("touch", "yes"), Each("chunks", "2"), Each("records", "2")]),
    (
        "forks",
        &[Each("image", "512K"), Each("dirty", "16"), Each("fresh", "32"), Each("processes", "4")],
    ),
    ("xsbench", &[All("fast", 1024), Each("lookups", "500")]),
    ("llm", &[All("fast", 1024), Each("passes", "1")]),
];

/// Returns the workload `name` for `cpus` CPUs, with the parameters `given`.
///
/// # Errors
/// Describes an invalid parameter.
pub fn workload(name: &str, given: &[String], cpus: usize) -> Result<Workload, Error> {
    let is_given = |param: &str| {
        given.iter().any(|argument| argument.split('=').next().is_some_and(|name| name == param))
    };
    if is_given("threads") {
        let why = "--cpus sets the number of threads: remove threads=";
        return Err(Error::input(name, why));
    }
    let sizes = SIZES.iter().find(|(known, _)| *known == name).map_or(&[][..], |(_, sizes)| sizes);
    let own = sizes.iter().filter_map(|amount| {
        let (param, value) = match amount {
            Each(param, value) => (param, (*value).to_owned()),
            All(param, kib) => (param, format!("{}K", kib * cpus as u64)),
        };
        (!is_given(param)).then(|| format!("{param}={value}"))
    });
    let arguments = given.iter().cloned().chain(own).chain([format!("threads={cpus}")]);
    Workload::parse(name, arguments).map_err(Error::Parameter)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn given_parameters_take_precedence_over_default_sizes() {
        for info in faultless_workload::all() {
            assert!(SIZES.iter().any(|(name, _)| *name == info.name), "{}", info.name);
            for cpus in [1, 1024] {
                let workload = workload(info.name, &[], cpus).expect("a valid workload");
                assert_eq!(workload.crew().workers, cpus);
                let each = workload.needs().written / cpus as u64;
                assert!(each <= 8 << 20, "{}: {each} bytes of one of {cpus}", info.name);
            }
        }
        let given = workload("pft", &["size=8M".into()], 4).expect("a valid workload");
        assert_eq!(given.needs().written, 8 << 20);
        let error = workload("pft", &["threads=4".into()], 4)
            .expect_err("the parameter is set")
            .to_string();
        assert!(error.contains("--cpus"), "{error}");
    }
}
