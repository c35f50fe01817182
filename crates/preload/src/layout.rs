//! The layout of a report: the counts of each process, and the reasons for refused operations.
//!
//! The library writes a report, and `faultless run` reads it. Both contain this file.
//!
//! A report is a file of [`RECORDS`] records of [`WORDS`] words of 64 bits. Record 0 is the head:
//! the word 0 is [`MARK`], and the word [`CLAIMED`] the number of claimed records. Each further
//! record belongs to one program in one process: the identifier of the process, its name in two
//! words, a word for each [`Count`], and a word for each [`Reason`].

/// The number of words of a record.
pub const WORDS: usize = 32;
/// The number of records, with the head. Further processes are counted in the head alone.
pub const RECORDS: usize = 4096;
/// The first word of a report.
pub const MARK: u64 = u64::from_le_bytes(*b"faultls2");
/// The word of the head with the number of claimed records.
pub const CLAIMED: usize = 1;
/// The word of a record with the identifier of the process.
pub const PROCESS: usize = 0;
/// The first of two words with the name of the process, which zeros end.
pub const NAME: usize = 1;

/// The counts of one program in one process, by their words in the record.
#[repr(usize)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Count {
    /// Segments of text moved to huge pages of their file.
    CollapsedSegments = 3,
    /// Bytes in these segments.
    CollapsedBytes,
    /// Segments of text copied to huge pages.
    CopiedSegments,
    /// Bytes in these segments.
    CopiedBytes,
    /// Segments of libraries that were opened after the start of the program. They are contained in
    /// the counts above.
    LaterSegments,
    /// Blocks that were populated at once.
    PopulatedBlocks,
    /// Bytes in these blocks.
    PopulatedBytes,
    /// Blocks that were not populated, because they were resident.
    ResidentBlocks,
    /// Blocks that were watched, to be populated ahead of their use.
    WatchedBlocks,
    /// Blocks that were not watched, because too many blocks were watched already.
    UnwatchedBlocks,
    /// Bytes that were populated ahead of their use.
    PrefaultedBytes,
    /// Mappings of files that were populated.
    PopulatedFiles,
    /// Bytes in these mappings.
    PopulatedFileBytes,
}

/// The reasons for which an operation was refused, by their words in the record. A word contains
/// the number of refusals, times 65,536, and the last error code of the kernel.
#[repr(usize)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reason {
    /// The kernel does not collapse the text, and no copy is permitted.
    Collapse = 16,
    /// The text has private pages.
    Changed,
    /// Memory is accounted strictly.
    Accounting,
    /// No memory is available for a copy.
    Memory,
    /// The copy is not on huge pages.
    Small,
    /// New memory cannot be executed.
    Execution,
    /// The copy cannot be put in place of the text.
    Place,
    /// Text is not copied on this processor.
    Processor,
    /// The mappings of the process are not readable.
    Mappings,
    /// The process has too many segments.
    Segments,
    /// A block was not populated.
    Populate,
    /// A part of a block was not populated ahead of its use.
    Ahead,
    /// The helper thread does not exist.
    Thread,
    /// The kernel does not copy the text of an opened library.
    Opened,
    /// A mapping of a file was not populated.
    Files,
    /// No segment of text contains a huge page. The word has the size of a huge page in MiB in
    /// place of an error code.
    Short,
}

/// The remedy for text that is smaller than the huge pages of large base pages.
const SMALLER_PAGES: &str = "a kernel with base pages of 4 KiB has huge pages of 2 MiB";
/// The program has installed a seccomp filter. This code and the next two are not codes of the
/// kernel.
pub const FILTER: u32 = 0x8001;
/// The program uses `userfaultfd`.
pub const USER_FAULTS: u32 = 0x8002;
/// The block is larger than half of the available memory.
pub const TOO_LARGE: u32 = 0x8003;

/// `EINVAL`.
const INVALID: u32 = 22;
/// `ENOMEM`.
const NO_MEMORY: u32 = 12;

impl Reason {
    /// All reasons.
    pub const ALL: [Self; 16] = [
        Self::Collapse,
        Self::Changed,
        Self::Accounting,
        Self::Memory,
        Self::Small,
        Self::Execution,
        Self::Place,
        Self::Processor,
        Self::Mappings,
        Self::Segments,
        Self::Populate,
        Self::Ahead,
        Self::Thread,
        Self::Opened,
        Self::Files,
        Self::Short,
    ];

