//! The format of pprof: a compressed message of protocol buffers, with the faults, the bytes and
//! the predicted time of each call stack.
//!
//! The label `memory_of` of a sample names the calls that created the memory of its faults.
//!
//! The numbers of the fields are those of pprof's `profile.proto`. Fields that pprof does not need
//! are omitted.

use super::Profile;
use crate::error::CliError;
use flate2::Compression;
use flate2::write::GzEncoder;
use prost::Message;
use std::collections::HashMap;
use std::io::Write;

#[derive(Clone, PartialEq, Message)]
struct ValueType {
    #[prost(int64, tag = "1")]
    kind: i64,
    #[prost(int64, tag = "2")]
    unit: i64,
}

#[derive(Clone, PartialEq, Message)]
struct Sample {
    /// The innermost location first.
    #[prost(uint64, repeated, tag = "1")]
    location_id: Vec<u64>,
    #[prost(int64, repeated, tag = "2")]
    value: Vec<i64>,
    #[prost(message, repeated, tag = "3")]
    label: Vec<Label>,
}

#[derive(Clone, PartialEq, Message)]
struct Label {
    #[prost(int64, tag = "1")]
    key: i64,
    #[prost(int64, tag = "2")]
    text: i64,
}

#[derive(Clone, PartialEq, Message)]
struct Mapping {
    #[prost(uint64, tag = "1")]
    id: u64,
    #[prost(int64, tag = "5")]
    filename: i64,
    #[prost(bool, tag = "7")]
    has_functions: bool,
}

#[derive(Clone, PartialEq, Message)]
struct Line {
    #[prost(uint64, tag = "1")]
    function_id: u64,
    #[prost(int64, tag = "2")]
    line: i64,
}

#[derive(Clone, PartialEq, Message)]
struct Location {
    #[prost(uint64, tag = "1")]
    id: u64,
    #[prost(uint64, tag = "2")]
    mapping_id: u64,
    #[prost(message, repeated, tag = "4")]
    line: Vec<Line>,
}

#[derive(Clone, PartialEq, Message)]
struct Function {
    #[prost(uint64, tag = "1")]
    id: u64,
    #[prost(int64, tag = "2")]
    name: i64,
    #[prost(int64, tag = "4")]
    filename: i64,
}

#[derive(Clone, PartialEq, Message)]
struct Pprof {
    #[prost(message, repeated, tag = "1")]
    sample_type: Vec<ValueType>,
    #[prost(message, repeated, tag = "2")]
    sample: Vec<Sample>,
    #[prost(message, repeated, tag = "3")]
    mapping: Vec<Mapping>,
    #[prost(message, repeated, tag = "4")]
    location: Vec<Location>,
    #[prost(message, repeated, tag = "5")]
    function: Vec<Function>,
    #[prost(string, repeated, tag = "6")]
    string_table: Vec<String>,
    #[prost(int64, tag = "10")]
    duration_nanos: i64,
    #[prost(int64, repeated, tag = "13")]
    comment: Vec<i64>,
    #[prost(int64, tag = "14")]
    default_sample_type: i64,
}

/// The strings of a profile. The first is empty.
#[derive(Default)]
struct Strings {
    all: Vec<String>,
    numbers: HashMap<String, i64>,
}

impl Strings {
    fn number(&mut self, text: &str) -> i64 {
        if let Some(number) = self.numbers.get(text) {
            return *number;
        }
        let number = self.all.len() as i64;
        self.all.push(text.to_owned());
        self.numbers.insert(text.to_owned(), number);
        number
    }
}

/// Returns the compressed profile.
pub fn encoded(profile: &Profile<'_>) -> Result<Vec<u8>, CliError> {
    let mut gzip = GzEncoder::new(Vec::new(), Compression::default());
    let written = gzip.write_all(&message(profile).encode_to_vec());
    let packed = written.and_then(|()| gzip.finish());
    packed.map_err(|error| CliError::failed("--export pprof", error))
}

