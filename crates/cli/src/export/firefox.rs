//! The format of the Firefox Profiler: a sample with its call stack and a marker for each fault,
//! and a counter track of resident memory for each process.

use super::Profile;
use crate::error::CliError;
use faultless_analysis::advise::creators::creator;
use faultless_trace::callers::{Caller, Callers};
use faultless_trace::event::{Access, Kind, StackId};
use faultless_trace::footprint;
use fxprof_processed_profile::{
    CategoryHandle, CounterHandle, CpuDelta, Frame, FrameFlags, FrameInfo, MarkerFieldFlags,
    MarkerFieldFormat, MarkerTiming, Profile as Firefox, ReferenceTimestamp, SamplingInterval,
    StackHandle, StaticSchemaMarker, StaticSchemaMarkerField, StringHandle, ThreadHandle,
    Timestamp, WeightType,
};
use std::collections::HashMap;
use std::time::Duration;

/// The most faults with a marker. Further faults have a sample only: the profiler becomes slow with
/// millions of markers.
const MAX_MARKERS: usize = 200_000;

/// A fault as a marker.
struct Fault {
    name: StringHandle,
    address: StringHandle,
    kind: StringHandle,
    /// The call that created the memory; empty if unknown.
    memory: StringHandle,
}

impl StaticSchemaMarker for Fault {
    const UNIQUE_MARKER_TYPE_NAME: &'static str = "PageFault";
    const DESCRIPTION: Option<&'static str> = Some("A page fault.");
    const TABLE_LABEL: Option<&'static str> = Some("{marker.data.kind} {marker.data.address}");
    const FIELDS: &'static [StaticSchemaMarkerField] = &[
        StaticSchemaMarkerField {
            key: "address",
            label: "Page",
            format: MarkerFieldFormat::String,
            flags: MarkerFieldFlags::SEARCHABLE,
        },
        StaticSchemaMarkerField {
            key: "kind",
            label: "Access",
            format: MarkerFieldFormat::String,
            flags: MarkerFieldFlags::SEARCHABLE,
        },
        StaticSchemaMarkerField {
            key: "memory",
            label: "Memory of",
            format: MarkerFieldFormat::String,
            flags: MarkerFieldFlags::SEARCHABLE,
        },
    ];

    fn name(&self, _: &mut Firefox) -> StringHandle {
        self.name
    }

    fn category(&self, _: &mut Firefox) -> CategoryHandle {
        CategoryHandle::OTHER
    }

    fn string_field_value(&self, field: u32) -> StringHandle {
        [self.address, self.kind, self.memory][field as usize]
    }

    fn number_field_value(&self, _: u32) -> f64 {
        0.0
    }
}

/// Returns the profile as JSON.
pub fn json(profile: &Profile<'_>) -> Result<Vec<u8>, CliError> {
    let trace = profile.trace;
    // The recording has no time of day.
    let epoch = ReferenceTimestamp::from_duration_since_unix_epoch(Duration::ZERO);
    let mut out = Firefox::new(profile.name, epoch, SamplingInterval::from_nanos(1000));
    let start = time(0);
    let mut processes: Vec<Option<(_, Option<CounterHandle>)>> = vec![None; trace.processes.len()];
    let mut threads = Vec::new();
    for (number, thread) in (1..).zip(&trace.threads) {
        let process = &mut processes[thread.process as usize];
        let first = process.is_none();
        let (process, _) = *process.get_or_insert_with(|| {
            let pid = trace.processes[thread.process as usize].pid.unwrap_or(thread.process + 1);
            (out.add_process(&thread.name, pid, start), None)
        });
        let handle = out.add_thread(process, number, start, first);
        out.set_thread_name(handle, &thread.name);
        out.set_thread_samples_weight_type(handle, WeightType::Samples);
        threads.push(handle);
    }
    faults(&mut out, profile, &threads);
    footprint::changes(trace, |change| {
        let Some((process, counter)) = &mut processes[change.process as usize] else { return };
        let counter = *counter.get_or_insert_with(|| {
            let what = "Touched pages that were not freed";
            out.add_counter(*process, "resident memory", "Memory", what)
        });
        let bytes = change.pages as f64 * 4096.0;
        out.add_counter_sample(counter, time(change.time_us), bytes, 1);
    });
    serde_json::to_vec(&out).map_err(|error| CliError::failed("--export firefox", error))
}

