//! Collects the call chains of samples, and names their frames.
//!
//! An address of a chain belongs to a file at the time of the sample, so the executable mappings of
//! each process are followed: mapping records add areas, a fork copies them, and an executed
//! program starts without areas. A [`Place`] is an offset in a file, or an address in memory
//! without a file (code of a just-in-time compiler). Chains that share their outer frames share the
//! nodes of one tree. The [symbols] of the places are read once, after the last record.

use super::unwind::Unwind;
use crate::event::{Frame, Function, MAX_FRAMES, MAX_FUNCTIONS, StackId, Stacks};
use crate::symbols::{self, Module, Place, Source};
use linux_perf_data::linux_perf_event_reader::SampleRecord;
use rangemap::RangeMap;
use std::collections::HashMap;
use std::rc::Rc;

/// Addresses of a chain from here up are markers of perf (`PERF_CONTEXT_MAX`).
const FIRST_MARKER: u64 = -4095i64 as u64;
/// The marker before the frames of the program (`PERF_CONTEXT_USER`).
const USER: u64 = -512i64 as u64;

/// The executable areas of a process: the module of each, and the offset in the module of address
/// 0, modulo 2^64.
type Code = RangeMap<u64, (u32, u64)>;

/// The call chains of a recording.
#[derive(Default)]
pub(super) struct Chains {
    code: HashMap<i32, Rc<Code>>,
    modules: Vec<Module>,
    module_of: HashMap<Module, u32>,
    places: Vec<Place>,
    place_of: HashMap<Place, u32>,
    /// The caller and the place of each frame.
    frames: Vec<(StackId, u32)>,
    frame_of: HashMap<(StackId, u32), StackId>,
    /// Whether chains have frames beyond the limit, which are omitted.
    cut: bool,
    /// The unwind tables, if samples have copies of the stack.
    unwind: Option<Unwind>,
}

impl Chains {
    /// Creates the chains of a recording. With `unwind`, samples have copies of the stack.
    pub fn new(unwind: Option<Unwind>) -> Self {
        Self { unwind, ..Self::default() }
    }

    /// Adds a mapping of `len` bytes of the process `pid` from `start` on, which maps the file
    /// `path` from the byte `offset` on.
    pub fn map(&mut self, pid: i32, start: u64, len: u64, offset: u64, path: &[u8]) {
        let Some(end) = start.checked_add(len).filter(|end| *end > start) else { return };
        let module = Module::of(pid, path);
        // Code in memory keeps its address.
        if let Some(unwind) = &mut self.unwind {
            unwind.map(pid, start, len, offset, &module);
        }
        let base = if module.is_memory() { 0 } else { offset.wrapping_sub(start) };
        let module = self.module(module);
        let code = self.code.entry(pid).or_default();
        Rc::make_mut(code).insert(start..end, (module, base));
    }

    /// Copies the mappings of the process `parent` to its new process `child`.
    pub fn fork(&mut self, parent: i32, child: i32) {
        if let Some(code) = self.code.get(&parent).cloned() {
            self.code.insert(child, code);
        }
        if let Some(unwind) = &mut self.unwind {
            unwind.fork(parent, child);
        }
    }

    /// Removes the mappings of the process `pid`, which executes another program.
    pub fn exec(&mut self, pid: i32) {
        self.code.remove(&pid);
        if let Some(unwind) = &mut self.unwind {
            unwind.exec(pid);
        }
    }

    /// Adds the call stack of a sample of the process `pid`; `None` for a sample without a stack.
    pub fn sample(&mut self, pid: i32, sample: &SampleRecord<'_>) -> Option<StackId> {
        if let (Some(unwind), Some(regs), Some((stack, len))) =
            (&mut self.unwind, &sample.user_regs, sample.user_stack)
        {
            let stack = stack.get(0..(len as usize).min(stack.len())).unwrap_or(stack);
            let chain = unwind.chain(pid, |number| regs.get(number), stack);
            return Some(self.stack(pid, &chain));
        }
        let chain = sample.callchain?;
        Some(self.add(pid, (0..chain.len()).filter_map(|at| chain.get(at))))
    }

    /// Adds a chain of addresses with markers, the innermost first, of the process `pid`.
    fn add(&mut self, pid: i32, chain: impl Iterator<Item = u64>) -> StackId {
        let mut user = false;
        let mut addresses = Vec::new();
        for address in chain {
            if address >= FIRST_MARKER {
                user = address == USER;
            } else if user {
                // A return address may lie behind the last instruction of the caller.
                addresses.push(address - u64::from(!addresses.is_empty() && address > 0));
            }
        }
        self.stack(pid, &addresses)
    }

    /// Returns the stack of the instructions at `addresses`, the innermost first.
    fn stack(&mut self, pid: i32, addresses: &[u64]) -> StackId {
        let mut stack = StackId::NONE;
        for address in addresses.iter().rev() {
            let place = self.place(pid, *address);
            let Some(inner) = self.frame(stack, place) else { break };
            stack = inner;
        }
        stack
    }

