//! The action of a process for a signal.

use super::set::{Set, UNBLOCKABLE, bit};
use faultless_bare::arch::user::Plain;
use linux_raw_sys::general as linux;

/// `SIG_DFL` and `SIG_IGN`, in place of a handler's address.
const DEFAULT: u64 = 0;
const IGNORE: u64 = 1;

/// The supported flags. Other flags are dropped, so that programs can detect the missing support.
const FLAGS: u64 = (linux::SA_NOCLDSTOP
    | linux::SA_NOCLDWAIT
    | linux::SA_SIGINFO
    | linux::SA_ONSTACK
    | linux::SA_RESTART
    | linux::SA_NODEFER
    | linux::SA_RESETHAND
    | linux::SA_EXPOSE_TAGBITS
    | linux::SA_RESTORER) as u64;

/// The action of a process for a signal, in Linux's layout.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct Action {
    handler: u64,
    flags: u64,
    /// The address to which a handler returns.
    pub(super) restorer: u64,
    /// The signals blocked in addition while the handler runs.
    mask: Set,
}
const _: () = assert!(size_of::<Action>() == size_of::<linux::kernel_sigaction>());

// SAFETY: integers without padding.
unsafe impl Plain for Action {}

/// The effect of an action.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Disposition {
    /// The signal is ignored.
    Ignore,
    /// The process ends.
    Terminate,
    /// The process stops.
    Stop,
    /// The handler at this address runs.
    Handle(u64),
}

impl Action {
    /// The action that ignores the signal.
    pub(super) const IGNORE: Self = Self { handler: IGNORE, flags: 0, restorer: 0, mask: 0 };

    /// The action without unsupported flags and unblockable signals.
    pub(crate) const fn sanitized(self) -> Self {
        Self { flags: self.flags & FLAGS, mask: self.mask & !UNBLOCKABLE, ..self }
    }

    /// Returns whether `flag` is set.
    pub const fn has(&self, flag: u32) -> bool {
        self.flags & flag as u64 != 0
    }

    /// Returns the effect of the action for `signal`.
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

    /// Returns whether the action is `SIG_IGN`.
    pub const fn is_ignored_on_purpose(&self) -> bool {
        self.handler == IGNORE
    }

    /// The action after `execve`, which removes handlers.
    pub(super) fn for_exec(&self) -> Self {
        Self {
            handler: if self.is_ignored_on_purpose() { IGNORE } else { DEFAULT },
            ..Self::default()
        }
    }

    /// Returns the signals blocked in addition by the handler of `signal`.
    pub(super) const fn blocks(&self, signal: u32) -> Set {
        if self.has(linux::SA_NODEFER) { self.mask } else { self.mask | bit(signal) }
    }
}
