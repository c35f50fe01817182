//! The embedded files: the kernel and the guest programs.

use crate::error::BootError;

include!(concat!(env!("OUT_DIR"), "/embedded.rs"));

/// The kernel's image.
pub(crate) fn kernel() -> Result<&'static [u8], BootError> {
    KERNEL.map_err(|why| BootError::NotBuilt { what: "the kernel".into(), why })
}

/// An embedded static Linux program.
#[derive(Clone, Copy, Debug)]
pub struct Guest {
    /// The name.
    pub name: &'static str,
    /// The file.
    pub bytes: &'static [u8],
}

/// Returns all embedded programs, or the reason for their absence.
pub fn guests() -> Result<impl Iterator<Item = Guest>, BootError> {
    let programs =
        GUESTS.map_err(|why| BootError::NotBuilt { what: "the guest programs".into(), why })?;
    Ok(programs.iter().map(|&(name, bytes)| Guest { name, bytes }))
}

/// Returns the embedded program of this name.
pub fn guest(name: &str) -> Result<Guest, BootError> {
    let found = guests()?.find(|guest| guest.name == name);
    found.ok_or_else(|| BootError::NotBuilt {
        what: format!("the guest program {name:?}"),
        why: "no guest program has this name",
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use object::read::elf::ElfFile64;
    use object::{Object, ObjectSection, ObjectSymbol, SymbolKind};
    use std::collections::BTreeSet;

    /// Functions that end the kernel after an unexpected allocation failure.
    const ABORTS: [&str; 4] = [
        "18handle_alloc_error",
        "rust_alloc_error_handler",
        "12handle_error",
        "17capacity_overflow",
    ];
    /// Functions that may reach an abort: the audit, which runs after the end of all programs, and
    /// the construction of the subsystem, before any program (which reserves its memory first).
    const MAY: [&str; 5] = [
        "9faultless5audit",
        "4task6finish5check",
        "9faultless2vm11Vm$LT$M$GT$3new",
        "14faultless_bare4boot6new_vm",
        "9faultless4sync6percpu15PerCpu",
    ];

    /// Functions, as places and names, upwards.
    fn functions(file: &ElfFile64<'_>) -> Vec<(u64, u64, String)> {
        let mut all: Vec<_> = file
            .symbols()
            .filter(|symbol| symbol.kind() == SymbolKind::Text && symbol.size() != 0)
            .map(|symbol| {
                let name = symbol.name().unwrap_or_default().to_owned();
                (symbol.address(), symbol.address() + symbol.size(), name)
            })
            .collect();
        all.sort();
        all
    }

    /// Returns the indices of the functions that call or jump to one of `targets`. Bytes that look
    /// like a call count too.
    fn callers(
        text: &[u8],
        base: u64,
        functions: &[(u64, u64, String)],
        targets: &BTreeSet<u64>,
    ) -> BTreeSet<usize> {
        let mut found = BTreeSet::new();
        for (at, bytes) in text.windows(6).enumerate() {
            let offset = match bytes {
                [0xe8 | 0xe9, ..] => 1,
                [0x0f, 0x80..=0x8f, ..] => 2,
                _ => continue,
            };
            let Some(relative) = text.get(at + offset..at + offset + 4) else { continue };
            let relative = i32::from_le_bytes(relative.try_into().expect("four bytes"));
            let from = base + at as u64;
            let to = (from + offset as u64 + 4).wrapping_add_signed(relative.into());
            let here = functions.partition_point(|function| function.0 <= from);
            if targets.contains(&to)
                && let Some(here) = here.checked_sub(1)
                && from < functions[here].1
            {
                found.insert(here);
            }
        }
        found
    }

    /// No kernel code reachable from a program aborts on an allocation failure, including the code
    /// of dependencies.
    #[test]
    fn no_kernel_allocation_aborts() {
        let Ok(image) = kernel() else { return };
        let file = ElfFile64::<object::Endianness>::parse(image).expect("an ELF file");
        let section = file.section_by_name(".text").expect("code");
        let (text, base) = (section.data().expect("the bytes of the code"), section.address());
        let functions = functions(&file);
        let named = |place: usize| functions[place].2.as_str();
        let is = |name: &str, parts: &[&str]| parts.iter().any(|part| name.contains(part));
        let aborting = functions.iter().filter(|function| is(&function.2, &ABORTS));
        let mut targets: BTreeSet<u64> = aborting.map(|function| function.0).collect();
        assert!(!targets.is_empty(), "no aborting function found: ABORTS has outdated names");
        loop {
            let callers = callers(text, base, &functions, &targets);
            let wrong: Vec<&str> = callers
                .iter()
                .map(|&place| named(place))
                .filter(|name| name.contains("faultless") && !name.contains("5alloc11collections"))
                .filter(|name| !is(name, &MAY))
                .collect();
            assert!(wrong.is_empty(), "these abort when the heap is exhausted: {wrong:#?}");
            // The standard library's own functions may abort, if they have no callers.
            let before = targets.len();
            let between = callers.iter().filter(|&&place| !is(named(place), &MAY));
            targets.extend(between.map(|&place| functions[place].0));
            if targets.len() == before {
                return;
            }
        }
    }
}