fn message(profile: &Profile<'_>) -> Pprof {
    let mut strings = Strings::default();
    strings.number("");
    let kinds = [("faults", "count"), ("memory", "bytes"), ("predicted_time", "nanoseconds")];
    let sample_type = kinds
        .map(|(kind, unit)| ValueType { kind: strings.number(kind), unit: strings.number(unit) });
    let stacks = &profile.trace.stacks;
    let (mut mapping, mut mapping_of) = (Vec::new(), HashMap::new());
    let mut function = Vec::new();
    let modules = stacks.functions.iter().map(|function| &*function.module);
    // pprof shows the first mapping as the program. The kernel has the start of its name.
    let program = &*profile.trace.header.program;
    let own = modules.clone().find(|module| !program.is_empty() && module.starts_with(program));
    for module in own.into_iter().chain(modules) {
        mapping_of.entry(module).or_insert_with(|| {
            let id = mapping.len() as u64 + 1;
            let filename = strings.number(module);
            mapping.push(Mapping { id, filename, has_functions: true });
            id
        });
    }
    for (id, of) in (1..).zip(&stacks.functions) {
        let (name, filename) = (strings.number(of.label()), strings.number(&of.file));
        function.push(Function { id, name, filename });
    }
    let (mut location, mut location_of) = (Vec::new(), HashMap::new());
    let sample = profile.costs.iter().map(|cost| {
        let location_id = stacks.of(cost.stack).map(|(frame, of)| {
            *location_of.entry((frame.function, frame.line)).or_insert_with(|| {
                let id = location.len() as u64 + 1;
                let line =
                    Line { function_id: u64::from(frame.function) + 1, line: frame.line.into() };
                let mapping_id = mapping_of[&*of.module];
                location.push(Location { id, mapping_id, line: vec![line] });
                id
            })
        });
        let location_id = location_id.collect();
        let time = cost.nanoseconds.round() as i64;
        let value = vec![cost.faults as i64, cost.bytes as i64, time];
        let calls = profile.memory.get(&cost.stack).into_iter().flatten();
        let key = strings.number("memory_of");
        let label = calls.map(|call| Label { key, text: strings.number(call) }).collect();
        Sample { location_id, value, label }
    });
    let sample = sample.collect();
    let comment = format!("page faults of {}, recorded by faultless", profile.name);
    Pprof {
        sample_type: sample_type.to_vec(),
        sample,
        mapping,
        location,
        function,
        duration_nanos: (profile.trace.events.last_us() * 1000) as i64,
        comment: vec![strings.number(&comment)],
        default_sample_type: strings.number("predicted_time"),
        string_table: strings.all,
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{profile, trace};
    use super::*;
    use flate2::read::GzDecoder;
    use std::io::Read;

    #[test]
    fn stacks_and_values_can_be_decoded() {
        let mut trace = trace();
        trace.stacks.functions[0].module = "libc.so.6".into();
        let profile = profile(&trace);
        let bytes = encoded(&profile).expect("encoded");
        let mut plain = Vec::new();
        GzDecoder::new(&*bytes).read_to_end(&mut plain).expect("gzip");
        let got = Pprof::decode(&*plain).expect("a message");
        let text = |number: i64| &*got.string_table[number as usize];
        assert_eq!(text(0), "");
        let frames = |sample: &Sample| {
            let name = |id: &u64| {
                let line = &got.location[*id as usize - 1].line[0];
                let function = &got.function[line.function_id as usize - 1];
                format!("{} {}:{}", text(function.name), text(function.filename), line.line)
            };
            sample.location_id.iter().map(name).collect::<Vec<_>>()
        };
        assert_eq!(frames(&got.sample[1]), ["load app.c:3", "main; loop app.c:9"]);
        assert_eq!(got.sample[0].value, [3, 3 * 4096, 3000]);
        let [label] = &got.sample[1].label[..] else { panic!("{:?}", got.sample[1]) };
        assert_eq!((text(label.key), text(label.text)), ("memory_of", "mmap in main"));
        assert!(got.sample[0].label.is_empty(), "no call is known");
        let units: Vec<_> = got.sample_type.iter().map(|kind| text(kind.unit)).collect();
        assert_eq!(units, ["count", "bytes", "nanoseconds"]);
        let mappings: Vec<_> = got.mapping.iter().map(|mapping| text(mapping.filename)).collect();
        assert_eq!(mappings, ["app", "libc.so.6"], "the program first");
        assert_eq!(text(got.default_sample_type), "predicted_time");
    }
}
