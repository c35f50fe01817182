//! What the kernel says about itself, in lines.
//!
//! | line | meaning |
//! |---|---|
//! | `exit STATUS` | the program ended: its exit status, or 128 and the number of the signal |
//! | `signal N` | the signal that ended it |
//! | `sent OUTPUT ERRORS` | the bytes that the kernel sent to the output and the error output |
//! | `counter NAME VALUE` | a counter of the kernel's |
//! | `message TEXT` | something that the user should know |
//! | `panic TEXT` | the kernel cannot go on |
//!
//! A line of another form is kept as a message: it is better read than lost.

/// Everything that a kernel said.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// How the program ended: 0 to 255.
    pub exit: Option<u8>,
    /// The signal that ended it.
    pub signal: Option<u8>,
    /// The bytes that the kernel sent to the output and the error output.
    pub sent: Option<[u64; 2]>,
    /// The counters, in the kernel's order.
    pub counters: Vec<(String, u64)>,
    /// The messages, and lines that are nothing else.
    pub messages: Vec<String>,
    /// Why the kernel did not go on.
    pub panic: Option<String>,
}

impl Report {
    /// The counter of this name.
    pub fn counter(&self, name: &str) -> Option<u64> {
        self.counters.iter().find(|(known, _)| known == name).map(|(_, value)| *value)
    }

    /// Takes in what stands in `text`, line by line.
    pub fn read(text: &str) -> Self {
        let mut report = Self::default();
        text.lines().for_each(|line| report.line(line));
        report
    }

    /// Takes in a line.
    pub fn line(&mut self, line: &str) {
        let line = line.trim_end();
        if line.is_empty() {
            return;
        }
        if !self.known(line) {
            self.messages.push(line.to_owned());
        }
    }

    /// Takes in a line of a known form; `false` of any other.
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
            // The first is the cause; a second comes of the first.
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
    fn every_line_is_taken_in() {
        let report = Report::read(
            "message system call 321 (bpf) is not there\ncounter faults 12\r\n\
             counter spf 18446744073709551615\nsignal 11\nsent 12 0\n\nexit 139\n",
        );
        assert_eq!(report.sent, Some([12, 0]));
        assert_eq!(report.messages, ["system call 321 (bpf) is not there"]);
        assert_eq!(report.counter("faults"), Some(12));
        assert_eq!(report.counter("spf"), Some(u64::MAX));
        assert_eq!(report.counter("exit"), None);
        assert_eq!((report.exit, report.signal, report.panic), (Some(139), Some(11), None));
    }

    #[test]
    fn what_is_no_line_of_ours_is_a_message() {
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
