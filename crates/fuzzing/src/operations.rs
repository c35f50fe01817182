//! Calls, loads and stores in several processes, chosen by bytes, with any arguments: no panic, no
//! stale translation, and all frames accounted for.

use faultless::audit::audit_with;
use faultless::{
    Access, Advice, Backing, KNOBS, MapFlags, Object, PAGE_SIZE, PrivateCopies, Prot, RemapFlags,
    Setting, Shared,
};
use faultless_native::{Checked, Config, Native, NativeCpu, Process, Stop};

/// The base address of most calls: two tables meet in the middle of the range.
const BASE: u64 = (1 << 30) - 32 * PAGE_SIZE;
/// Addresses at which arithmetic errors are likely.
const EDGES: [u64; 8] =
    [0, 0x1_0000, 1 << 39, 0x7fff_ffff_f000, 0x7fff_ffff_e000, 1 << 47, 1 << 63, u64::MAX - 0xfff];
const OBJECTS: usize = 2;
const PROCESSES: usize = 3;

/// The remaining bytes, followed by zeros.
struct Bytes<'b>(&'b [u8]);

impl Bytes<'_> {
    fn byte(&mut self) -> u8 {
        let Some((&first, rest)) = self.0.split_first() else { return 0 };
        self.0 = rest;
        first
    }

    fn word(&mut self) -> u64 {
        u64::from_le_bytes(core::array::from_fn(|_| self.byte()))
    }

    /// Mostly a page near [`BASE`].
    fn addr(&mut self) -> u64 {
        match self.byte() {
            near @ 0..224 => BASE + u64::from(near & 63) * PAGE_SIZE,
            224..240 => BASE + u64::from(self.byte()) * (2 << 20),
            edge @ 240..254 => EDGES[usize::from(edge) % EDGES.len()],
            _ => self.word(),
        }
    }

    /// Mostly a few pages.
    fn len(&mut self) -> u64 {
        match self.byte() {
            few @ 0..240 => u64::from(few & 31) * PAGE_SIZE,
            240..248 => u64::from(self.byte()) << 20,
            248..252 => EDGES[usize::from(self.byte()) % EDGES.len()],
            _ => self.word(),
        }
    }
}

/// Runs the operations encoded in `bytes`.
///
/// # Panics
/// If a promise is broken.
pub fn operations(bytes: &[u8]) {
    let config =
        Config { memory_bytes: 4 << 20, cpus: 1, checked: Checked::Panic, ..Config::default() };
    let native = Native::new(config).expect("the host has 4 MiB");
    let mut bytes = Bytes(bytes);
    let first = native.process().expect("an unused machine has free frames");
    let mut processes = Vec::from([first]);
    let mut objects = Vec::new();
    let made = processes[0].run(|cpu| {
        for tag in 1..=OBJECTS {
            objects.push(Object::try_new(cpu.cpu(), 12, tag as u64));
        }
        Ok(())
    });
    made.expect("no guest code runs");
    let mut objects: Vec<_> = objects.into_iter().flatten().collect();
    let mut steps = 0;
    while !bytes.0.is_empty() && steps < 512 {
        steps += 1;
        let turn = usize::from(bytes.byte()) % processes.len();
        let kind = bytes.byte() % 24;
        match kind {
            0 if processes.len() < PROCESSES => {
                let mut child = None;
                let forked = processes[turn].run(|cpu| {
                    child = Some(cpu.fork()?);
                    Ok(())
                });
                // Only for want of memory.
                assert!(forked.is_ok() || matches!(forked, Err(Stop::Refused(_))));
                processes.extend(child);
            }
            1 if processes.len() > 1 => processes.remove(turn).exit(),
            2 => set(&native, &mut bytes),
            3 => truncate(&processes, &objects, &mut bytes),
            _ => {
                // Signals and refusals are permitted results.
                let _ = processes[turn].run(|cpu| step(cpu, kind, &objects, &mut bytes));
            }
        }
    }
    native.vm().set(Setting::FrameLimit(u64::MAX));
    let books = processes[0].run(|cpu| {
        cpu.cpu().drain();
        let spaces: Vec<_> = processes.iter().map(Process::space).collect();
        let shares: Vec<_> = objects.iter().collect();
        audit_with(cpu.cpu(), &spaces, &shares).unwrap_or_else(|error| panic!("{error}"));
        objects.drain(..).for_each(|object| Object::release(object, cpu.cpu()));
        Ok(())
    });
    books.expect("no guest code runs");
    drop(processes);
    let census = native.audit(&[]).unwrap_or_else(|error| panic!("{error}"));
    assert_eq!(census.taken(), 1, "all but the page of zeros are free");
}

/// Sets a knob to one of its values.
fn set(native: &Native, bytes: &mut Bytes<'_>) {
    let (name, values, _) = KNOBS[usize::from(bytes.byte()) % KNOBS.len()];
    let value = value(values, bytes.byte(), bytes.byte());
    let setting = format!("{name}={value}").parse();
    native.vm().set(setting.unwrap_or_else(|error| panic!("{name}={value}: {error}")));
}

