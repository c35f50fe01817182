//! Advice that applies to one process, by stable short names.
//!
//! The rows of the report and `faultless run --apply` create the same [`Apply`] by the functions of
//! this file.

use super::heap::LARGER_PAD;
use super::item::Apply;
use super::linked::{EAGER, Linked};
use super::preload::HugeText;
use super::{ahead, collector};
use crate::suggest;
use faultless_workload::Kind;
use std::str::FromStr;

/// The variables with which glibc's `malloc` keeps freed memory: no separate mappings, and a
/// trimming threshold of 1 TiB, which is larger than the free memory of a heap.
pub const KEEP: [(&str, &str); 2] =
    [("MALLOC_MMAP_MAX_", "0"), ("MALLOC_TRIM_THRESHOLD_", "1099511627776")];
/// The variables of builds of jemalloc: without a prefix, of Rust, and of Redis.
const CONF: [&str; 3] = ["MALLOC_CONF", "_RJEM_MALLOC_CONF", "JE_MALLOC_CONF"];
/// The settings with which jemalloc keeps freed memory and uses all of it again. By default,
/// jemalloc splits no free part that is 64 times as large as a block, so adjacent freed blocks that
/// were joined serve no block of their size until they are returned to the kernel.
const DECAY: &str = "dirty_decay_ms:-1,muzzy_decay_ms:-1,lg_extent_max_active_fit:20";
/// The variables with which mimalloc keeps freed memory: since version 2.1, and in earlier
/// versions.
const PURGE: (&str, &str) = ("MIMALLOC_PURGE_DELAY", "-1");
const DECOMMIT: (&str, &str) = ("MIMALLOC_ALLOW_DECOMMIT", "0");
/// The time in milliseconds after which mimalloc returns free pages, if the user gives none.
pub const DELAY: u64 = 1000;
/// The variables with this time: since version 2.1, and in earlier versions.
const DELAYS: [&str; 2] = ["MIMALLOC_PURGE_DELAY", "MIMALLOC_DECOMMIT_DELAY"];
/// The settings of jemalloc that keep address space, and put its metadata on huge pages.
const RETAIN: &str = "retain:true";
const METADATA: &str = "metadata_thp:always";
/// The variables with which mimalloc requests huge pages: since version 2.1, and in earlier
/// versions.
const ALLOW_LARGE: (&str, &str) = ("MIMALLOC_ALLOW_LARGE_OS_PAGES", "1");
const LARGE: (&str, &str) = ("MIMALLOC_LARGE_OS_PAGES", "1");
/// The limit of arenas advised to a program with more: the heap, and one arena for all other
/// threads.
pub const ARENAS: u64 = 2;
/// The smallest size in bytes of a mapping that the preloaded library populates.
const LEAST: u64 = 64 << 10;
/// The size in bytes of the smallest mapping to populate, if the user gives none.
const POPULATE: u64 = 1 << 20;

/// The distance in bytes of prefault ahead, if the user gives none.
const AHEAD: u64 = 16 << 20;

/// A setting by its short name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Named {
    text: String,
    apply: Apply,
}

