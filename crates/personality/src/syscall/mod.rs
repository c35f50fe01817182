//! System calls, by Linux's numbers, with Linux's errors.
//!
//! One file a family of calls; each call is a function of its [`Args`]. What is not there returns `ENOSYS`
//! and is named on the report once.

pub mod across;
pub mod file;
pub mod futex;
pub mod ipc;
pub mod memory;
pub mod process;
pub mod sched;
pub mod signal;
pub mod system;
pub mod time;

pub use crate::errno::{Errno, Result};

use core::sync::atomic::{AtomicU64, Ordering};
use faultless_bare::arch::TrapFrame;
use faultless_bare::percpu;
use faultless_bare::report;
use linux_raw_sys::general as nr;

/// `vector` of a frame that is of a system call; its `error` is then the call's number.
pub const SYSTEM_CALL: u64 = 256;

/// The arguments of a call, as the program left them in its registers.
#[derive(Debug)]
pub struct Args<'a> {
    /// All registers: clone, sigreturn and execve need, or change, them.
    pub frame: &'a mut TrapFrame,
}

impl Args<'_> {
    /// The first argument; and so on.
    #[inline(always)]
    pub fn a(&self) -> u64 {
        self.frame.rdi
    }
    /// The second.
    #[inline(always)]
    pub fn b(&self) -> u64 {
        self.frame.rsi
    }
    /// The third.
    #[inline(always)]
    pub fn c(&self) -> u64 {
        self.frame.rdx
    }
    /// The fourth.
    #[inline(always)]
    pub fn d(&self) -> u64 {
        self.frame.r10
    }
    /// The fifth.
    #[inline(always)]
    pub fn e(&self) -> u64 {
        self.frame.r8
    }
    /// The sixth.
    #[inline(always)]
    pub fn f(&self) -> u64 {
        self.frame.r9
    }
}

/// Serves the system call of `frame`, whose `rax` is its number.
pub fn dispatch(frame: &mut TrapFrame) {
    let number = frame.rax;
    let result = call(number as u32, Args { frame });
    frame.rax = match result {
        Ok(value) => value,
        Err(errno) => {
            if errno.0 >= Errno::RESTART.0 {
                // No program sees it: delivery makes something else of it.
                percpu::this().attention.store(true, Ordering::Relaxed);
            }
            (-i64::from(errno.0)) as u64
        }
    };
}

