//! Files with advice: `advise --save` writes them, people edit them, `run --advice` applies them.
//!
//! A file is TOML. It starts with the version of its format. Each advice has a name, the predicted
//! and the measured saving, and one way to apply the advice.

use super::item::Apply;
use super::preload::{self, HugeText};
use crate::error::Error;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fmt::Display;
use std::path::{Component, Path, PathBuf};

/// The version of the format.
const VERSION: u64 = 1;
/// The directories with settings of the whole system.
const SYSTEM: [&str; 2] = ["/sys", "/proc/sys"];
/// The value of the key `thp`.
const OFF: &str = "off";
/// The remedy for a file that cannot be read.
const AGAIN: &str = "write the file again: faultless advise --save FILE -- PROGRAM";
/// The beginning of a file, for its readers.
const HEAD: &str = "\
# Advice of `faultless advise`. Apply it: faultless run --advice FILE -- PROGRAM
# Remove or change any [[advice]]. Savings are seconds of processor time in one run, or of elapsed
# time after a trial with --cold, and do not add up.
";

/// The keys of a setting, of which each setting has one.
const WAYS: [&str; 7] =
    ["thp", "populate_bytes", "ahead_bytes", "file_bytes", "huge_text", "environment", "system"];

/// A setting, with its predicted and measured saving.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(into = "Row", try_from = "Row")]
pub struct Advice {
    /// The name.
    pub name: String,
    /// The predicted saving in seconds: of processor time, or of elapsed time for a trial with a
    /// cold page cache.
    pub predicted: Option<f64>,
    /// The measured saving in the same seconds.
    pub measured: Option<f64>,
    /// The way to apply the advice. [`Apply::Nothing`] cannot be written.
    pub apply: Apply,
}

/// The contents of a file.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Contents {
    version: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    program: Option<String>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    advice: Vec<Advice>,
}

/// The version of a file with any contents.
#[derive(Debug, Deserialize)]
struct Versioned {
    version: Option<toml::Value>,
}

/// A setting in a file.
#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Row {
    name: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    predicted_seconds: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    measured_seconds: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    thp: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    populate_bytes: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    ahead_bytes: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    file_bytes: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    huge_text: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    environment: Option<BTreeMap<String, String>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    system: Option<System>,
}

/// A setting of the whole system.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct System {
    file: PathBuf,
    value: String,
}

/// Writes `advice` for `program` in the form of a file. Skips advice that cannot be applied.
///
/// # Errors
/// The path of a setting is not valid UTF-8.
pub fn encode(program: &str, advice: &[Advice]) -> Result<String, Error> {
    let able = advice.iter().filter(|advice| advice.apply != Apply::Nothing);
    let contents = Contents {
        version: VERSION,
        program: Some(program.to_owned()),
        advice: able.cloned().collect(),
    };
    let text = toml::to_string(&contents).map_err(|error| Error::run("the advice", error))?;
    Ok(format!("{HEAD}{text}"))
}

/// Reads the advice in the `text` of the file `name`.
///
/// # Errors
/// The text is not a file of [`encode`]: the error names the file, the place and the remedy.
pub fn decode(name: &Path, text: &str) -> Result<Vec<Advice>, Error> {
    let damaged = |error: toml::de::Error| {
        let why = format!("{}\ncorrect this place, or {AGAIN}", error.to_string().trim_end());
        Error::input(name.display(), why)
    };
    let unknown = |what: &dyn Display| {
        let why = format!("{what}, and this command reads version {VERSION}: {AGAIN}");
        Error::input(name.display(), why)
    };
    // The version is checked before the keys, as another version may have other keys.
    match toml::from_str::<Versioned>(text).map_err(damaged)?.version {
        Some(toml::Value::Integer(version)) if u64::try_from(version) == Ok(VERSION) => {}
        Some(version) => return Err(unknown(&format_args!("the version is {version}"))),
        None => return Err(unknown(&"there is no version at the beginning")),
    }
    Ok(toml::from_str::<Contents>(text).map_err(damaged)?.advice)
}

impl From<Advice> for Row {
    fn from(advice: Advice) -> Self {
        // Tenths of a millisecond are less than the noise.
        let rounded = |seconds: Option<f64>| seconds.map(|value| (value * 1e4).round() / 1e4);
        let mut row = Self {
            name: advice.name,
            predicted_seconds: rounded(advice.predicted),
            measured_seconds: rounded(advice.measured),
            ..Self::default()
        };
        match advice.apply {
            Apply::Nothing => {}
            Apply::WithoutThp => row.thp = Some(OFF.to_owned()),
            Apply::Populate(bytes) => row.populate_bytes = Some(bytes),
            Apply::PrefaultAhead(bytes) => row.ahead_bytes = Some(bytes),
            Apply::PopulateFiles(bytes) => row.file_bytes = Some(bytes),
            Apply::HugeText(way) => row.huge_text = Some(way.word().to_owned()),
            Apply::Environment(all) => row.environment = Some(all.into_iter().collect()),
            Apply::Sysfs(file, value) => row.system = Some(System { file, value }),
        }
        row
    }
}

