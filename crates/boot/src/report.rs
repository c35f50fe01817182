//! The kernel's report about itself, in lines.
//!
//! | line | meaning |
//! |---|---|
//! | `exit STATUS` | the program ended: its exit status, or 128 and the number of the signal |
//! | `signal N` | the signal that ended the program |
//! | `sent OUTPUT ERRORS` | the bytes sent by the kernel to the output and the error output |
//! | `counter NAME VALUE` | a counter of the kernel |
//! | `message TEXT` | information for the user |
//! | `panic TEXT` | the kernel cannot continue |
//!
//! A line of another form is stored as a message, so that it is not lost.

/// The whole report of a kernel.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// The exit status of the program: 0 to 255.
    pub exit: Option<u8>,
    /// The signal that ended the program.
    pub signal: Option<u8>,
    /// The numbers of bytes sent by the kernel to the output and the error output.
    pub sent: Option<[u64; 2]>,
    /// The counters, in the kernel's order.
    pub counters: Vec<(String, u64)>,
    /// The messages, and lines of unknown form.
    pub messages: Vec<String>,
    /// The reason why the kernel stopped.
    pub panic: Option<String>,
}

impl Report {
    /// The counter of this name.
    pub fn counter(&self, name: &str) -> Option<u64> {
        self.counters.iter().find(|(known, _)| known == name).map(|(_, value)| *value)
    }

    /// Parses `text`, line by line.
    pub fn read(text: &str) -> Self {
        let mut report = Self::default();
        text.lines().for_each(|line| report.line(line));
        report
    }

    /// Parses a line.
    pub fn line(&mut self, line: &str) {
        let line = line.trim_end();
        if line.is_empty() {
            return;
        }
        if !self.known(line) {
            self.messages.push(line.to_owned());
        }
    }

    /// Parses a line of a known form; returns `false` for other lines.
    fn known(&mut self, line: &str) -> bool {
        let Some((kind, rest)) = line.split_once(' ') else { return false };
        match kind {
            "exit" | "signal" => {
                let Ok(number) = rest.parse() else { return false };
                let place = if kind == "exit" { &mut self.exit } else { &mut self.signal };
                *place = Some(number);
            }
            "sent" => {
                let Some((output, errors)) = rest.split_once(' ') else { return false };
                let (Ok(output), Ok(errors)) = (output.parse(), errors.parse()) else {
                    return false;
                };
                self.sent = Some([output, errors]);
            }
            "counter" => {
                let Some((name, value)) = rest.split_once(' ') else { return false };
                let Ok(value) = value.parse() else { return false };
                self.counters.push((name.to_owned(), value));
            }
            "message" => self.messages.push(rest.to_owned()),
            // The first panic is the cause; a second panic follows from the first.
            "panic" => {
                self.panic.get_or_insert_with(|| rest.to_owned());
            }
            _ => return false,
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_line_is_parsed() {
        let report = Report::read(
            "message system call 321 (bpf) is missing\ncounter faults 12\r\ncounter spf \
             18446744073709551615\nsignal 11\nsent 12 0\n\nexit 139\n",
        );
        assert_eq!(report.sent, Some([12, 0]));
        assert_eq!(report.messages, ["system call 321 (bpf) is missing"]);
        assert_eq!(report.counter("faults"), Some(12));
        assert_eq!(report.counter("spf"), Some(u64::MAX));
        assert_eq!(report.counter("exit"), None);
        assert_eq!((report.exit, report.signal, report.panic), (Some(139), Some(11), None));
    }

    #[test]
    fn unknown_lines_become_messages() {
        for odd in [
            "exit",
            "exit 256",
            "exit -1",
            "exit one",
            "signal 1000",
            "counter",
            "counter faults",
            "counter faults 1x",
            "counter faults 1 2",
            "sent 1",
            "sent 1 -1",
            "hello",
            "Exit 3",
        ] {
            let report = Report::read(odd);
            let expected = Report { messages: vec![odd.into()], ..Report::default() };
            assert_eq!(report, expected, "{odd}");
        }
        assert_eq!(Report::read("\n  \n"), Report::default());
    }

    #[test]
    fn the_first_panic_is_the_cause() {
        let report = Report::read("panic a\npanic b\nexit 1");
        assert_eq!(report.panic.as_deref(), Some("a"));
    }
}