/// Returns a value of a knob whose `values` are `NAME | NAME` or `LOWEST to HIGHEST`: a name, or a
/// number close to the lowest number on one of several scales.
fn value(values: &str, number: u8, scale: u8) -> String {
    let names: Vec<_> = values.split(" | ").collect();
    if names.len() > 1 {
        return names[usize::from(number) % names.len()].to_owned();
    }
    let mut bounds = values.split_whitespace().filter_map(|word| word.parse::<u64>().ok());
    let (Some(lowest), Some(highest)) = (bounds.next(), bounds.next()) else {
        panic!("{values:?} is neither a list of names nor a range");
    };
    let number = u64::from(number);
    // Single frames or areas, more than memory, and pages in bytes.
    let above = match scale % 4 {
        0 | 1 => number,
        2 => number * 8,
        _ => number * PAGE_SIZE,
    };
    (lowest + above % (highest - lowest + 1)).to_string()
}

/// Changes the length of an object, as a kernel does.
fn truncate(processes: &[Process<'_>], objects: &[Shared<Object>], bytes: &mut Bytes<'_>) {
    let object = &objects[usize::from(bytes.byte()) % objects.len()];
    let pages = if bytes.byte() < 250 { u64::from(bytes.byte() % 24) } else { bytes.word() };
    let done = processes[0].run(|cpu| {
        if object.set_pages(cpu.cpu(), pages).is_ok() {
            let gone = pages..u64::MAX;
            for process in processes {
                process.space().revoke(cpu.cpu(), object, gone.clone(), PrivateCopies::Drop);
            }
        }
        Ok(())
    });
    done.expect("no guest code runs");
}

/// A call, or an access.
fn step(
    cpu: &NativeCpu<'_, '_>,
    kind: u8,
    objects: &[Shared<Object>],
    bytes: &mut Bytes<'_>,
) -> Result<(), Stop> {
    let (space, addr) = (cpu.running().space(), bytes.addr());
    match kind {
        4 | 5 => {
            let len = bytes.len();
            let (prot, flags) = (prot(bytes), map_flags(bytes));
            cpu.mmap(addr, len, prot, flags)?;
        }
        6 | 7 => {
            let object = &objects[usize::from(bytes.byte()) % objects.len()];
            let first =
                if bytes.byte() < 250 { u64::from(bytes.byte() % 24) } else { bytes.word() };
            let backing = Backing { object, first, may_write: !bytes.byte().is_multiple_of(4) };
            let (len, prot, flags) = (bytes.len(), prot(bytes), map_flags(bytes));
            space.mmap_object(cpu.cpu(), addr, len, prot, flags, backing)?;
        }
        8 => cpu.munmap(addr, bytes.len())?,
        9 | 10 => {
            let len = bytes.len();
            cpu.mprotect(addr, len, prot(bytes))?;
        }
        11 | 12 => {
            let (old, new, to) = (bytes.len(), bytes.len(), bytes.addr());
            let flags = RemapFlags::from_bits_retain(u32::from(bytes.byte() & 15));
            cpu.mremap(addr, old, new, flags, to)?;
        }
        13 | 14 => {
            let len = bytes.len();
            if let Some(advice) = Advice::from_number(u32::from(bytes.byte() % 26)) {
                cpu.madvise(addr, len, advice)?;
            }
        }
        15 => {
            let heap = space.heap_range();
            cpu.brk(if bytes.byte() < 200 { heap.start.wrapping_add(bytes.len()) } else { addr });
        }
        16 => cpu.mincore(addr, bytes.len().min(1 << 30), drop)?,
        17 => {
            let _ = space.set_heap_start(cpu.cpu(), addr);
        }
        18 => {
            let object = &objects[usize::from(bytes.byte()) % objects.len()];
            // SAFETY: the bytes of a page.
            let _ = object.write_page(cpu.cpu(), addr >> 12, |at| unsafe { at.write(1) });
        }
        19 => cpu.touch(addr, Access::Execute)?,
        20 | 21 => {
            cpu.load::<u64>(addr.wrapping_add(u64::from(bytes.byte())))?;
        }
        _ => cpu.store(addr.wrapping_add(u64::from(bytes.byte())), bytes.word())?,
    }
    Ok(())
}

fn prot(bytes: &mut Bytes<'_>) -> Prot {
    match bytes.byte() {
        plain @ 0..240 => Prot::from_bits_retain(u32::from(plain & 7)),
        grows @ 240..248 => Prot::from_bits_retain(u32::from(grows & 7)) | Prot::GROWSDOWN,
        _ => Prot::from_bits_retain(bytes.word() as u32),
    }
}

fn map_flags(bytes: &mut Bytes<'_>) -> MapFlags {
    let byte = bytes.byte();
    if byte >= 250 {
        return MapFlags::from_bits_retain(bytes.word() as u32);
    }
    let mut flags = MapFlags::ANONYMOUS;
    flags |= if byte & 1 == 0 { MapFlags::PRIVATE } else { MapFlags::SHARED };
    flags.set(MapFlags::FIXED, byte & 6 != 0);
    flags.set(MapFlags::POPULATE, byte & 24 == 24);
    flags.set(MapFlags::GROWSDOWN, byte & 96 == 96);
    flags
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn every_knob_takes_each_name_or_many_numbers() {
        for (name, values, _) in KNOBS {
            let mut taken = BTreeSet::new();
            for number in 0..=u8::MAX {
                for scale in 0..4 {
                    let value = value(values, number, scale);
                    let setting: Result<Setting, _> = format!("{name}={value}").parse();
                    assert!(setting.is_ok(), "{name}={value}");
                    taken.insert(value);
                }
            }
            let names = values.split(" | ").count();
            let expected = if names > 1 { names } else { 10 };
            assert!(taken.len() >= expected, "{name}: {taken:?}");
        }
    }
}