fn call(number: u32, args: Args<'_>) -> Result {
    match number {
        // Memory
        nr::__NR_mmap => memory::mmap(args),
        nr::__NR_munmap => memory::munmap(args),
        nr::__NR_mprotect => memory::mprotect(args),
        nr::__NR_mremap => memory::mremap(args),
        nr::__NR_madvise => memory::madvise(args),
        nr::__NR_brk => memory::brk(args),
        nr::__NR_mincore => memory::mincore(args),
        nr::__NR_msync => memory::msync(args),
        nr::__NR_mlock => memory::mlock(args),
        nr::__NR_mlock2 => memory::mlock2(args),
        nr::__NR_munlock => memory::munlock(args),
        nr::__NR_mlockall => memory::mlockall(args),
        nr::__NR_munlockall => memory::munlockall(args),
        nr::__NR_remap_file_pages => memory::remap_file_pages(args),
        nr::__NR_process_vm_readv => across::process_vm_readv(args),
        nr::__NR_process_vm_writev => across::process_vm_writev(args),

        nr::__NR_shmget => ipc::shm::shmget(args),
        nr::__NR_shmat => ipc::shm::shmat(args),
        nr::__NR_shmdt => ipc::shm::shmdt(args),
        nr::__NR_shmctl => ipc::shm::shmctl(args),
        nr::__NR_semget => ipc::sem::semget(args),
        nr::__NR_semop => ipc::sem::semop(args),
        nr::__NR_semtimedop => ipc::sem::semtimedop(args),
        nr::__NR_semctl => ipc::sem::semctl(args),
        nr::__NR_msgget => ipc::msg::msgget(args),
        nr::__NR_msgsnd => ipc::msg::msgsnd(args),
        nr::__NR_msgrcv => ipc::msg::msgrcv(args),
        nr::__NR_msgctl => ipc::msg::msgctl(args),

        // Processes and threads
        nr::__NR_getpid => process::getpid(args),
        nr::__NR_gettid => process::gettid(args),
        nr::__NR_getppid => process::getppid(args),
        nr::__NR_fork => process::fork(args),
        nr::__NR_vfork => process::vfork(args),
        nr::__NR_clone => process::clone(args),
        nr::__NR_clone3 => process::clone3(args),
        nr::__NR_unshare => process::unshare(args),
        nr::__NR_execve => process::execve(args),
        nr::__NR_execveat => process::execveat(args),
        nr::__NR_exit => process::exit(&args),
        nr::__NR_exit_group => process::exit_group(&args),
        nr::__NR_wait4 => process::wait4(args),
        nr::__NR_waitid => process::waitid(args),
        nr::__NR_getpgid => process::getpgid(args),
        nr::__NR_getpgrp => process::getpgrp(args),
        nr::__NR_getsid => process::getsid(args),
        nr::__NR_setpgid => process::setpgid(args),
        nr::__NR_setsid => process::setsid(args),
        nr::__NR_set_tid_address => process::set_tid_address(args),
        nr::__NR_set_robust_list => process::set_robust_list(args),
        nr::__NR_get_robust_list => process::get_robust_list(args),
        nr::__NR_arch_prctl => process::arch_prctl(args),
        nr::__NR_prctl => process::prctl(args),
        nr::__NR_futex => futex::futex(args),
        nr::__NR_sched_yield => sched::sched_yield(args),
        nr::__NR_sched_setaffinity => sched::sched_setaffinity(args),
        nr::__NR_sched_getaffinity => sched::sched_getaffinity(args),
        nr::__NR_sched_setscheduler => sched::sched_setscheduler(args),
        nr::__NR_sched_getscheduler => sched::sched_getscheduler(args),
        nr::__NR_sched_setparam => sched::sched_setparam(args),
        nr::__NR_sched_getparam => sched::sched_getparam(args),
        nr::__NR_sched_getattr => sched::sched_getattr(args),
        nr::__NR_sched_setattr => sched::sched_setattr(args),
        nr::__NR_ioprio_get => sched::ioprio_get(args),
        nr::__NR_ioprio_set => sched::ioprio_set(args),
        nr::__NR_sched_get_priority_max => sched::sched_get_priority(args, 99),
        nr::__NR_sched_get_priority_min => sched::sched_get_priority(args, 1),
        nr::__NR_sched_rr_get_interval => sched::sched_rr_get_interval(args),
        nr::__NR_getpriority => sched::getpriority(args),
        nr::__NR_setpriority => sched::setpriority(args),
        nr::__NR_getcpu => sched::getcpu(args),

        // Signals
        nr::__NR_rt_sigaction => signal::rt_sigaction(args),
        nr::__NR_rt_sigprocmask => signal::rt_sigprocmask(args),
        nr::__NR_rt_sigpending => signal::rt_sigpending(args),
        nr::__NR_rt_sigsuspend => signal::rt_sigsuspend(args),
        nr::__NR_rt_sigtimedwait => signal::rt_sigtimedwait(args),
        nr::__NR_rt_sigqueueinfo => signal::rt_sigqueueinfo(args),
        nr::__NR_rt_tgsigqueueinfo => signal::rt_tgsigqueueinfo(args),
        nr::__NR_rt_sigreturn => signal::rt_sigreturn(args),
        nr::__NR_sigaltstack => signal::sigaltstack(args),
        nr::__NR_pause => signal::pause(args),
        nr::__NR_kill => signal::kill(args),
        nr::__NR_tkill => signal::tkill(args),
        nr::__NR_tgkill => signal::tgkill(args),
        // Its number is seen only if a program asks for it: no call is made again under another.
        nr::__NR_restart_syscall => Err(Errno::EINTR),

        // Time
        nr::__NR_clock_gettime => time::clock_gettime(args),
        nr::__NR_clock_getres => time::clock_getres(args),
        nr::__NR_clock_settime => time::clock_settime(args),
        nr::__NR_adjtimex => time::adjtimex(args),
        nr::__NR_clock_adjtime => time::clock_adjtime(args),
        nr::__NR_gettimeofday => time::gettimeofday(args),
        nr::__NR_time => time::time(args),
        nr::__NR_nanosleep => time::nanosleep(args),
        nr::__NR_clock_nanosleep => time::clock_nanosleep(args),
        nr::__NR_getitimer => time::getitimer(args),
        nr::__NR_setitimer => time::setitimer(args),
        nr::__NR_alarm => time::alarm(args),
        nr::__NR_timer_create => time::timer_create(args),
        nr::__NR_timer_settime => time::timer_settime(args),
        nr::__NR_timer_gettime => time::timer_gettime(args),
        nr::__NR_timer_getoverrun => time::timer_getoverrun(args),
        nr::__NR_timer_delete => time::timer_delete(args),

        // Files
        nr::__NR_open => file::open::open(args),
        nr::__NR_openat => file::open::openat(args),
        nr::__NR_creat => file::open::creat(args),
        nr::__NR_openat2 => file::open::openat2(args),
        nr::__NR_pipe => file::open::pipe(args),
        nr::__NR_pipe2 => file::open::pipe2(args),
        nr::__NR_eventfd => file::open::eventfd(args),
        nr::__NR_eventfd2 => file::open::eventfd2(args),
        nr::__NR_epoll_create => file::open::epoll_create(args),
        nr::__NR_epoll_create1 => file::open::epoll_create1(args),
        nr::__NR_timerfd_create => file::special::timerfd_create(args),
        nr::__NR_timerfd_settime => file::special::timerfd_settime(args),
        nr::__NR_timerfd_gettime => file::special::timerfd_gettime(args),
        nr::__NR_signalfd => file::special::signalfd(args),
        nr::__NR_signalfd4 => file::special::signalfd4(args),
        nr::__NR_memfd_create => file::open::memfd_create(args),
        nr::__NR_read => file::rw::read(args),
        nr::__NR_write => file::rw::write(args),
        nr::__NR_pread64 => file::rw::pread(args),
        nr::__NR_pwrite64 => file::rw::pwrite(args),
        nr::__NR_readv => file::rw::readv(args),
        nr::__NR_writev => file::rw::writev(args),
        nr::__NR_preadv => file::rw::preadv(args),
        nr::__NR_pwritev => file::rw::pwritev(args),
        nr::__NR_preadv2 => file::rw::preadv2(args),
        nr::__NR_pwritev2 => file::rw::pwritev2(args),
        nr::__NR_lseek => file::rw::lseek(args),
        nr::__NR_sendfile => file::rw::sendfile(args),
        nr::__NR_copy_file_range => file::rw::copy_file_range(args),
        nr::__NR_splice => file::rw::splice(args),
        nr::__NR_vmsplice => file::rw::vmsplice(args),
        nr::__NR_tee => file::rw::tee(args),
        nr::__NR_truncate => file::range::truncate(args),
        nr::__NR_ftruncate => file::range::ftruncate(args),
        nr::__NR_fallocate => file::range::fallocate(args),
        nr::__NR_fsync => file::range::sync(args),
        nr::__NR_fdatasync => file::range::sync(args),
        nr::__NR_syncfs => file::range::sync(args),
        nr::__NR_sync_file_range => file::range::sync(args),
        nr::__NR_fadvise64 => file::range::advise(args),
        nr::__NR_readahead => file::range::readahead(args),
        nr::__NR_close => file::descriptor::close(args),
        nr::__NR_close_range => file::descriptor::close_range(args),
        nr::__NR_dup => file::descriptor::dup(args),
        nr::__NR_dup2 => file::descriptor::dup2(args),
        nr::__NR_dup3 => file::descriptor::dup3(args),
        nr::__NR_fcntl => file::descriptor::fcntl(args),
        nr::__NR_flock => file::lock::flock(args),
        nr::__NR_ioctl => file::descriptor::control(args),
        nr::__NR_stat => file::meta::stat(args),
        nr::__NR_lstat => file::meta::lstat(args),
        nr::__NR_fstat => file::meta::fstat(args),
        nr::__NR_newfstatat => file::meta::fstatat(args),
        nr::__NR_statx => file::meta::statx(args),
        nr::__NR_access => file::meta::access(args),
        nr::__NR_faccessat => file::meta::faccessat(args),
        nr::__NR_faccessat2 => file::meta::faccessat2(args),
        nr::__NR_chmod => file::meta::chmod(args),
        nr::__NR_fchmod => file::meta::fchmod(args),
        nr::__NR_fchmodat => file::meta::fchmodat(args),
        nr::__NR_fchmodat2 => file::meta::fchmodat2(args),
        nr::__NR_chown => file::meta::chown(args),
        nr::__NR_lchown => file::meta::lchown(args),
        nr::__NR_fchown => file::meta::fchown(args),
        nr::__NR_fchownat => file::meta::fchownat(args),
        nr::__NR_utimensat => file::meta::utimensat(args),
        nr::__NR_utimes => file::meta::utimes(args),
        nr::__NR_futimesat => file::meta::futimesat(args),
        nr::__NR_utime => file::meta::utime(args),
        nr::__NR_statfs => file::meta::statfs(args),
        nr::__NR_fstatfs => file::meta::fstatfs(args),
        nr::__NR_mkdir => file::names::mkdir(args),
        nr::__NR_mkdirat => file::names::mkdirat(args),
        nr::__NR_mknod => file::names::mknod(args),
        nr::__NR_mknodat => file::names::mknodat(args),
        nr::__NR_symlink => file::names::symlink(args),
        nr::__NR_symlinkat => file::names::symlinkat(args),
        nr::__NR_link => file::names::link(args),
        nr::__NR_linkat => file::names::linkat(args),
        nr::__NR_unlink => file::names::unlink(args),
        nr::__NR_unlinkat => file::names::unlinkat(args),
        nr::__NR_rmdir => file::names::rmdir(args),
        nr::__NR_rename => file::names::rename(args),
        nr::__NR_renameat => file::names::renameat(args),
        nr::__NR_renameat2 => file::names::renameat2(args),
        nr::__NR_readlink => file::names::readlink(args),
        nr::__NR_readlinkat => file::names::readlinkat(args),
        nr::__NR_getcwd => file::names::getcwd(args),
        nr::__NR_chdir => file::names::chdir(args),
        nr::__NR_fchdir => file::names::fchdir(args),
        nr::__NR_chroot => file::names::chroot(args),
        nr::__NR_umask => file::names::umask(args),
        nr::__NR_getdents => file::names::getdents(args),
        nr::__NR_getdents64 => file::names::getdents64(args),
        nr::__NR_mount => file::names::mount(args),
        nr::__NR_umount2 => file::names::mount(args),
        nr::__NR_poll => file::poll::poll(args),
        nr::__NR_ppoll => file::poll::ppoll(args),
        nr::__NR_select => file::poll::select(args),
        nr::__NR_pselect6 => file::poll::pselect(args),
        nr::__NR_epoll_ctl => file::poll::epoll_ctl(args),
        nr::__NR_epoll_wait => file::poll::epoll_wait(args),
        nr::__NR_epoll_pwait => file::poll::epoll_pwait(args),
        nr::__NR_epoll_pwait2 => file::poll::epoll_pwait2(args),
        nr::__NR_socketpair => file::socket::socketpair(args),
        nr::__NR_sendto => file::socket::sendto(args),
        nr::__NR_recvfrom => file::socket::recvfrom(args),
        nr::__NR_sendmsg => file::socket::sendmsg(args),
        nr::__NR_recvmsg => file::socket::recvmsg(args),
        nr::__NR_shutdown => file::socket::shutdown(args),
        nr::__NR_sync => Ok(0),

        // The system
        nr::__NR_uname => system::uname(args),
        nr::__NR_sysinfo => system::sysinfo(args),
        nr::__NR_getrandom => system::getrandom(args),
        nr::__NR_prlimit64 => system::prlimit64(args),
        nr::__NR_getrlimit => system::getrlimit(args),
        nr::__NR_setrlimit => system::setrlimit(args),
        nr::__NR_getrusage => system::getrusage(args),
        nr::__NR_times => system::times(args),
        nr::__NR_getresuid | nr::__NR_getresgid => system::getresuid(args),
        nr::__NR_getgroups => system::getgroups(args),
        nr::__NR_capget => system::capget(args),
        nr::__NR_membarrier => system::membarrier(args),
        nr::__NR_personality => system::personality(args),
        nr::__NR_reboot => system::reboot(args),
        // Everybody is root, and stays it.
        nr::__NR_getuid | nr::__NR_geteuid | nr::__NR_getgid | nr::__NR_getegid => Ok(0),
        nr::__NR_setuid | nr::__NR_setgid | nr::__NR_setreuid | nr::__NR_setregid => Ok(0),
        nr::__NR_setresuid | nr::__NR_setresgid | nr::__NR_setgroups | nr::__NR_capset => Ok(0),
        nr::__NR_setfsuid | nr::__NR_setfsgid => Ok(0),
        // Nobody needs it told that it is not there: glibc asks each time, and does without.
        nr::__NR_rseq => Err(Errno::ENOSYS),

        _ => missing(number),
    }
}

/// Numbers that were named already, as bits; one more for all beyond.
static NAMED: [AtomicU64; 9] = [const { AtomicU64::new(0) }; 9];

#[cold]
fn missing(number: u32) -> Result {
    let at = number.min(512);
    let bit = 1 << (at % 64);
    if NAMED[(at / 64) as usize].fetch_or(bit, Ordering::Relaxed) & bit == 0 {
        report!("message system call {number} is not there");
    }
    Err(Errno::ENOSYS)
}
