//! What a process does when a signal comes.

use super::set::{Set, UNBLOCKABLE, bit};
use faultless_bare::arch::user::Plain;
use linux_raw_sys::general as linux;

/// `SIG_DFL` and `SIG_IGN`, in place of a handler's address.
const DEFAULT: u64 = 0;
const IGNORE: u64 = 1;

/// The flags that mean something; others are forgotten, which is how programs find out.
const FLAGS: u64 = (linux::SA_NOCLDSTOP
    | linux::SA_NOCLDWAIT
    | linux::SA_SIGINFO
    | linux::SA_ONSTACK
    | linux::SA_RESTART
    | linux::SA_NODEFER
    | linux::SA_RESETHAND
    | linux::SA_EXPOSE_TAGBITS
    | linux::SA_RESTORER) as u64;

/// What a process does when a signal comes, in Linux's layout.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct Action {
    handler: u64,
    flags: u64,
    /// What a handler returns to.
    pub(super) restorer: u64,
    /// What is blocked besides while the handler runs.
    mask: Set,
}
const _: () = assert!(size_of::<Action>() == size_of::<linux::kernel_sigaction>());

// SAFETY: numbers, one after the other.
unsafe impl Plain for Action {}

/// What an action comes to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Disposition {
    /// Nothing.
    Ignore,
    /// The process ends.
    Terminate,
    /// The process stops.
    Stop,
    /// It runs its handler, at this address.
    Handle(u64),
}

impl Action {
    /// It is ignored.
    pub(super) const IGNORE: Self = Self { handler: IGNORE, flags: 0, restorer: 0, mask: 0 };

    /// Without what makes no sense: as a program set it.
    pub(crate) const fn sanitized(self) -> Self {
        Self { flags: self.flags & FLAGS, mask: self.mask & !UNBLOCKABLE, ..self }
    }

    /// Whether `flag` is set.
    pub const fn has(&self, flag: u32) -> bool {
        self.flags & flag as u64 != 0
    }

    /// What it comes to for `signal`.
    pub const fn disposition(&self, signal: u32) -> Disposition {
        match self.handler {
            IGNORE => Disposition::Ignore,
            DEFAULT => match signal {
                linux::SIGCHLD | linux::SIGURG | linux::SIGWINCH | linux::SIGCONT => {
                    Disposition::Ignore
                }
                linux::SIGSTOP | linux::SIGTSTP | linux::SIGTTIN | linux::SIGTTOU => {
                    Disposition::Stop
                }
                _ => Disposition::Terminate,
            },
            handler => Disposition::Handle(handler),
        }
    }

    /// Whether the program said that it ignores the signal.
    pub const fn is_ignored_on_purpose(&self) -> bool {
        self.handler == IGNORE
    }

    /// The same for a new program, which has no handlers.
    pub(super) fn for_exec(&self) -> Self {
        Self {
            handler: if self.is_ignored_on_purpose() { IGNORE } else { DEFAULT },
            ..Self::default()
        }
    }

    /// What is blocked besides while the handler of `signal` runs.
    pub(super) const fn blocks(&self, signal: u32) -> Set {
        if self.has(linux::SA_NODEFER) { self.mask } else { self.mask | bit(signal) }
    }
}
