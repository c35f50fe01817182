//! `--print`: the advice in the form of a systemd drop-in, of options for `docker run`, or of
//! commands for a shell.

use super::Given;
use crate::error::CliError;
use faultless_analysis::advise::effect::{Effect, separator};
use faultless_analysis::advise::item::Apply;
use faultless_analysis::advise::preload;
use std::ffi::OsString;
use std::fmt::Write as _;
use std::io::{self, Write as _};
use std::path::Path;

/// The start of a command that puts the advice into force that a form cannot express.
const RUN: &str = "faultless run --apply no-thp --";

/// The form to print.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Form {
    /// A drop-in of a systemd service
    Systemd,
    /// Options of `docker run`
    Docker,
    /// Commands of a shell that export variables
    Env,
}

/// Prints `effect`. `library` is the file of the preloaded library, and `program` the program with
/// its arguments, if known.
///
/// # Errors
/// The path of the library is not valid UTF-8, or standard output fails.
pub fn print(
    form: Form,
    effect: &Effect,
    given: &[Given],
    library: Option<&Path>,
    program: &[OsString],
) -> Result<(), CliError> {
    let library = library.map(|path| {
        path.to_str().ok_or_else(|| {
            let why = "the path is not valid UTF-8: use --library FILE for another place";
            CliError::Usage(format!("{}: {why}", path.display()))
        })
    });
    let all = Printed { effect, given, library: library.transpose()?, program };
    let text = match form {
        Form::Systemd => all.systemd(),
        Form::Docker => all.docker(),
        Form::Env => all.env(),
    };
    io::stdout().write_all(text.as_bytes())?;
    Ok(())
}

/// Returns the command that writes `value` to the file of a setting.
pub fn echo(file: &Path, value: &str) -> String {
    format!("echo {} > {}", shell(value), shell(&file.to_string_lossy()))
}

/// The advice to print.
struct Printed<'a> {
    effect: &'a Effect,
    given: &'a [Given],
    library: Option<&'a str>,
    program: &'a [OsString],
}