    /// Returns the error code of the kernel in the word of this reason, if the word has one.
    pub fn error(self, code: u32) -> Option<u32> {
        (code != 0 && code < FILTER && self != Self::Short).then_some(code)
    }

    /// Returns the name of the operation in `--apply`.
    pub fn operation(self) -> &'static str {
        match self {
            Self::Populate => "populate",
            Self::Ahead | Self::Thread => "prefault-ahead",
            Self::Files => "populate-files",
            _ => "huge-text",
        }
    }

    /// Returns the reason as text, and the remedy. `code` is the code in the word of this reason,
    /// or 0.
    pub fn text(self, code: u32) -> (&'static str, &'static str) {
        match code {
            FILTER => {
                return (
                    "the program has installed a seccomp filter, which could forbid the calls of \
                     the library",
                    "populate memory that the program allocates before the filter",
                );
            }
            USER_FAULTS => {
                return (
                    "the program provides the contents of pages by userfaultfd",
                    "remove this advice",
                );
            }
            TOO_LARGE => {
                return (
                    "the block is larger than half of the available memory",
                    "raise the limit of the program's control group, or use prefault-ahead",
                );
            }
            _ => {}
        }
        match self {
            Self::Collapse => (
                "the kernel has no huge pages for the program's file",
                "huge-text copies such text; tmpfs, and kernels with CONFIG_READ_ONLY_THP_FOR_FS, \
                 have such pages",
            ),
            Self::Changed => (
                "breakpoints or relocations have changed the text",
                "detach the debugger, or link without relocations in the text (-fPIC)",
            ),
            Self::Accounting => (
                "memory is accounted strictly, so text is not copied",
                "set vm.overcommit_memory to 0 or 1",
            ),
            Self::Memory => (
                "the kernel has no address space for a copy of the text",
                "raise the limit of the address space (ulimit -v)",
            ),
            Self::Small => (
                "the kernel has no huge pages for a copy of the text",
                "write madvise to /sys/kernel/mm/transparent_hugepage/enabled, remove no-thp, and \
                 check that memory is free",
            ),
            Self::Execution => (
                "the kernel forbids new executable memory",
                "permit such memory (SELinux: execmem), or use huge-text-collapse",
            ),
            Self::Opened => (
                "the kernel does not copy the text of a library that the program has opened",
                "permit process_vm_readv (seccomp)",
            ),
            Self::Place => ("the copy cannot take the place of the text", "raise vm.max_map_count"),
            Self::Processor => (
                "text is copied on x86-64 alone",
                "tmpfs, and kernels with CONFIG_READ_ONLY_THP_FOR_FS, have huge pages of files",
            ),
            Self::Short => match code {
                32 => ("no segment of text contains an aligned huge page of 32 MiB", SMALLER_PAGES),
                512 => {
                    ("no segment of text contains an aligned huge page of 512 MiB", SMALLER_PAGES)
                }
                _ => (
                    "no segment of text contains an aligned huge page of 2 MiB",
                    "align the text when you link the program: -Wl,-z,max-page-size=2097152",
                ),
            },
            Self::Mappings => ("/proc/self/maps is not readable", "mount /proc"),
            Self::Segments => {
                ("the process has more than 64 segments of text", "further segments stay in place")
            }
            Self::Populate | Self::Ahead => (
                "the kernel has not populated memory",
                match code {
                    INVALID => "Linux 5.14 or newer is required",
                    NO_MEMORY => "raise the limit of the program's memory, or use a larger size",
                    _ => "permit madvise with MADV_POPULATE_WRITE (seccomp)",
                },
            ),
            Self::Files => (
                "the kernel has not populated a mapped file",
                match code {
                    INVALID => "Linux 5.14 or newer, and an ordinary file, are required",
                    NO_MEMORY => "raise the limit of the program's memory, or use a larger size",
                    _ => "permit madvise with MADV_POPULATE_READ (seccomp)",
                },
            ),
            Self::Thread => (
                "the helper thread cannot be created",
                "raise the limit of threads (ulimit -u), or link the program with threads",
            ),
        }
    }
}
