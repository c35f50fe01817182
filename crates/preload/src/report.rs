//! Reports of the operations.
//!
//! The variable `FAULTLESS_REPORT` has one of two values:
//!
//! - The path of a file with the [layout](crate::layout) of a report. Each process counts its
//!   operations in a record of the file, by a shared mapping: a process that is killed keeps its
//!   counts. The library closes the file at once, so the program gets no descriptor.
//! - The identifier of a process. A process with this identifier prints [warnings](crate::warning)
//!   about refused operations, before `main` and at its end. `faultless run` sets its own
//!   identifier, which the program keeps. Programs that this process executes later print them,
//!   too, and children do not.
//!
//! A forked child claims a record of its own at its first count: the number of the record is in
//! memory that the kernel clears in the child (`MADV_WIPEONFORK`). A child that shares the memory
//! (`vfork`) uses the parent's record.

use crate::environment::number;
use crate::layout::{CLAIMED, Count, MARK, NAME, PROCESS, RECORDS, Reason, WORDS};
use crate::{page, stop, syscall};
use core::ffi::{CStr, c_int};
use core::ptr;
use core::sync::atomic::{AtomicPtr, AtomicU32, AtomicU64, Ordering};

const PROT_READ_WRITE: c_int = 3;
const MAP_SHARED: c_int = 1;
/// `MAP_PRIVATE` and `MAP_ANONYMOUS`.
const MEMORY: c_int = 0x22;
const MADV_WIPEONFORK: c_int = 18;
/// The bits of an error code in the word of a reason.
const CODE: u64 = 0xffff;

/// The record of a process.
type Record = [AtomicU64; WORDS];

/// The record of a process without a report.
static LOCAL: Record = [const { AtomicU64::new(0) }; WORDS];
/// The records of the report, or null without a report.
static SHARED: AtomicPtr<[Record; RECORDS]> = AtomicPtr::new(ptr::null_mut());
/// The number of this process's record, in memory that a forked child finds cleared. 0 before the
/// claim.
static OWN: AtomicPtr<AtomicU32> = AtomicPtr::new(ptr::null_mut());

/// Reads the value of the variable. Returns whether this process prints warnings.
pub fn start(value: &CStr) -> bool {
    if value.to_bytes().first() == Some(&b'/') {
        open(value);
        return false;
    }
    number(value.to_bytes()) == Some(syscall::getpid())
}

/// Maps the report, and claims a record. Without a valid report, the counts stay in the process.
fn open(path: &CStr) {
    let len = size_of::<[Record; RECORDS]>();
    let Ok(file) = syscall::open_writable(path) else { return };
    // SAFETY: the kernel chooses the place of both mappings, which no other code uses.
    let (records, own) = unsafe {
        (
            syscall::mmap(ptr::null_mut(), len, PROT_READ_WRITE, MAP_SHARED, file, 0),
            syscall::mmap(ptr::null_mut(), page::size(), PROT_READ_WRITE, MEMORY, -1, 0),
        )
    };
    let is_whole = syscall::size(file) == Ok(len);
    syscall::close(file);
    let (Ok(records), Ok(own), true) = (records, own, is_whole) else { return };
    // SAFETY: the mapping is as long as the file, which has records of atomic words. The memory of
    // the number is new and zero.
    let marked = unsafe {
        let head = &(*records.cast::<[Record; RECORDS]>())[0];
        head[0].load(Ordering::Relaxed) == MARK
            && syscall::madvise(own as usize, page::size(), MADV_WIPEONFORK).is_ok()
    };
    if marked {
        OWN.store(own.cast(), Ordering::Release);
        SHARED.store(records.cast(), Ordering::Release);
        record();
    }
}

/// Returns the record of this process.
fn record() -> &'static Record {
    // SAFETY: `open` has mapped both for ever.
    let (shared, own) =
        unsafe { (SHARED.load(Ordering::Acquire).as_ref(), OWN.load(Ordering::Acquire).as_ref()) };
    let (Some(records), Some(own)) = (shared, own) else { return &LOCAL };
    let known = own.load(Ordering::Relaxed);
    // A filter of the program could forbid the calls of a claim.
    if known == 0 && stop::is_filtered() {
        return &LOCAL;
    }
    let number = if known == 0 { claim(records, own) } else { known };
    records.get(number as usize).unwrap_or(&LOCAL)
}

/// Claims a record for a new process. Returns its number, or the number of records if all are in
/// use.
#[cold]
fn claim(records: &[Record; RECORDS], own: &AtomicU32) -> u32 {
    let number = records[0][CLAIMED].fetch_add(1, Ordering::Relaxed).saturating_add(1);
    let number = number.min(RECORDS as u64) as u32;
    // A thread that has claimed a record at the same time keeps the other record without counts.
    if let Err(other) = own.compare_exchange(0, number, Ordering::Relaxed, Ordering::Relaxed) {
        return other;
    }
    if let Some(record) = records.get(number as usize) {
        let [first, second] = syscall::process_name();
        record[NAME].store(first, Ordering::Relaxed);
        record[NAME + 1].store(second, Ordering::Relaxed);
        record[PROCESS].store(syscall::getpid() as u64, Ordering::Release);
    }
    number
}

/// Claims the record of this process, unless the process has a record.
pub fn prepare() {
    record();
}

/// Adds `number` to a count of this process.
pub fn add(count: Count, number: usize) {
    record()[count as usize].fetch_add(number as u64, Ordering::Relaxed);
}

/// Counts a refused operation. `code` is the error code of the kernel, or 0.
pub fn refuse(reason: Reason, code: c_int) {
    let next =
        |word: u64| Some(((word & !CODE) + CODE + 1) | u64::from(code.unsigned_abs()) & CODE);
    let word = &record()[reason as usize];
    // The update always has a new value.
    let _ = word.fetch_update(Ordering::Relaxed, Ordering::Relaxed, next);
}

/// Returns the number of refusals of this process for a reason, and the last error code or 0.
pub fn refusals(reason: Reason) -> (u64, u32) {
    let word = record()[reason as usize].load(Ordering::Relaxed);
    (word >> CODE.count_ones(), (word & CODE) as u32)
}
