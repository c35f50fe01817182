//! Arguments of the form `name=value`; an argument without `=` is a word.

use std::str::FromStr;

/// The program's arguments.
#[derive(Debug)]
pub struct Args {
    program: &'static str,
    words: Vec<String>,
    given: Vec<(String, String)>,
}

impl Args {
    /// Reads the arguments of this process, which is `program` and supports the parameters `known`.
    /// Ends the process with a message and status 2 if there are other parameters.
    pub fn read(program: &'static str, known: &[&str]) -> Self {
        let mut args = Self { program, words: Vec::new(), given: Vec::new() };
        for argument in std::env::args().skip(1) {
            match argument.split_once('=') {
                Some((name, value)) if known.contains(&name) => {
                    args.given.push((name.into(), value.into()));
                }
                Some((name, _)) => {
                    let known = if known.is_empty() { "none".into() } else { known.join(", ") };
                    args.refuse(&format!(
                        "unknown parameter {name:?}; the parameters are: {known}"
                    ));
                }
                None => args.words.push(argument),
            }
        }
        args
    }

    /// The words, in order.
    pub fn words(&self) -> &[String] {
        &self.words
    }

    /// Returns the text of `name`.
    pub fn text(&self, name: &str) -> Option<&str> {
        self.given.iter().rev().find(|(known, _)| known == name).map(|(_, value)| value.as_str())
    }

    /// Returns the value of `name`, or `default`. Ends the process with a message if the value is
    /// invalid.
    pub fn get<T: FromStr>(&self, name: &str, default: T) -> T {
        let Some(text) = self.text(name) else { return default };
        text.parse().unwrap_or_else(|_| self.refuse(&format!("{name}={text} is invalid")))
    }

    /// Ends the process because of a bad argument.
    pub fn refuse(&self, why: &str) -> ! {
        eprintln!("{}: {why}", self.program);
        std::process::exit(2)
    }
}
