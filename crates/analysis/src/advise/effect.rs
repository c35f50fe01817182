//! The effect of several settings on one process: environment variables, huge pages off, and the
//! preloaded library.
//!
//! `advise --try` and `run` apply a setting by the same [`Effect`].

use super::item::Apply;
use super::preload::{self, Operations};
use crate::error::Error;
use nix::sys::prctl::set_thp_disable;
use std::collections::HashMap;
use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Variables with a list of settings, and the separator of the settings.
const LISTS: [(&str, &str); 3] =
    [("GLIBC_TUNABLES", ":"), ("GODEBUG", ","), ("JAVA_TOOL_OPTIONS", " ")];
/// Options of a Java virtual machine with a size directly behind the name.
const SIZES: [&str; 4] = ["-Xms", "-Xmx", "-Xmn", "-Xss"];

/// The effect of advice on one process.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Effect {
    /// Environment variables, with all settings of a list in one value.
    pub variables: Vec<(String, String)>,
    /// Whether huge pages are off.
    pub without_thp: bool,
    /// The operations of the preloaded library.
    pub preload: Operations,
    /// Settings of the whole system: files, and the values to write.
    pub system: Vec<(PathBuf, String)>,
}

impl Effect {
    /// Combines settings, each with a name for messages.
    ///
    /// # Errors
    /// Two of them set one variable, one entry of a list or one file to different values.
    pub fn of<'a>(advice: impl IntoIterator<Item = (&'a str, &'a Apply)>) -> Result<Self, Error> {
        let (mut effect, mut given) = (Self::default(), Given::default());
        for (name, apply) in advice {
            match apply {
                Apply::Nothing => {}
                Apply::WithoutThp => effect.without_thp = true,
                Apply::Populate(bytes) => {
                    given.add(name, preload::BYTES, &bytes.to_string())?;
                    effect.preload.populate = Some(*bytes);
                }
                Apply::PrefaultAhead(bytes) => {
                    given.add(name, preload::AHEAD, &bytes.to_string())?;
                    effect.preload.ahead = Some(*bytes);
                }
                Apply::PopulateFiles(bytes) => {
                    given.add(name, preload::FILES, &bytes.to_string())?;
                    effect.preload.files = Some(*bytes);
                }
                Apply::HugeText(way) => {
                    given.add(name, preload::TEXT, way.word())?;
                    effect.preload.huge_text = Some(*way);
                }
                Apply::Sysfs(file, value) => {
                    if given.add(name, &file.to_string_lossy(), value)? {
                        effect.system.push((file.clone(), value.clone()));
                    }
                }
                Apply::Environment(variables) => {
                    for (variable, value) in variables {
                        effect.add_variable(name, variable, value, &mut given)?;
                    }
                }
            }
        }
        Ok(effect)
    }

    /// Adds a variable, or the settings of a list.
    fn add_variable(
        &mut self,
        name: &str,
        variable: &str,
        value: &str,
        given: &mut Given,
    ) -> Result<(), Error> {
        let separator = separator(variable);
        let settings: Vec<&str> = match separator {
            Some(separator) => value.split(separator).filter(|one| !one.is_empty()).collect(),
            None => vec![value],
        };
        for setting in settings {
            let what = match separator {
                Some(_) => format!("{} in {variable}", option(variable, setting)),
                None => variable.to_owned(),
            };
            if !given.add(name, &what, setting)? {
                continue;
            }
            match (self.variables.iter_mut().find(|(known, _)| known == variable), separator) {
                (Some((_, list)), Some(separator)) => {
                    list.push_str(separator);
                    list.push_str(setting);
                }
                _ => self.variables.push((variable.to_owned(), setting.to_owned())),
            }
        }
        Ok(())
    }

    /// Returns the environment variables to set, joined with the present ones. `library` is the
    /// file of the preloaded library; without the file the library's operations have no effect.
    pub fn environment(&self, library: Option<&Path>) -> Vec<(&str, OsString)> {
        let joined =
            |(name, value): &'_ (String, String)| joined(name, value, std::env::var_os(name));
        let mut all: Vec<_> =
            self.variables.iter().map(|one| (one.0.as_str(), joined(one))).collect();
        if let Some(library) = library.filter(|_| self.preload.any()) {
            all.extend(self.preload.environment(library));
        }
        all
    }

    /// Puts the effect into force for `program`, except for settings of the whole system. `library`
    /// is the file of the preloaded library; without the file its operations have no effect.
    pub fn put(&self, program: &mut Command, library: Option<&Path>) {
        program.envs(self.environment(library));
        if self.without_thp {
            // SAFETY: before exec the closure makes one call, prctl, which is async-signal-safe.
            unsafe { program.pre_exec(|| set_thp_disable(true).map_err(std::io::Error::from)) };
        }
    }
}

/// The values given so far, each with the name of its advice.
#[derive(Debug, Default)]
struct Given(HashMap<String, (String, String)>);

impl Given {
    /// Adds a value of `what`. Returns whether the value is new.
    fn add(&mut self, name: &str, what: &str, value: &str) -> Result<bool, Error> {
        let Some((other, before)) = self.0.get(what) else {
            self.0.insert(what.to_owned(), (name.to_owned(), value.to_owned()));
            return Ok(true);
        };
        if before == value {
            return Ok(false);
        }
        let why = format!("{what} has two values, {before} and {value}: use one of the two");
        Err(Error::input(format_args!("{other} and {name}"), why))
    }
}