impl Printed<'_> {
    /// Returns the variables with the values of the advice alone.
    fn variables(&self) -> Vec<(&str, String)> {
        let own = self.effect.variables.iter();
        let mut all: Vec<_> = own.map(|(name, value)| (&**name, value.clone())).collect();
        if let Some(library) = self.library {
            all.extend(self.effect.preload.variables());
            all.push((preload::LIBRARIES, library.to_owned()));
        }
        all
    }

    /// Returns the name of the advice without huge pages, if the advice is given.
    fn without_thp(&self) -> Option<&str> {
        let found = self.given.iter().find(|given| given.apply == Apply::WithoutThp);
        found.map(|given| &*given.name)
    }

    /// Returns the program with its arguments, each in the form of `quote`.
    fn command(&self, quote: fn(&str) -> String) -> String {
        let words: Vec<_> =
            self.program.iter().map(|word| quote(&word.to_string_lossy())).collect();
        if words.is_empty() { "PROGRAM".into() } else { words.join(" ") }
    }

    /// Returns comments for variables with lists, whose earlier values the form replaces.
    fn lists(&self) -> String {
        let mut text = String::new();
        for (name, _) in self.variables() {
            let list = separator(name).or((name == preload::LIBRARIES).then_some(":"));
            if let Some(separator) = list {
                let _ = writeln!(
                    text,
                    "# {name} replaces an earlier value: join two values by {separator:?}"
                );
            }
        }
        text
    }

    /// Returns a comment with the version of the library.
    fn version(&self) -> String {
        let contents = self.library.and_then(|_| preload::contents().ok());
        contents.and_then(preload::version).map_or_else(String::new, |version| {
            format!("# The library has version {version}, for programs of glibc and of musl\n")
        })
    }

    /// Returns comments with the settings of the whole system.
    fn system(&self) -> String {
        let mut text = String::new();
        for (file, value) in &self.effect.system {
            let _ =
                writeln!(text, "# a setting of the whole system; as root: {}", echo(file, value));
        }
        text
    }

    fn systemd(&self) -> String {
        let mut text =
            String::from("# A drop-in: /etc/systemd/system/NAME.service.d/faultless.conf\n");
        text += &self.lists();
        text += &self.version();
        if self.library.is_some() {
            text +=
                "# The service must be able to read the library: --library FILE sets its place\n";
        }
        text += "[Service]\n";
        for (name, value) in self.variables() {
            let assignment = format!("{name}={}", value.replace('%', "%%"));
            let _ = writeln!(text, "Environment={}", quoted(&assignment));
        }
        if let Some(name) = self.without_thp() {
            let (command, own) = (self.command(word), own_path());
            let _ = writeln!(
                text,
                "# {name}: a drop-in cannot disable huge pages. Start the program by this command:\n\
                 #ExecStart=\n#ExecStart={} {} {command}",
                word(&own),
                RUN.split_once(' ').map_or(RUN, |(_, rest)| rest)
            );
        }
        for (file, value) in &self.effect.system {
            let _ = writeln!(
                text,
                "# A setting of the whole system. Without the #, each start of the service sets it:\n\
                 #ExecStartPre=+/bin/sh -c {}",
                word(&echo(file, value))
            );
        }
        text
    }

    fn docker(&self) -> String {
        let mut text = String::from("# Options of docker run\n") + &self.lists();
        text += &self.version();
        if let Some(name) = self.without_thp() {
            let command = self.command(shell);
            let _ = writeln!(
                text,
                "# {name}: docker cannot disable huge pages. Start the program in the container by: {RUN} {}",
                one_line(&command)
            );
        }
        text += &self.system();
        let mut options = Vec::new();
        for (name, value) in self.variables() {
            options.push(format!("-e {}", shell(&format!("{name}={value}"))));
        }
        if let Some(library) = self.library {
            options.push(format!("-v {}", shell(&format!("{library}:{library}:ro"))));
        }
        if !options.is_empty() {
            let _ = writeln!(text, "{}", options.join(" "));
        }
        text
    }

    fn env(&self) -> String {
        let mut text = String::from("# Commands of a shell: . FILE\n") + &self.version();
        for (name, value) in self.variables() {
            let value = shell(&value);
            let _ = match separator(name) {
                Some(by) => writeln!(text, "export {name}=\"${{{name}:+${name}{by}}}\"{value}"),
                None if name == preload::LIBRARIES => {
                    writeln!(text, "export {name}={value}\"${{{name}:+:${name}}}\"")
                }
                None => writeln!(text, "export {name}={value}"),
            };
        }
        if let Some(name) = self.without_thp() {
            let command = self.command(shell);
            let _ = writeln!(
                text,
                "# {name}: no variable disables huge pages. Start the program by: {RUN} {}",
                one_line(&command)
            );
        }
        text + &self.system()
    }
}

/// Returns the path of this command.
fn own_path() -> String {
    let path = std::env::current_exe().ok();
    path.and_then(|path| path.to_str().map(str::to_owned)).unwrap_or("/usr/bin/faultless".into())
}

/// Quotes a word for a shell.
fn shell(word: &str) -> String {
    // Only a zero byte cannot be quoted. Arguments and checked values contain none.
    shlex::try_quote(word).map_or_else(|_| word.replace('\0', ""), |quoted| quoted.into_owned())
}

/// Returns the text without line breaks, for a comment.
fn one_line(text: &str) -> String {
    text.replace(['\n', '\r'], " ")
}

/// Quotes a value in a file of systemd.
fn quoted(value: &str) -> String {
    let mut text = String::from("\"");
    for c in value.chars() {
        match c {
            '"' | '\\' => text.extend(['\\', c]),
            '\n' => text.push_str("\\n"),
            '\t' => text.push_str("\\t"),
            '\r' => text.push_str("\\r"),
            c if c.is_ascii_control() => {
                let _ = write!(text, "\\x{:02x}", u32::from(c));
            }
            c => text.push(c),
        }
    }
    text.push('"');
    text
}

/// Quotes a word of a command line in a file of systemd, in which `$` and `%` have a meaning.
fn word(word: &str) -> String {
    quoted(&word.replace('%', "%%").replace('$', "$$"))
}
