use super::*;
use crate::{Config, Native, NativeCpu};
use core::sync::atomic::{AtomicU8, Ordering};
use faultless::{Counter, Object, Shared};
use std::fs::OpenOptions;
use std::os::fd::FromRawFd;
use std::sync::Arc;

const PAGE: usize = PAGE_SIZE as usize;

/// Runs `test` on a machine, with an object of `file`.
fn with(file: File, test: impl FnOnce(&NativeCpu<'_, '_>, &Shared<Object>)) {
    let config = Config { memory_bytes: 4 << 20, ..Config::default() };
    let native = Native::new(config).unwrap();
    let store = Arc::new(HostFile::new(file).unwrap());
    let run = native.process().unwrap().run(|cpu| {
        let object = Object::of_store(cpu.cpu(), store, 1).unwrap();
        test(cpu, &object);
        Object::release(object, cpu.cpu());
        Ok(())
    });
    run.unwrap();
}

/// The first byte of a page of the object, as a call of the kernel reads it.
fn byte(cpu: &NativeCpu<'_, '_>, object: &Shared<Object>, page: u64) -> Result<u8, Errno> {
    object.read_page(cpu.cpu(), page, |at| {
        // SAFETY: a byte of the page, lent by the object.
        at.map_or(0, |at| unsafe { AtomicU8::from_ptr(at.cast_mut()) }.load(Ordering::Relaxed))
    })
}

fn set_byte(cpu: &NativeCpu<'_, '_>, object: &Shared<Object>, page: u64, value: u8) {
    let set = |at: *mut u8| {
        // SAFETY: as in `byte`.
        unsafe { AtomicU8::from_ptr(at) }.store(value, Ordering::Relaxed);
    };
    object.write_page(cpu.cpu(), page, set).unwrap();
}

/// Creates a file of `len` bytes, whose page `n` has bytes `n + 1`.
fn file(len: usize) -> File {
    let file = tempfile::tempfile().unwrap();
    file.write_all_at(&contents(len), 0).unwrap();
    file
}

fn contents(len: usize) -> Vec<u8> {
    (0..len).map(|at| (at / PAGE + 1) as u8).collect()
}

/// The same file, opened once more, in another way.
fn reopened(file: &File, options: &OpenOptions) -> File {
    options.open(format!("/proc/self/fd/{}", file.as_raw_fd())).unwrap()
}

fn bytes(file: &File) -> Vec<u8> {
    let mut bytes = vec![0; file.metadata().unwrap().len() as usize];
    file.read_exact_at(&mut bytes, 0).unwrap();
    bytes
}

#[test]
fn runs_longer_than_one_call_are_read_and_written_whole() {
    let (pages, len) = (150, 149 * PAGE + 77);
    let host = file(len);
    let store = host.try_clone().unwrap();
    with(store, |cpu, object| {
        assert_eq!(object.bytes(), len as u64);
        for page in (0..pages).rev() {
            assert_eq!(byte(cpu, object, page), Ok(page as u8 + 1));
        }
        assert_eq!(cpu.native().vm().totals().get(Counter::StoreRead), 5, "32 pages each");
        (0..pages).for_each(|page| set_byte(cpu, object, page, 200));
        assert_eq!(object.write_back(cpu.cpu(), 0..u64::MAX, |_| {}), Ok(pages));
        assert_eq!(object.sync(), Ok(()));
        let mut expected = contents(len);
        expected.iter_mut().step_by(PAGE).for_each(|byte| *byte = 200);
        assert_eq!(bytes(&host), expected);
    });
}

#[test]
fn more_parts_than_fit_in_a_call_are_moved_in_order() {
    let host = file(3 * PAGE);
    let store = HostFile::new(host.try_clone().unwrap()).unwrap();
    // Three bytes each, which no page boundary is a multiple of.
    let mut memory = vec![[0_u8; 3]; 3 * PAGE / 3];
    let parts = memory.iter_mut().map(|part| (part.as_mut_ptr(), part.len()));
    // SAFETY: parts of a borrowed vector.
    let read = unsafe { store.transfer(libc::preadv, 0, parts) };
    assert_eq!((read, memory.concat()), (Ok(3 * PAGE), contents(3 * PAGE)));
    memory.iter_mut().for_each(|part| part.reverse());
    let parts = memory.iter_mut().map(|part| (part.as_mut_ptr(), part.len()));
    // SAFETY: as above.
    let written = unsafe { store.transfer(libc::pwritev, 5, parts) };
    assert_eq!(written, Ok(3 * PAGE));
    assert_eq!(bytes(&host)[5..], memory.concat());
}

#[test]
fn a_transfer_continues_in_the_middle_of_a_part() {
    let mut memory = [0_u8; 12];
    let start: *mut u8 = memory.as_mut_ptr();
    let part = |at, len| libc::iovec { iov_base: start.wrapping_add(at).cast(), iov_len: len };
    let after = |moved| {
        let mut parts = [part(0, 3), part(3, 4), part(7, 5)];
        let left = skip(&mut parts, moved);
        let at = |part: &libc::iovec| (part.iov_base as usize - start as usize, part.iov_len);
        parts[..left].iter().map(at).collect::<Vec<_>>()
    };
    assert_eq!(after(0), [(0, 3), (3, 4), (7, 5)]);
    assert_eq!(after(2), [(2, 1), (3, 4), (7, 5)]);
    assert_eq!(after(3), [(3, 4), (7, 5)]);
    assert_eq!(after(9), [(9, 3)]);
    assert_eq!(after(12), []);
}