/// Returns the separator of the settings in the variable `name`, if the variable is a list.
pub fn separator(name: &str) -> Option<&'static str> {
    // jemalloc's variable has a prefix in some builds.
    if name.ends_with("MALLOC_CONF") {
        return Some(",");
    }
    LISTS.iter().find(|(list, _)| *list == name).map(|(_, separator)| *separator)
}

/// Returns the name of an option in a list: the part before its value.
fn option<'a>(variable: &str, setting: &'a str) -> &'a str {
    if variable.ends_with("MALLOC_CONF") {
        return setting.split_once(':').map_or(setting, |(name, _)| name);
    }
    if let Some(size) = SIZES.iter().find(|size| setting.starts_with(**size)) {
        return size;
    }
    let name = setting.split_once('=').map_or(setting, |(name, _)| name);
    // `-XX:+Name` and `-XX:-Name`.
    name.strip_prefix("-XX:").map_or(name, |name| name.trim_start_matches(['+', '-']))
}

/// Returns `value` for the variable `name`. If the variable is a list, `value` is appended to the
/// earlier value `before`, and both take effect.
pub fn joined(name: &str, value: &str, before: Option<OsString>) -> OsString {
    let before = before.filter(|before| !before.is_empty());
    let (Some(separator), Some(mut all)) = (separator(name), before) else { return value.into() };
    all.push(separator);
    all.push(value);
    all
}

#[cfg(test)]
mod tests {
    use super::super::named::{self, Named};
    use super::*;

    fn of(names: &[&str]) -> Result<Effect, Error> {
        let named: Vec<Named> =
            names.iter().map(|name| name.parse().expect("a known name")).collect();
        Effect::of(named.iter().map(|named| (named.text(), named.apply())))
    }

    #[test]
    fn joined_keeps_a_list_set_by_the_user() {
        let before = Some("glibc.malloc.check=1".into());
        let both = "glibc.malloc.check=1:glibc.malloc.hugetlb=1";
        assert_eq!(joined("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1", before), both);
        assert_eq!(joined("GODEBUG", "madvdontneed=0", Some("".into())), "madvdontneed=0");
        let decays = joined("_RJEM_MALLOC_CONF", "dirty_decay_ms:-1", Some("narenas:2".into()));
        assert_eq!(decays, "narenas:2,dirty_decay_ms:-1");
        assert_eq!(joined("MALLOC_MMAP_MAX_", "0", Some("7".into())), "0");
    }

    #[test]
    fn settings_combine() {
        let all = ["no-thp", "populate=1M", "malloc-arenas", "java-thp", "java-heap=256M"];
        let effect = of(&all).expect("no two values");
        assert!(effect.without_thp && effect.preload.populate == Some(1 << 20));
        let java = "-XX:+UseTransparentHugePages -Xms256m";
        let expected = [("MALLOC_ARENA_MAX", "2"), ("JAVA_TOOL_OPTIONS", java)];
        let variables: Vec<_> =
            effect.variables.iter().map(|(name, value)| (&**name, &**value)).collect();
        assert_eq!(variables, expected);
        let twice = of(&["gogc=200", "gogc=200", "java-thp", "java-thp"]).expect("equal values");
        assert_eq!(twice.variables, of(&["gogc=200", "java-thp"]).expect("one value").variables);
    }

    #[test]
    fn two_values_of_one_setting_are_an_error_with_both_names() {
        for (names, what) in [
            (["malloc-arenas=2", "malloc-arenas=4"], "MALLOC_ARENA_MAX has two values, 2 and 4"),
            (["populate=1M", "populate=2M"], "FAULTLESS_POPULATE has two values"),
            (["prefault-ahead=1M", "prefault-ahead"], "FAULTLESS_PREFAULT_AHEAD has two values"),
            (["huge-text", "huge-text-collapse"], "FAULTLESS_HUGE_TEXT has two values"),
            (["jemalloc-arenas=1", "jemalloc-arenas=2"], "narenas in MALLOC_CONF has two values"),
            (["java-heap=1M", "java-heap=2M"], "-Xms in JAVA_TOOL_OPTIONS has two values"),
        ] {
            let error = of(&names).expect_err("two values");
            assert!(error.is_input());
            let error = error.to_string();
            assert!(error.starts_with(&names.join(" and ")) && error.contains(what), "{error}");
        }
        let [off, on] = ["-XX:-AlwaysPreTouch", "-XX:+AlwaysPreTouch"]
            .map(|option| Apply::environment([("JAVA_TOOL_OPTIONS", option.to_owned())]));
        assert!(Effect::of([("off", &off), ("on", &on)]).is_err());
        let file = |value: &str| Apply::Sysfs("/sys/file".into(), value.to_owned());
        let (always, never) = (file("always"), file("never"));
        let system = |other| Effect::of([("one", &always), ("other", other)]);
        assert_eq!(system(&always).expect("equal values").system.len(), 1);
        assert!(system(&never).is_err());
    }

    #[test]
    fn mappings_are_populated_only_with_the_library() {
        let effect = of(&["populate=1M"]).expect("one advice");
        assert!(effect.environment(None).is_empty());
        let with = effect.environment(Some(Path::new("/x.so")));
        assert!(with.contains(&(preload::BYTES, "1048576".into())), "{with:?}");
        let effect = of(&["huge-text"]).expect("one advice");
        let with = effect.environment(Some(Path::new("/x.so")));
        assert!(with.contains(&(preload::TEXT, "copy".into())), "{with:?}");
        assert_eq!(of(&[]).expect("no advice"), Effect::default());
        assert_eq!(named::gogc(7), Apply::environment([("GOGC", "7".to_owned())]));
    }
}