impl TryFrom<Row> for Advice {
    type Error = String;

    fn try_from(row: Row) -> Result<Self, String> {
        let Row { name, .. } = row;
        if name.is_empty() || name.contains(char::is_control) {
            return Err("a name needs letters, without line breaks".into());
        }
        let (predicted, measured) = (row.predicted_seconds, row.measured_seconds);
        if [predicted, measured].into_iter().flatten().any(|seconds| !seconds.is_finite()) {
            return Err(format!("{name:?}: seconds need a number"));
        }
        let ways = [
            row.thp.map(|thp| thp_way(&thp)),
            row.populate_bytes.map(|bytes| Ok(Apply::Populate(positive("populate_bytes", bytes)?))),
            row.ahead_bytes.map(|bytes| Ok(Apply::PrefaultAhead(positive("ahead_bytes", bytes)?))),
            row.file_bytes.map(|bytes| Ok(Apply::PopulateFiles(positive("file_bytes", bytes)?))),
            row.huge_text.map(|word| huge_text_way(&word)),
            row.environment.map(environment_way),
            row.system.map(system_way),
        ];
        let mut ways = ways.into_iter().flatten();
        let (Some(apply), None) = (ways.next(), ways.next()) else {
            return Err(format!("{name:?}: a setting needs one of {}", WAYS.join(", ")));
        };
        let apply = apply.map_err(|why| format!("{name:?}: {why}"))?;
        Ok(Self { name, predicted, measured, apply })
    }
}

fn thp_way(thp: &str) -> Result<Apply, String> {
    if thp == OFF { Ok(Apply::WithoutThp) } else { Err(format!("thp is {thp:?}: use {OFF:?}")) }
}

fn huge_text_way(word: &str) -> Result<Apply, String> {
    let way = HugeText::ALL.into_iter().find(|way| way.word() == word);
    way.map(Apply::HugeText).ok_or_else(|| {
        let [one, other] = HugeText::ALL.map(HugeText::word);
        format!("huge_text is {word:?}: use {one:?} or {other:?}")
    })
}

fn environment_way(all: BTreeMap<String, String>) -> Result<Apply, String> {
    all.iter().try_for_each(checked_variable)?;
    if all.is_empty() {
        return Err("the environment needs a variable".into());
    }
    Ok(Apply::Environment(all.into_iter().collect()))
}

fn system_way(System { file, value }: System) -> Result<Apply, String> {
    checked_system(&file, &value)?;
    Ok(Apply::Sysfs(file, value))
}

/// Checks the bytes in the key `name`.
fn positive(name: &str, bytes: u64) -> Result<u64, String> {
    match bytes {
        0 => Err(format!("{name} is 0: use 1048576 or another size")),
        bytes => Ok(bytes),
    }
}

/// Checks whether a shell and the loader accept a variable.
fn checked_variable((name, value): (&String, &String)) -> Result<(), String> {
    let first = name.chars().next().is_some_and(|first| !first.is_ascii_digit());
    if !first || name.contains(|c: char| !c.is_ascii_alphanumeric() && c != '_') {
        return Err(format!("variable {name:?}: use letters, digits and _ in its name"));
    }
    if name == preload::LIBRARIES || preload::VARIABLES.contains(&&**name) {
        return Err(format!(
            "variable {name}: `run` sets it: use one of {}",
            WAYS[1..5].join(", ")
        ));
    }
    if value.contains('\0') {
        return Err(format!("variable {name}: the value has a zero byte: remove it"));
    }
    Ok(())
}