/// Adds the samples and the markers of all faults.
fn faults(out: &mut Firefox, profile: &Profile<'_>, threads: &[ThreadHandle]) {
    let mut stack_of: HashMap<(u32, StackId), Option<StackHandle>> = HashMap::new();
    let name = out.intern_string("page fault");
    let mut marked = 0;
    let mut callers = Callers::new(profile.trace);
    let mut labels: HashMap<Option<Caller>, String> = HashMap::new();
    for event in &profile.trace.events {
        callers.step(profile.trace, &event);
        let Kind::Fault { page, access, kernel, present, stack, .. } = event.kind else { continue };
        let thread = threads[event.thread as usize];
        let stack = *stack_of
            .entry((event.thread, stack))
            .or_insert_with(|| frames(out, profile, thread, stack));
        let at = time(event.time_us);
        out.add_sample(thread, at, stack, CpuDelta::ZERO, 1);
        if marked == MAX_MARKERS {
            continue;
        }
        marked += 1;
        let mode = if kernel { ", in the kernel" } else { "" };
        let kind = match (access, present) {
            (_, true) => "write to a present page",
            (Access::Write, _) => "write",
            (Access::Exec, _) => "instruction fetch",
            (Access::Read, _) => "read",
            (Access::Unknown, _) => "access",
        };
        let address = out.intern_string(&format!("{page:#x}"));
        let kind = out.intern_string(&format!("{kind}{mode}"));
        let process = profile.trace.threads[event.thread as usize].process as usize;
        let caller = callers.of(process, page);
        let label = labels.entry(caller).or_insert_with(|| {
            let creator = caller.and_then(|caller| creator(&profile.trace.stacks, caller));
            creator.map_or(String::new(), |creator| creator.label())
        });
        let memory = out.intern_string(label);
        let marker = Fault { name, address, kind, memory };
        let marker = out.add_marker(thread, MarkerTiming::Instant(at), marker);
        out.set_marker_stack(thread, marker, stack);
    }
}

/// Adds the frames of `stack`.
fn frames(
    out: &mut Firefox,
    profile: &Profile<'_>,
    thread: ThreadHandle,
    stack: StackId,
) -> Option<StackHandle> {
    let frames: Vec<_> = profile.trace.stacks.of(stack).collect();
    let info = |label: String, out: &mut Firefox| FrameInfo {
        frame: Frame::Label(out.intern_string(&label)),
        category_pair: CategoryHandle::OTHER.into(),
        flags: FrameFlags::empty(),
    };
    let mut all = Vec::new();
    for (_, function) in frames.into_iter().rev() {
        let label = match &*function.module {
            "" => function.label().to_owned(),
            module => format!("{} ({module})", function.label()),
        };
        all.push(info(label, out));
    }
    out.intern_stack_frames(thread, all.into_iter())
}

fn time(us: u64) -> Timestamp {
    Timestamp::from_nanos_since_reference(us * 1000)
}

#[cfg(test)]
mod tests {
    use super::super::tests::{profile, trace};
    use super::*;
    use serde_json::Value;

    #[test]
    fn faults_are_samples_and_markers_with_a_counter_of_memory() {
        let trace = trace();
        let profile = profile(&trace);
        let json: Value = serde_json::from_slice(&json(&profile).expect("encoded")).expect("JSON");
        let thread = &json["threads"][0];
        assert_eq!(thread["samples"]["length"], 4);
        assert_eq!(thread["markers"]["length"], 4);
        let strings = thread["stringArray"].as_array().or(json["shared"]["stringArray"].as_array());
        let strings = format!("{strings:?}");
        assert!(strings.contains("load (app)") && strings.contains("0x1000"), "{strings}");
        let memory = &thread["markers"]["data"][0]["memory"];
        let memory = memory.as_u64().and_then(|at| {
            let all = thread["stringArray"].as_array().or(json["shared"]["stringArray"].as_array());
            all?.get(at as usize)?.as_str()
        });
        assert_eq!(memory, Some("mmap in main; loop app.c:9 (app)"));
        assert_eq!(thread["pid"], "77");
        let counter = &json["counters"][0];
        assert_eq!(counter["name"], "resident memory");
        let samples = &counter["samples"];
        assert_eq!(samples["count"].as_array().map(Vec::len), Some(4), "{samples}");
        assert_eq!(samples["count"][3], 4096.0);
    }
}