/// The value of a name.
enum Value {
    /// The name has no value.
    Without,
    /// The kind, and the default.
    Optional(Kind, u64),
    /// The kind, and an example.
    Required(Kind, &'static str),
}

/// A short name.
struct Row {
    name: &'static str,
    value: Value,
    meaning: &'static str,
    apply: fn(u64) -> Apply,
}

/// All short names.
static ROWS: [Row; 26] = [
    Row {
        name: "no-thp",
        value: Value::Without,
        meaning: "no transparent huge pages",
        apply: |_| Apply::WithoutThp,
    },
    Row {
        name: "populate",
        value: Value::Optional(Kind::Size, POPULATE),
        meaning: "populate new mappings of this size and more",
        apply: Apply::Populate,
    },
    Row {
        name: "prefault-ahead",
        value: Value::Optional(Kind::Size, AHEAD),
        meaning: "populate blocks of 4 MiB and more in order of use, by a second thread",
        apply: Apply::PrefaultAhead,
    },
    Row {
        name: "populate-files",
        value: Value::Optional(Kind::Size, POPULATE),
        meaning: "populate new mappings of files of this size and more",
        apply: Apply::PopulateFiles,
    },
    Row {
        name: "huge-text",
        value: Value::Without,
        meaning: "program text on huge pages, in a copy if necessary",
        apply: |_| Apply::HugeText(HugeText::Copy),
    },
    Row {
        name: "huge-text-collapse",
        value: Value::Without,
        meaning: "the same without a copy, if the kernel permits",
        apply: |_| Apply::HugeText(HugeText::Collapse),
    },
    Row {
        name: "malloc-thp",
        value: Value::Without,
        meaning: "glibc's malloc requests huge pages",
        apply: |_| malloc_thp(),
    },
    Row {
        name: "malloc-keeps-memory",
        value: Value::Without,
        meaning: "glibc's malloc returns no memory",
        apply: |_| malloc_keeps_memory(),
    },
    Row {
        name: "malloc-grows",
        value: Value::Optional(Kind::Size, LARGER_PAD),
        meaning: "glibc's heap grows in steps of this size",
        apply: malloc_grows,
    },
    Row {
        name: "malloc-arenas",
        value: Value::Optional(Kind::Count(1, 4096), ARENAS),
        meaning: "the maximum of glibc's arenas",
        apply: malloc_arenas,
    },
    Row {
        name: "jemalloc-keeps-memory",
        value: Value::Without,
        meaning: "jemalloc returns no memory",
        apply: |_| jemalloc(DECAY),
    },
    Row {
        name: "jemalloc-thp",
        value: Value::Without,
        meaning: "jemalloc requests huge pages",
        apply: |_| jemalloc("thp:always"),
    },
    Row {
        name: "jemalloc-metadata-thp",
        value: Value::Without,
        meaning: "jemalloc requests huge pages for its metadata",
        apply: |_| jemalloc(METADATA),
    },
    Row {
        name: "jemalloc-retain",
        value: Value::Without,
        meaning: "jemalloc keeps address space (the default on 64-bit Linux)",
        apply: |_| jemalloc(RETAIN),
    },
    Row {
        name: "jemalloc-arenas",
        value: Value::Optional(Kind::Count(1, 4096), 1),
        meaning: "the number of jemalloc's arenas",
        apply: |count| jemalloc(&format!("narenas:{count}")),
    },
    Row {
        name: "jemalloc-background-thread",
        value: Value::Without,
        meaning: "a thread of jemalloc returns memory",
        apply: |_| jemalloc("background_thread:true"),
    },
    Row {
        name: "mimalloc-keeps-memory",
        value: Value::Without,
        meaning: "mimalloc returns no memory",
        apply: |_| Apply::environment([PURGE, DECOMMIT].map(owned)),
    },
    Row {
        name: "mimalloc-purge-delay",
        value: Value::Optional(Kind::Count(1, 1_000_000_000), DELAY),
        meaning: "mimalloc returns free pages after this time, in milliseconds",
        apply: |milliseconds| {
            Apply::environment(DELAYS.map(|variable| (variable, milliseconds.to_string())))
        },
    },
    Row {
        name: "mimalloc-eager-commit",
        value: Value::Without,
        meaning: "mimalloc makes its memory writable at once",
        apply: |_| Apply::environment(EAGER.map(owned)),
    },
    Row {
        name: "mimalloc-thp",
        value: Value::Without,
        meaning: "mimalloc requests huge pages",
        apply: |_| Apply::environment([ALLOW_LARGE, LARGE].map(owned)),
    },
    Row {
        name: "tcmalloc-keeps-memory",
        value: Value::Without,
        meaning: "tcmalloc of gperftools returns no memory",
        apply: |_| tcmalloc_keeps(),
    },
    Row {
        name: "go-frees-lazily",
        value: Value::Without,
        meaning: "Go keeps freed pages until the kernel needs them",
        apply: |_| go_frees_lazily(),
    },
    Row {
        name: "gogc",
        value: Value::Optional(Kind::Count(1, 1_000_000), collector::GOGC as u64),
        meaning: "Go collects at this growth of the heap, in percent",
        apply: gogc,
    },
    Row {
        name: "java-thp",
        value: Value::Without,
        meaning: "huge pages for the Java heap",
        apply: |_| java_thp(),
    },
    Row {
        name: "java-touches-heap",
        value: Value::Without,
        meaning: "Java touches its heap at the start",
        apply: |_| java_touches_heap(),
    },
    Row {
        name: "java-heap",
        value: Value::Required(Kind::Size, "256M"),
        meaning: "the Java heap has this size from the start",
        apply: java_heap,
    },
];

impl Row {
    /// Returns the form of the name with its value.
    fn form(&self) -> String {
        match &self.value {
            Value::Without => self.name.to_owned(),
            Value::Optional(kind, default) => format!("{}[={}]", self.name, kind.show(*default)),
            Value::Required(_, example) => format!("{}={example}", self.name),
        }
    }