    fn frame(&mut self, caller: StackId, place: u32) -> Option<StackId> {
        if let Some(stack) = self.frame_of.get(&(caller, place)) {
            return Some(*stack);
        }
        if self.frames.len() >= MAX_FRAMES {
            self.cut = true;
            return None;
        }
        self.frames.push((caller, place));
        let stack = StackId::new(self.frames.len() as u32);
        self.frame_of.insert((caller, place), stack);
        Some(stack)
    }

    fn place(&mut self, pid: i32, address: u64) -> u32 {
        let found = self.code.get(&pid).and_then(|code| code.get(&address)).copied();
        let place = match found {
            Some((module, base)) => Place { module, offset: address.wrapping_add(base) },
            None => Place { module: self.module(Module::of(pid, b"")), offset: address },
        };
        *self.place_of.entry(place).or_insert_with(|| {
            self.places.push(place);
            self.places.len() as u32 - 1
        })
    }

    fn module(&mut self, module: Module) -> u32 {
        if let Some(number) = self.module_of.get(&module) {
            return *number;
        }
        let number = self.modules.len() as u32;
        self.modules.push(module.clone());
        self.module_of.insert(module, number);
        number
    }

    /// Names the frames by the symbols of `source`. Returns the stacks, the stack in the place of
    /// each collected stack, and remarks.
    pub fn named(self, source: &Source) -> (Stacks, Vec<StackId>, Vec<String>) {
        let (lines, mut notes) = symbols::find(&self.modules, &self.places, source);
        let mut stacks = Stacks::default();
        let mut function_of: HashMap<Function, u32> = HashMap::new();
        let mut frame_of: HashMap<Frame, StackId> = HashMap::new();
        let mut new = vec![StackId::NONE];
        let mut cut = self.cut;
        for (caller, place) in &self.frames {
            let mut stack = new[caller.number() as usize];
            // Several functions at one place are calls that the compiler has inlined.
            for (function, line) in &lines[*place as usize] {
                let count = function_of.len();
                if count >= MAX_FUNCTIONS && !function_of.contains_key(function) {
                    cut = true;
                    break;
                }
                let function = *function_of.entry(function.clone()).or_insert_with(|| {
                    stacks.functions.push(function.clone());
                    count as u32
                });
                let frame = Frame { caller: stack, function, line: *line };
                let known = frame_of.get(&frame).copied();
                if known.is_none() && stacks.frames.len() >= MAX_FRAMES {
                    cut = true;
                    break;
                }
                stack = known.unwrap_or_else(|| {
                    stacks.frames.push(frame);
                    let stack = StackId::new(stacks.frames.len() as u32);
                    frame_of.insert(frame, stack);
                    stack
                });
            }
            new.push(stack);
        }
        if cut {
            notes.push(
                "the call stacks have more frames than the limit of a recording: inner frames of \
                 some stacks are missing"
                    .to_owned(),
            );
        }
        (stacks, new, notes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn labels(stacks: &Stacks, stack: StackId) -> Vec<String> {
        let label = |function: &Function| format!("{} {}", function.label(), function.module);
        stacks.of(stack).map(|(_, function)| label(function)).collect()
    }

    #[test]
    fn chains_share_frames_and_follow_mappings() {
        let mut chains = Chains::default();
        chains.map(7, 0x1000, 0x2000, 0x5000, b"/no/such/program");
        // The kernel's frames, and the return address behind the last byte of an area.
        let chain = [-128i64 as u64, 0xffff_ffff_8000_0000, USER, 0x1800, 0x3000, 0x9000];
        let first = chains.add(7, chain.into_iter());
        let second = chains.add(7, [USER, 0x1900, 0x3000, 0x9000].into_iter());
        assert_eq!(chains.frames.len(), 4);
        chains.fork(7, 8);
        let forked = chains.add(8, [USER, 0x1800].into_iter());
        chains.exec(8);
        let executed = chains.add(8, [USER, 0x1800].into_iter());
        assert_eq!(chains.add(8, [USER].into_iter()), StackId::NONE);
        assert_eq!(chains.places[1], Place { module: 0, offset: 0x6fff });
        let (stacks, new, _) = chains.named(&Source::default());
        let of = |stack: StackId| labels(&stacks, new[stack.number() as usize]);
        let (program, memory) = ("program program", "[memory] [memory]");
        assert_eq!(of(first), [program, program, memory]);
        assert_eq!(of(second), of(first));
        assert_eq!(of(forked), [program]);
        assert_eq!(of(executed), [memory]);
    }

    #[test]
    fn symbols_of_this_program_are_found() {
        let path = std::env::current_exe().unwrap();
        let maps = procfs::process::Process::myself().unwrap().maps().unwrap();
        let address = chains_share_frames_and_follow_mappings as fn() as usize as u64;
        let map = maps.iter().find(|map| (map.address.0..map.address.1).contains(&address));
        let map = map.unwrap();
        let mut chains = Chains::default();
        let (start, end) = map.address;
        let path = path.as_os_str().as_encoded_bytes();
        chains.map(1, start, end - start, map.offset, path);
        let stack = chains.add(1, [USER, address].into_iter());
        let (stacks, new, _) = chains.named(&Source::default());
        let labels = labels(&stacks, new[stack.number() as usize]);
        let name = "chains_share_frames_and_follow_mappings";
        assert!(labels.iter().any(|label| label.contains(name)), "{labels:?}");
    }
}
