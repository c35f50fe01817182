//! The next commands after the report: a trial, and a run with the best setting.

use crate::error::CliError;
use faultless_analysis::advise::answer::Answer;
use faultless_analysis::advise::item::{Apply, Item};
use faultless_analysis::advise::named::text_of;
use std::ffi::OsString;
use std::io::Write;

/// Prints the next commands for the recorded `program`. Prints no line if no setting is predicted
/// to save time.
pub fn print(
    answer: &Answer<'_>,
    program: &[OsString],
    out: &mut dyn Write,
) -> Result<(), CliError> {
    let able = |item: &&&Item| {
        item.apply != Apply::Nothing
            && (answer.saves(item) || item.depends() && answer.worth(item.at_best))
    };
    let shown = answer.shown();
    let Some(best) = shown.iter().find(able).filter(|_| !program.is_empty()) else {
        return Ok(());
    };
    let words: Vec<_> = program.iter().map(|word| quoted(&word.to_string_lossy())).collect();
    let program = words.join(" ");
    let system = matches!(best.apply, Apply::Sysfs(..));
    let sysfs = if system { " --sysfs" } else { "" };
    writeln!(out, "\n next: faultless advise --try{sysfs} -- {program}")?;
    // Settings of the whole system have no name.
    let mut saving = shown.iter().filter(|item| answer.saves(item));
    if let Some(name) = saving.find_map(|item| text_of(&item.apply)) {
        writeln!(out, "       faultless run --apply {name} -- {program}")?;
    }
    Ok(())
}

/// Returns `word` with quotes, if a shell would read it as several words or expand it.
fn quoted(word: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_./=:,+@%".contains(c);
    if !word.is_empty() && word.chars().all(plain) {
        return word.to_owned();
    }
    format!("'{}'", word.replace('\'', r"'\''"))
}

#[cfg(test)]
mod tests {
    use super::super::tests::costs;
    use super::*;
    use faultless_analysis::advise::findings::Findings;
    use faultless_analysis::advise::named;
    use faultless_analysis::advise::program::Program;
    use faultless_analysis::advise::sysfs::{Shmem, Sizes};
    use faultless_analysis::replay::Source;
    use faultless_trace::recordings;

    #[test]
    fn words_are_quoted_for_a_shell() {
        let words = ["./a-b", "x y", "it's", "", "$HOME"].map(quoted);
        assert_eq!(words, ["./a-b", "'x y'", r"'it'\''s'", "''", "'$HOME'"]);
    }

    #[test]
    fn report_of_a_program_ends_with_the_next_commands() {
        let recording = recordings::find("python").expect("a bundled recording");
        let source = Source::shipped(recording).expect("a valid recording");
        let program = Program { glibc: true, ..Program::default() };
        let findings = Findings::of(&source, program, Sizes::none(9), Shmem::NONE, &());
        let findings = findings.expect("a valid recording");
        let mut answer = Answer::new(&findings, costs(), None, &source.trace);
        let most = answer.seconds * 1e9;
        answer.items.truncate(2);
        let second = &mut answer.items[1];
        (second.saving, second.at_best, second.apply) = (0.0, 0.0, Apply::WithoutThp);
        let between = |savings, apply: Apply, program: &[&str], answer: &mut Answer<'_>| {
            let item = &mut answer.items[0];
            ((item.saving, item.at_best), item.apply) = (savings, apply);
            let program: Vec<_> = program.iter().map(OsString::from).collect();
            let mut out = Vec::new();
            print(answer, &program, &mut out).expect("memory");
            String::from_utf8(out).expect("text")
        };
        let printed = |saving, apply, program: &[&str], answer: &mut Answer<'_>| {
            between((saving, saving), apply, program, answer)
        };
        let app = ["./app", "a b"];
        let malloc = named::malloc_keeps_memory;
        assert_eq!(
            printed(most / 2.0, malloc(), &app, &mut answer),
            "\n next: faultless advise --try -- ./app 'a b'\n       faultless run --apply \
             malloc-keeps-memory -- ./app 'a b'\n"
        );
        let system = || Apply::Sysfs("/sys/x".into(), "1".into());
        assert_eq!(
            printed(most / 2.0, system(), &app, &mut answer),
            "\n next: faultless advise --try --sysfs -- ./app 'a b'\n"
        );
        assert_eq!(printed(0.0, malloc(), &app, &mut answer), "");
        // The sign of the saving depends on the host: a trial decides.
        assert_eq!(
            between((-most / 2.0, most / 2.0), malloc(), &app, &mut answer),
            "\n next: faultless advise --try -- ./app 'a b'\n"
        );
        let little = between((-most / 2.0, 1.0), malloc(), &app, &mut answer);
        assert_eq!(little, "", "a saving of a nanosecond");
        let loss = between((-most / 2.0, -most / 2.0), malloc(), &app, &mut answer);
        assert_eq!(loss, "");
        answer.items[1].saving = most / 3.0;
        let text = printed(most / 2.0, system(), &app, &mut answer);
        assert!(text.contains("--sysfs") && text.contains("--apply no-thp"), "{text}");
        answer.items[1].saving = 0.0;
        assert_eq!(printed(most / 2.0, malloc(), &[], &mut answer), "", "a recording");
    }
}