    /// Parses the value of the name.
    fn parse(&self, text: Option<&str>) -> Result<u64, String> {
        let name = self.name;
        let (kind, example) = match (&self.value, text) {
            (Value::Without, None) => return Ok(0),
            (Value::Without, Some(_)) => return Err(format!("{name} has no value: use {name}")),
            (Value::Optional(_, default), None) => return Ok(*default),
            (Value::Optional(kind, default), Some(_)) => (kind, kind.show(*default)),
            (Value::Required(kind, example), _) => (kind, (*example).to_owned()),
        };
        let wanted = || format!("{name} needs {kind}, as in {name}={example}");
        let value = kind.parse(text.unwrap_or_default()).ok_or_else(wanted)?;
        if self.name == "populate" && value < LEAST {
            let least = kind.show(LEAST);
            return Err(format!(
                "smaller mappings are not populated: use populate={least} or more"
            ));
        }
        if self.name == "prefault-ahead" && value < ahead::LEAST {
            let least = kind.show(ahead::LEAST);
            return Err(format!("the distance is too short: use prefault-ahead={least} or more"));
        }
        Ok(value)
    }
}

impl Named {
    /// Returns the text with which the advice was named.
    pub fn text(&self) -> &str {
        &self.text
    }

    /// Returns the way to apply the advice.
    pub fn apply(&self) -> &Apply {
        &self.apply
    }
}

impl FromStr for Named {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (name, value) =
            text.split_once('=').map_or((text, None), |(name, value)| (name, Some(value)));
        let row = ROWS.iter().find(|row| row.name == name).ok_or_else(|| {
            let names: Vec<_> = ROWS.iter().map(|row| row.name).collect();
            format!("one of {}{}", names.join(", "), suggest::hint(name, names.iter().copied()))
        })?;
        let apply = (row.apply)(row.parse(value)?);
        Ok(Self { text: text.to_owned(), apply })
    }
}

/// Returns the text for `--apply` whose advice is `apply`; `None` if no name has this advice.
pub fn text_of(apply: &Apply) -> Option<String> {
    let given: Vec<u64> = match apply {
        Apply::Populate(bytes) | Apply::PrefaultAhead(bytes) | Apply::PopulateFiles(bytes) => {
            vec![*bytes]
        }
        Apply::Environment(variables) => {
            variables.iter().flat_map(|(_, value)| numbers(value)).collect()
        }
        _ => Vec::new(),
    };
    ROWS.iter().find_map(|row| match &row.value {
        Value::Without => covers(&(row.apply)(0), apply).then(|| row.name.to_owned()),
        Value::Optional(kind, _) | Value::Required(kind, _) => {
            let texts = given.iter().map(|value| format!("{}={}", row.name, kind.show(*value)));
            // A number of another row has another effect here, or is out of range.
            texts
                .into_iter()
                .find(|text| text.parse().is_ok_and(|it: Named| covers(&it.apply, apply)))
        }
    })
}

/// Returns whether `named` has all of `apply`. A name sets the variables of several builds of an
/// allocator.
fn covers(named: &Apply, apply: &Apply) -> bool {
    match (named, apply) {
        (Apply::Environment(named), Apply::Environment(variables)) => {
            variables.iter().all(|variable| named.contains(variable))
        }
        _ => named == apply,
    }
}

/// Returns the numbers in the value of a variable. A number of MiB, as of a Java heap, is also
/// returned in bytes.
fn numbers(value: &str) -> Vec<u64> {
    let parts = value.split(|c: char| !c.is_ascii_digit());
    let numbers = parts.filter_map(|part| part.parse::<u64>().ok());
    numbers.flat_map(|number| [Some(number), number.checked_mul(1 << 20)]).flatten().collect()
}

/// Returns each name with the form of its value, and its meaning.
pub fn names() -> impl Iterator<Item = (String, &'static str)> {
    ROWS.iter().map(|row| (row.form(), row.meaning))
}

/// glibc's `malloc` requests huge pages.
pub fn malloc_thp() -> Apply {
    Apply::environment([("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1".into())])
}

