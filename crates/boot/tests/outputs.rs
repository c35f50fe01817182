//! The outputs of a program arrive completely, even with slow readers.

mod common;

use common::{busybox, machines};
use faultless_boot::{End, Input, Limits, Machine, Program, Streams};
use std::io::{self, Write};
use std::thread;
use std::time::Duration;

/// A reader that stalls at random times, for up to `longest`.
struct Stalls<'a> {
    taken: &'a mut Vec<u8>,
    state: u64,
    longest: Duration,
}

impl<'a> Stalls<'a> {
    fn new(taken: &'a mut Vec<u8>, seed: u64, longest: Duration) -> Self {
        Self { taken, state: seed, longest }
    }

    /// The next number of a xorshift generator.
    fn random(&mut self) -> u64 {
        self.state ^= self.state << 13;
        self.state ^= self.state >> 7;
        self.state ^= self.state << 17;
        self.state
    }
}

impl Write for Stalls<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.random().is_multiple_of(8) {
            thread::sleep(self.longest * (self.random() % 1000) as u32 / 1000);
        }
        // Takes a part of the bytes, like a pipe.
        let part = 1 + self.random() as usize % bytes.len().max(1);
        let part = part.min(bytes.len());
        self.taken.extend_from_slice(&bytes[..part]);
        Ok(part)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// The lines `1` to `last`.
fn lines(last: u32) -> Vec<u8> {
    (1..=last).flat_map(|line| format!("{line}\n").into_bytes()).collect()
}

/// Runs a shell script on `machine`, and reads its outputs with stalls of up to `longest`; checks
/// that both outputs have the lines up to `last`.
#[track_caller]
fn outputs_are_whole(machine: &Machine, script: &str, last: u32, longest: Duration) {
    let program =
        Program::file(busybox()).expect("busybox is a program").args(["sh", "-c", script]);
    let (mut output, mut errors) = (Vec::new(), Vec::new());
    let streams = Streams {
        input: Input::None,
        output: Box::new(Stalls::new(&mut output, 0x9e37_79b9, longest)),
        errors: Box::new(Stalls::new(&mut errors, 0x7f4a_7c15, longest)),
    };
    let limits = Limits { timeout: Some(Duration::from_secs(600)), stop: None };
    let run = machine.run(&program, streams, &limits).expect("the machine starts");
    assert_eq!(run.end, End::Exited(0), "{:?}", run.report.messages);
    let expected = lines(last);
    for (name, taken) in [("output", &output), ("errors", &errors)] {
        let at = expected.iter().zip(taken).position(|(one, other)| one != other);
        assert!(
            *taken == expected,
            "{name}: {} of {} bytes arrived; the first difference is at {at:?}",
            taken.len(),
            expected.len()
        );
    }
}

/// More bytes than the host's pipes hold, from two processes at a time.
#[test]
fn outputs_are_complete_when_readers_stall() {
    let script = "seq 1 60000 & seq 1 60000 >&2; wait";
    for machine in machines() {
        outputs_are_whole(&machine, script, 60_000, Duration::from_millis(300));
    }
}
