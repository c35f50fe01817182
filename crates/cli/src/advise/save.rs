//! `--save`: the advice that saves time, in a file for `faultless run`.

use crate::error::CliError;
use crate::interrupt;
use crate::output::{self, Replacing};
use crate::report::say;
use faultless_analysis::advise::file::{Advice, encode};
use faultless_analysis::number::plural;
use std::path::{Path, PathBuf};

/// The file given with `--save`.
#[derive(Debug)]
pub struct Save {
    name: PathBuf,
    replacing: Replacing,
}

impl Save {
    /// Checks that the file `name` can be written, and differs from the `inputs`.
    ///
    /// # Errors
    /// The file cannot be written, or is an input.
    pub fn new(name: &Path, inputs: &[&Path]) -> Result<Self, CliError> {
        if name == Path::new("-") {
            let why = "standard output belongs to the report; --save ./- is a file of that name";
            return Err(CliError::Usage(format!("--save -: {why}")));
        }
        output::spare("--save", name, inputs)?;
        let replacing =
            Replacing::new(name).map_err(|error| CliError::Failed(format!("--save {error}")))?;
        Ok(Self { name: name.to_owned(), replacing })
    }

    /// Writes the advice for `program`, unless the user interrupted the command.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn write(&self, program: &str, advice: &[Advice]) -> Result<(), CliError> {
        let name = self.name.display();
        if interrupt::requested() {
            say!("faultless: {name} is not written, as the results are not complete");
            return Ok(());
        }
        let text = encode(program, advice)?;
        let written = self.replacing.write(text.as_bytes());
        written.map_err(|error| CliError::Failed(format!("--save {error}")))?;
        match advice.len() {
            0 => say!("{name}: no advice, as no setting is worth it"),
            count => say!(
                "{name}: {}; next: faultless run --advice {name} -- CMD",
                plural(count as u64, "setting")
            ),
        }
        Ok(())
    }
}