/// glibc's `malloc` keeps freed memory.
pub fn malloc_keeps_memory() -> Apply {
    Apply::environment(KEEP.map(|(name, value)| (name, value.to_owned())))
}

/// glibc's heap grows by this number of bytes at a time.
pub fn malloc_grows(bytes: u64) -> Apply {
    Apply::environment([("MALLOC_TOP_PAD_", bytes.to_string())])
}

/// glibc's `malloc` has at most this number of arenas.
pub fn malloc_arenas(most: u64) -> Apply {
    Apply::environment([("MALLOC_ARENA_MAX", most.to_string())])
}

/// Settings of jemalloc, for builds without and with a prefix.
fn jemalloc(settings: &str) -> Apply {
    Apply::environment(CONF.map(|variable| (variable, settings.to_owned())))
}

/// tcmalloc of gperftools keeps freed memory.
fn tcmalloc_keeps() -> Apply {
    let settings = [("TCMALLOC_RELEASE_RATE", "0"), ("TCMALLOC_AGGRESSIVE_DECOMMIT", "0")];
    Apply::environment(settings.map(owned))
}

/// Returns a variable with its value.
fn owned((name, value): (&'static str, &str)) -> (&'static str, String) {
    (name, value.to_owned())
}

/// Returns the settings with which this build of an allocator keeps freed memory, if there are any.
pub fn keeps(linked: &Linked) -> Option<Apply> {
    match linked {
        Linked::Jemalloc { variable, decays: true, .. } => {
            Some(Apply::environment([(variable, DECAY.to_owned())]))
        }
        Linked::Mimalloc { purges: true, .. } => Some(Apply::environment([owned(PURGE)])),
        Linked::Mimalloc { decommits: true, .. } => Some(Apply::environment([owned(DECOMMIT)])),
        Linked::Gperftools => Some(tcmalloc_keeps()),
        Linked::Jemalloc { .. } | Linked::Mimalloc { .. } | Linked::Google => None,
    }
}

/// Returns the settings with which this build of jemalloc keeps freed memory and address space, if
/// there are any.
pub fn keeps_and_retains(linked: &Linked) -> Option<Apply> {
    match linked {
        Linked::Jemalloc { variable, decays: true, retains: true, .. } => {
            Some(Apply::environment([(variable, format!("{RETAIN},{DECAY}"))]))
        }
        _ => None,
    }
}

/// Returns the settings with which this build of jemalloc keeps address space, if there are any.
pub fn retain(linked: &Linked) -> Option<Apply> {
    match linked {
        Linked::Jemalloc { variable, retains: true, .. } => {
            Some(Apply::environment([(variable, RETAIN.to_owned())]))
        }
        _ => None,
    }
}

/// Returns the settings with which this build of jemalloc requests huge pages for its metadata, if
/// there are any.
pub fn metadata(linked: &Linked) -> Option<Apply> {
    match linked {
        Linked::Jemalloc { variable, huge: true, .. } => {
            Some(Apply::environment([(variable, METADATA.to_owned())]))
        }
        _ => None,
    }
}

/// Returns the settings with which this build of mimalloc returns free pages after this number of
/// milliseconds, if there are any.
pub fn delay(linked: &Linked, milliseconds: u64) -> Option<Apply> {
    match linked {
        Linked::Mimalloc { delay: Some(variable), .. } => {
            Some(Apply::environment([(variable, milliseconds.to_string())]))
        }
        _ => None,
    }
}

/// Returns the settings with which this build of mimalloc makes its memory writable at once, if
/// there are any.
pub fn eager(linked: &Linked) -> Option<Apply> {
    match linked {
        Linked::Mimalloc { eager, .. } if !eager.is_empty() => {
            let owned = |(name, value): &(&str, &str)| ((*name).to_owned(), (*value).to_owned());
            Some(Apply::Environment(eager.iter().map(owned).collect()))
        }
        _ => None,
    }
}

/// Returns the settings with which this build of an allocator requests huge pages, if there are
/// any.
pub fn huge(linked: &Linked) -> Option<Apply> {
    match linked {
        Linked::Jemalloc { variable, huge: true, .. } => {
            Some(Apply::environment([(variable, "thp:always".to_owned())]))
        }
        Linked::Mimalloc { allows, .. } => {
            Some(Apply::environment([owned(if *allows { ALLOW_LARGE } else { LARGE })]))
        }
        Linked::Jemalloc { .. } | Linked::Gperftools | Linked::Google => None,
    }
}

/// Go keeps freed pages mapped until the kernel needs them.
pub fn go_frees_lazily() -> Apply {
    Apply::environment([("GODEBUG", "madvdontneed=0".into())])
}

/// Go collects when its heap has grown by this share, in percent.
pub fn gogc(percent: u64) -> Apply {
    Apply::environment([("GOGC", percent.to_string())])
}

/// A Java heap in huge pages.
pub fn java_thp() -> Apply {
    java("-XX:+UseTransparentHugePages".into())
}

/// A Java virtual machine touches its heap before it starts the program.
pub fn java_touches_heap() -> Apply {
    java("-XX:+AlwaysPreTouch".into())
}

/// The Java heap has this number of bytes from the start.
pub fn java_heap(bytes: u64) -> Apply {
    java(format!("-Xms{}m", mebibytes(bytes)))
}

/// Returns a size of the Java heap in MiB, rounded up.
pub fn mebibytes(bytes: u64) -> u64 {
    bytes.div_ceil(1 << 20)
}

/// Returns options for a Java virtual machine started by the program.
fn java(options: String) -> Apply {
    Apply::environment([("JAVA_TOOL_OPTIONS", options)])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(text: &str) -> Result<Apply, String> {
        text.parse().map(|named: Named| named.apply)
    }

    #[test]
    fn every_form_in_the_list_is_accepted() {
        for (form, _) in names() {
            let plain = form.split('[').next().expect("a name");
            assert_ne!(parsed(plain), Ok(Apply::Nothing), "{form}");
            let with_default = form.replace(['[', ']'], "");
            assert_eq!(parsed(plain), parsed(&with_default), "{form}");
        }
        assert_eq!(names().count(), ROWS.len());
    }

    #[test]
    fn values_reach_the_setting() {
        assert_eq!(parsed("populate=2M"), Ok(Apply::Populate(2 << 20)));
        assert_eq!(parsed("populate-files=2M"), Ok(Apply::PopulateFiles(2 << 20)));
        assert_eq!(parsed("gogc=150"), Ok(gogc(150)));
        let delays = DELAYS.map(|variable| (variable, "50".to_owned()));
        assert_eq!(parsed("mimalloc-purge-delay=50"), Ok(Apply::environment(delays)));
        assert_eq!(parsed("malloc-grows=1M"), Ok(malloc_grows(1 << 20)));
        let heap = Apply::environment([("JAVA_TOOL_OPTIONS", "-Xms1024m".into())]);
        assert_eq!(parsed("java-heap=1G"), Ok(heap));
    }

    #[test]
    fn advice_has_the_text_that_names_it() {
        for text in [
            "no-thp",
            "populate=2M",
            "prefault-ahead=16M",
            "huge-text",
            "malloc-keeps-memory",
            "malloc-arenas=2",
            "jemalloc-thp",
            "gogc=150",
            "java-thp",
            "java-heap=1G",
        ] {
            let apply = parsed(text).expect(text);
            let found = text_of(&apply).expect(text);
            assert_eq!(parsed(&found), Ok(apply), "{text}: {found}");
        }
        let purge = Apply::environment([owned(PURGE)]);
        assert_eq!(text_of(&purge).as_deref(), Some("mimalloc-keeps-memory"), "one of two builds");
        assert_eq!(text_of(&Apply::Nothing), None);
        assert_eq!(text_of(&Apply::Sysfs("/sys/x".into(), "1".into())), None);
    }

    #[test]
    fn wrong_names_and_values_are_explained() {
        for (wrong, expected) in [
            ("malloc-keep-memory", "did you mean malloc-keeps-memory?"),
            ("thp", "one of no-thp, populate, "),
            ("", "one of no-thp, populate, "),
            ("no-thp=1", "no-thp has no value"),
            ("populate=4K", "use populate=64K or more"),
            ("prefault-ahead=4K", "use prefault-ahead=256K or more"),
            ("populate=many", "populate needs "),
            ("gogc=0", "a number from 1 to 1000000"),
            ("java-heap", "as in java-heap=256M"),
        ] {
            let error = parsed(wrong).expect_err("wrong");
            assert!(error.contains(expected), "{wrong}: {error}");
        }
    }
}
