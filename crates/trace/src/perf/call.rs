//! The event of a system call, from its arguments and its result.

use super::roles::Call;
use crate::event::{Backing, Kind, Prot};
use faultless::{PAGE_SIZE, page_down, page_up};

pub(super) const MAP_SHARED: u64 = 0x01;
const MAP_ANONYMOUS: u64 = 0x20;

/// Returns the event of a successful call; `None` if the call had no effect.
pub(super) fn call_event(
    call: Call,
    args: &[u64; 6],
    result: u64,
    named: Option<Backing>,
) -> Option<Kind> {
    let prot = Prot::from_bits_truncate(args[2] as u8);
    match call {
        Call::Mmap => {
            let (start, len) = pages(result, args[1]).filter(|_| result != 0)?;
            let shared = args[3] & MAP_SHARED != 0;
            let plain = match (args[3] & MAP_ANONYMOUS != 0, shared) {
                (true, false) => Backing::Anon,
                (true, true) => Backing::SharedAnon,
                (false, false) => Backing::File,
                (false, true) => Backing::SharedFile,
            };
            // A name provides more information only for memory mapped through a descriptor:
            // /dev/zero and memfd. The events of old kernels do not contain the flags.
            let backing = match named {
                Some(Backing::Anon | Backing::SharedAnon) if shared => Backing::SharedAnon,
                Some(Backing::Anon | Backing::SharedAnon) => Backing::Anon,
                _ => plain,
            };
            Some(Kind::Map { start, len, prot, flags: args[3] as u32, backing })
        }
        Call::Mprotect => {
            let (start, len) = pages(args[0], args[1])?;
            Some(Kind::Protect { start, len, prot })
        }
        Call::Munmap => {
            let (start, len) = pages(args[0], args[1])?;
            Some(Kind::Unmap { start, len })
        }
        Call::Madvise => {
            let (start, len) = pages(args[0], args[1])?;
            Some(Kind::Advise { start, len, advice: args[2] as u32 })
        }
        Call::Brk => (result != 0).then_some(Kind::Brk { end: result }),
        Call::Mremap => {
            let (new, new_len) = pages(result, args[2]).filter(|_| result != 0)?;
            let (old, _) = pages(args[0], PAGE_SIZE)?;
            let old_len = page_up(args[1])?;
            old.checked_add(old_len)?;
            Some(Kind::Remap { old, old_len, new, new_len, flags: args[3] as u32 })
        }
    }
}

/// Returns the pages of the `len` bytes from `start`: first byte and length; `None` for no bytes
/// and for ranges that the kernel would have refused.
pub(super) fn pages(start: u64, len: u64) -> Option<(u64, u64)> {
    let end = page_up(start.checked_add(len)?)?;
    let start = page_down(start);
    (end > start).then_some((start, end - start))
}

#[cfg(test)]
mod tests {
    use super::*;

    const READ_WRITE: u64 = 3;
    const MAP_PRIVATE: u64 = 2;

    /// Returns the backing of a mapping of a descriptor whose file has this name.
    fn backing(name: &[u8], flags: u64, knows_flags: bool) -> Backing {
        let named = Backing::named(name, knows_flags && flags & MAP_SHARED != 0);
        let args = [0, 2 * PAGE_SIZE, READ_WRITE, flags, 3, 0];
        match call_event(Call::Mmap, &args, 1 << 40, Some(named)) {
            Some(Kind::Map { backing, .. }) => backing,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn memfd_is_memory_and_not_a_file() {
        for name in [&b"/memfd:jit (deleted)"[..], b"/dev/zero (deleted)", b"/SYSV00000000"] {
            for knows_flags in [true, false] {
                let of = |flags| backing(name, flags, knows_flags);
                assert_eq!(of(MAP_SHARED), Backing::SharedAnon, "{knows_flags}");
                assert_eq!(of(MAP_PRIVATE), Backing::Anon, "{knows_flags}");
            }
        }
        assert_eq!(backing(b"/usr/memfd:x", MAP_SHARED, true), Backing::SharedFile);
        assert_eq!(backing(b"/usr/memfd:x", MAP_PRIVATE, true), Backing::File);
    }
}