#[test]
fn a_file_truncated_by_another_party_reads_as_zeros() {
    let host = file(4 * PAGE);
    with(host.try_clone().unwrap(), |cpu, object| {
        host.set_len(PAGE as u64 + 1).unwrap();
        assert_eq!([0, 1, 2].map(|page| byte(cpu, object, page)), [Ok(1), Ok(2), Ok(0)]);
    });
}

#[test]
fn a_failed_write_returns_an_error_and_keeps_pages_dirty() {
    let host = file(2 * PAGE);
    let store = HostFile::new(reopened(&host, OpenOptions::new().read(true))).unwrap();
    assert_eq!(store.set_len(1), Err(Errno::EINVAL), "the error of ftruncate");
    assert_eq!(store.punch(0..1), Err(Errno::EIO));
    with(store.file, |cpu, object| {
        let mut seen = object.errors_seen();
        set_byte(cpu, object, 1, 99);
        assert_eq!(object.write_back(cpu.cpu(), 0..2, |_| {}), Err(Errno::EIO));
        assert!(object.is_dirty(cpu.cpu(), 1));
        assert_eq!(object.write_error(&mut seen), Some(Errno::EIO));
        assert_eq!(object.set_len(cpu.cpu(), 1), Err(Errno::EINVAL));
        assert_eq!(object.punch(cpu.cpu(), 1..2), Err(Errno::EIO));
        assert_eq!((byte(cpu, object, 1), object.bytes()), (Ok(99), 2 * PAGE_SIZE));
    });
    assert_eq!(bytes(&host), contents(2 * PAGE));
}

#[test]
fn a_failed_read_returns_an_error() {
    let host = file(2 * PAGE);
    with(reopened(&host, OpenOptions::new().write(true)), |cpu, object| {
        assert_eq!(byte(cpu, object, 0), Err(Errno::EIO));
    });
}

#[test]
fn irregular_files_are_refused() {
    let refused = |file: File| HostFile::new(file).unwrap_err();
    assert_eq!(refused(File::open("/dev/zero").unwrap()), Errno::EINVAL);
    assert_eq!(refused(File::open("/").unwrap()), Errno::EINVAL);
    let appends = reopened(&file(1), OpenOptions::new().read(true).append(true));
    assert_eq!(refused(appends), Errno::EINVAL);
}

#[test]
fn a_partial_write_error_reports_the_written_bytes() {
    let host = sealable(3 * PAGE as u64);
    with(host.try_clone().unwrap(), |cpu, object| {
        (0..3).for_each(|page| set_byte(cpu, object, page, 50 + page as u8));
        host.set_len(2 * PAGE_SIZE).unwrap();
        // SAFETY: a plain call.
        let sealed = unsafe { libc::fcntl(host.as_raw_fd(), libc::F_ADD_SEALS, libc::F_SEAL_GROW) };
        assert_eq!(sealed, 0);
        assert_eq!(object.write_back(cpu.cpu(), 0..3, |_| {}), Err(Errno::EPERM));
        let dirty = [0, 1, 2].map(|page| object.is_dirty(cpu.cpu(), page));
        assert_eq!(dirty, [false, false, true]);
        assert_eq!((bytes(&host)[0], bytes(&host)[PAGE]), (50, 51));
    });
}

/// Creates a file in memory that can be sealed.
fn sealable(len: u64) -> File {
    // SAFETY: a plain call; the name is a string.
    let fd = unsafe { libc::memfd_create(c"faultless".as_ptr(), libc::MFD_ALLOW_SEALING) };
    assert!(fd >= 0, "{}", Error::last_os_error());
    // SAFETY: a new descriptor without other users.
    let file = unsafe { File::from_raw_fd(fd) };
    file.set_len(len).unwrap();
    file
}

#[test]
fn errors_keep_their_numbers() {
    let of = |number| errno(&Error::from_raw_os_error(number));
    assert_eq!(of(libc::ENOSPC), Errno::ENOSPC);
    assert_eq!(of(libc::EFBIG), Errno::EFBIG);
    assert_eq!(of(libc::EDQUOT), Errno::EIO);
    assert_eq!(errno(&ErrorKind::WriteZero.into()), Errno::EIO);
}

#[test]
fn a_hole_is_zeros_with_and_without_holes_in_the_host() {
    let holes: [Option<i32>; 2] = [None, Some(libc::EOPNOTSUPP)];
    for refusal in holes {
        let host = file(40 * PAGE + 9);
        let store = HostFile::new(host.try_clone().unwrap()).unwrap();
        let punch = |pages: Range<u64>| match refusal {
            None => store.punch(pages),
            Some(errno) => store.punch_by(&pages, |_, _| Err(Error::from_raw_os_error(errno))),
        };
        let mut expected = contents(40 * PAGE + 9);
        assert_eq!(punch(1..38), Ok(()));
        expected[PAGE..38 * PAGE].fill(0);
        assert_eq!(bytes(&host), expected);
        assert_eq!(punch(39..50), Ok(()), "the length is unchanged");
        expected[39 * PAGE..].fill(0);
        assert_eq!(bytes(&host), expected);
        assert_eq!(punch(60..70), Ok(()));
        assert_eq!(punch(3..3), Ok(()));
        assert_eq!(bytes(&host), expected);
    }
    let store = HostFile::new(file(PAGE)).unwrap();
    let broken = store.punch_by(&(0..1), |_, _| Err(Error::from_raw_os_error(libc::ENOSPC)));
    assert_eq!(broken, Err(Errno::ENOSPC));
    assert_eq!(bytes(store.file()), contents(PAGE));
}