/// Checks whether the file can be a setting of the whole system.
fn checked_system(file: &Path, value: &str) -> Result<(), String> {
    let direct = !file.components().any(|part| part == Component::ParentDir);
    let text = file.to_string_lossy();
    if !direct || !SYSTEM.iter().any(|dir| file.starts_with(dir)) || text.contains(char::is_control)
    {
        return Err(format!("file {text:?}: use a file below {}", SYSTEM.join(" or ")));
    }
    if value.is_empty() || value.contains(char::is_control) {
        return Err(format!("value {value:?} of {text}: use one word"));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::named;
    use super::*;
    use proptest::prelude::*;

    fn advice(name: &str, apply: Apply) -> Advice {
        Advice { name: name.to_owned(), predicted: Some(0.25), measured: None, apply }
    }

    #[test]
    fn value_of_a_system_setting_is_one_word_without_control_characters() {
        let of = |value: &str| checked_system(Path::new("/sys/kernel/x"), value);
        assert_eq!(of("always"), Ok(()));
        for value in ["", "a\nb", "\x1b[2J"] {
            assert!(of(value).is_err_and(|why| why.contains("use one word")), "{value:?}");
        }
    }

    fn read(text: &str) -> Result<Vec<Advice>, String> {
        decode(Path::new("x.toml"), text).map_err(|error| error.to_string())
    }

    fn ways() -> impl Strategy<Value = Apply> {
        let variables = prop::collection::btree_map("[A-Z][A-Z0-9_]{0,8}", "[^\0]*", 1..4);
        prop_oneof![
            Just(Apply::WithoutThp),
            (1..=u64::from(u32::MAX)).prop_map(Apply::PrefaultAhead),
            prop::sample::select(&HugeText::ALL).prop_map(Apply::HugeText),
            (1..=u64::from(u32::MAX)).prop_map(Apply::Populate),
            (1..=u64::from(u32::MAX)).prop_map(Apply::PopulateFiles),
            variables.prop_map(|all| Apply::Environment(all.into_iter().collect())),
            ("[a-z]{1,8}", "[ -~]{1,8}")
                .prop_map(|(file, value)| Apply::Sysfs(Path::new("/sys").join(file), value)),
        ]
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(64) })]

        #[test]
        fn written_advice_is_read_back(
            ways in prop::collection::vec((ways(), "[ -~]{1,9}", 0..10_000_u32), 0..4),
            program in ".*",
        ) {
            let seconds = |tenths: u32| Some(f64::from(tenths) / 1e4);
            let all: Vec<_> = ways
                .into_iter()
                .map(|(apply, name, tenths)| Advice {
                    name,
                    predicted: seconds(tenths),
                    measured: seconds(tenths / 7).filter(|_| tenths % 2 == 0),
                    apply,
                })
                .collect();
            let text = encode(&program, &all).expect("UTF-8");
            prop_assert_eq!(read(&text), Ok(all), "{}", text);
        }
    }

    #[test]
    fn file_is_readable_for_people() {
        let all = [
            advice("no THP", Apply::WithoutThp),
            advice("nothing", Apply::Nothing),
            advice("malloc keeps memory", named::malloc_keeps_memory()),
        ];
        let text = encode("python3", &all).expect("UTF-8");
        let expected = "version = 1
program = \"python3\"

[[advice]]
name = \"no THP\"
predicted_seconds = 0.25
thp = \"off\"

[[advice]]
name = \"malloc keeps memory\"
predicted_seconds = 0.25

[advice.environment]
MALLOC_MMAP_MAX_ = \"0\"
MALLOC_TRIM_THRESHOLD_ = \"1099511627776\"
";
        assert_eq!(text, format!("{HEAD}{expected}"));
    }

    #[test]
    fn damaged_files_are_refused_with_place_and_remedy() {
        let row = "version = 1\n[[advice]]\nname = \"a\"\n";
        for (text, expected) in [
            ("version = 1\nadvice = 7", &["line 2, column 10"][..]),
            ("version = 1\n[[advice", &["line 2", "correct this place"]),
            ("", &["no version", "reads version 1"]),
            ("version = 2\nnew = 1", &["the version is 2", "reads version 1"]),
            ("version = \"1\"", &["the version is \"1\""]),
            ("version = 1\nsettings = 1", &["line 2", "unknown field `settings`", "`advice`"]),
            (&format!("{row}mlock = true"), &["line 4", "unknown field `mlock`"]),
            ("version = 1\n[[advice]]\nthp = \"off\"", &["line 2", "missing field `name`"]),
            (
                row,
                &[
                    "line 2",
                    "needs one of thp, populate_bytes, ahead_bytes, file_bytes, huge_text, environment",
                ],
            ),
            (&format!("{row}thp = \"off\"\npopulate_bytes = 7"), &["needs one of thp"]),
            (&format!("{row}thp = \"on\""), &["use \"off\""]),
            (&format!("{row}populate_bytes = 0"), &["populate_bytes is 0"]),
            (&format!("{row}ahead_bytes = 0"), &["ahead_bytes is 0"]),
            (&format!("{row}file_bytes = 0"), &["file_bytes is 0"]),
            (&format!("{row}huge_text = \"x\""), &["use \"collapse\" or \"copy\""]),
            (&format!("{row}populate_bytes = -1"), &["line 4", "-1"]),
            (&format!("{row}environment = {{}}"), &["needs a variable"]),
            (&format!("{row}environment = {{ \"A B\" = \"1\" }}"), &["variable \"A B\""]),
            (&format!("{row}environment = {{ A = \"\\u0000\" }}"), &["zero byte"]),
            (
                &format!("{row}environment = {{ LD_PRELOAD = \"x\" }}"),
                &["use one of populate_bytes"],
            ),
            (
                &format!("{row}system = {{ file = \"/etc/x\", value = \"1\" }}"),
                &["use a file below /sys or /proc/sys"],
            ),
            (
                &format!("{row}system = {{ file = \"/sys/../etc/x\", value = \"1\" }}"),
                &["use a file below /sys"],
            ),
            (&format!("{row}predicted_seconds = nan\nthp = \"off\""), &["need a number"]),
            ("version = 1\n[[advice]]\nname = \"a\\nb\"\nthp = \"off\"", &["line breaks"]),
        ] {
            let error = read(text).expect_err(text);
            assert!(error.starts_with("x.toml: ") && error.ends_with(AGAIN), "{text}: {error}");
            for expected in expected {
                assert!(error.contains(expected), "{text}: no {expected:?} in {error}");
            }
        }
        assert_eq!(read("version = 1"), Ok(Vec::new()));
    }
}
