//! The architecture of a recorded machine: the numbers of calls, and the size of a page.

use super::roles::Call;
use faultless::PAGE_SIZE;

/// The subtrahend for aarch64's addresses of 48 bits: 128 TiB, and a multiple of the largest huge
/// page, so that the last page is below the end of x86-64's addresses.
const FOLDED: u64 = (1 << 47) + (1 << 29);

/// The architecture of a recorded machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Architecture {
    /// x86-64.
    X86,
    /// aarch64.
    Arm,
}

impl Architecture {
    /// The architecture of this command.
    pub const OWN: Self = if cfg!(target_arch = "aarch64") { Self::Arm } else { Self::X86 };

    /// Returns the architecture that perf names `name`. A file without a name is of x86-64.
    ///
    /// # Errors
    /// Another architecture.
    pub fn of_perf(name: &str) -> Result<Self, String> {
        match name {
            "" | "x86_64" => Ok(Self::X86),
            "aarch64" => Ok(Self::Arm),
            other => Err(format!("recorded on {other}; x86-64 and aarch64 are understood")),
        }
    }

    /// Returns the numbers of mmap, mprotect, munmap, brk, mremap and madvise.
    const fn numbers(self) -> [(Call, u64); 6] {
        let [mmap, mprotect, munmap, brk, mremap, madvise] = match self {
            Self::X86 => [9, 10, 11, 12, 25, 28],
            Self::Arm => [222, 226, 215, 214, 216, 233],
        };
        [
            (Call::Mmap, mmap),
            (Call::Mprotect, mprotect),
            (Call::Munmap, munmap),
            (Call::Brk, brk),
            (Call::Mremap, mremap),
            (Call::Madvise, madvise),
        ]
    }

    /// Returns the call with this number, if it is supported.
    pub(super) fn call(self, number: u64) -> Option<Call> {
        self.numbers().into_iter().find(|entry| entry.1 == number).map(|entry| entry.0)
    }

    /// Returns the address in a recording for an address of this machine. The model has addresses
    /// of 47 bits, and aarch64 has programs and libraries above: these move below, to the addresses
    /// that Linux uses for the same purpose on x86-64.
    pub fn address(self, address: u64) -> u64 {
        if self == Self::Arm && address >= FOLDED { address - FOLDED } else { address }
    }

    /// Returns perf's filter of `raw_syscalls` for the supported calls.
    pub fn filter(self) -> String {
        self.numbers().map(|(_, number)| format!("id=={number}")).join("||")
    }

    /// Returns the size of a page, if `bounds` are the bits of the addresses and lengths of all
    /// mappings. perf does not record the size. The kernel maps small objects of one or two pages
    /// into each process (vdso, vvar), so the lengths differ in the lowest bit that they can have.
    pub fn page_size(self, bounds: u64) -> u32 {
        let common = 1_u64 << bounds.trailing_zeros().min(63);
        match self {
            Self::Arm if bounds != 0 => match common {
                ..0x4000 => PAGE_SIZE as u32,
                0x4000..0x1_0000 => 0x4000,
                _ => 0x1_0000,
            },
            _ => PAGE_SIZE as u32,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn page_size_divides_all_mappings() {
        let (x86, arm) = (Architecture::X86, Architecture::Arm);
        for (bounds, page) in [
            (0, 4096),
            (0x7f00_0000_1000 | 0x3000, 4096),
            (0x7f00_0000_2000, 4096),
            (0x7f00_0000_4000 | 0x8000, 0x4000),
            (0x7f00_0000_8000, 0x4000),
            (0x7f00_0001_0000 | 0x4_0000, 0x1_0000),
        ] {
            assert_eq!(arm.page_size(bounds), page, "{bounds:#x}");
            assert_eq!(x86.page_size(bounds), 4096);
        }
    }

    #[test]
    fn high_addresses_move_below_the_end_of_the_model() {
        let (x86, arm) = (Architecture::X86, Architecture::Arm);
        let last = (1 << 48) - 0x1000;
        assert!(arm.address(last) < faultless::USER_END);
        assert_eq!(arm.address(last) % (1 << 29), last % (1 << 29), "huge pages stay aligned");
        assert_eq!(arm.address(0xaaaa_0000_0000), 0x2aa9_e000_0000);
        assert_eq!((arm.address(0x40_0000), x86.address(last)), (0x40_0000, last));
    }

    #[test]
    fn each_architecture_has_its_own_numbers() {
        // From Linux: arch/x86/entry/syscalls/syscall_64.tbl and include/uapi/asm-generic/unistd.h.
        assert_eq!(Architecture::X86.call(9), Some(Call::Mmap));
        assert_eq!(Architecture::Arm.call(9), None);
        assert_eq!(Architecture::Arm.call(222), Some(Call::Mmap));
        assert_eq!(Architecture::Arm.call(214), Some(Call::Brk));
        assert_eq!(Architecture::Arm.call(215), Some(Call::Munmap));
        assert!(Architecture::of_perf("riscv64").is_err_and(|why| why.contains("riscv64")));
        #[cfg(target_arch = "x86_64")]
        for (call, number) in Architecture::OWN.numbers() {
            let known = match call {
                Call::Mmap => libc::SYS_mmap,
                Call::Mprotect => libc::SYS_mprotect,
                Call::Munmap => libc::SYS_munmap,
                Call::Brk => libc::SYS_brk,
                Call::Mremap => libc::SYS_mremap,
                Call::Madvise => libc::SYS_madvise,
            };
            assert_eq!(number, known as u64, "{call:?}");
        }
    }
}
