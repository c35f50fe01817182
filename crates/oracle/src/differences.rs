//! The intended differences between the subsystem and Linux, each with its reason. Every other
//! difference is a fault of the subsystem.

use crate::op::{Op, PAGE, Window};
use crate::seen::{Area, Outcome, Seen};
use faultless::USER_END;

/// A step in which the sides differ.
#[derive(Debug)]
pub struct Context<'a> {
    /// The operation.
    pub op: &'a Op,
    /// The window of the case.
    pub window: Window,
    /// The VMAs before.
    pub before: &'a [Area],
    /// The result on Linux.
    pub linux: &'a Seen,
    /// The result of the subsystem.
    pub ours: &'a Seen,
    /// Whether the subsystem prefaults.
    pub ahead: bool,
}

/// The effect of a known difference on the rest of its case.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Then {
    /// Both sides have the same state as without the difference.
    GoOn,
    /// The sides have different states: no later step is compared.
    Stop,
}

/// An intended difference.
#[derive(Debug)]
pub struct Difference {
    /// The name of the difference.
    pub name: &'static str,
    /// The reason for the difference.
    pub reason: &'static str,
    /// Checks whether the difference has occurred.
    pub applies: fn(&Context<'_>) -> bool,
    /// What then.
    pub then: Then,
}

/// All intended differences.
pub const DIFFERENCES: [Difference; 4] = [
    Difference {
        name: "mremap beyond the end of user space",
        reason: "both refuse the call; Linux returns EINVAL or EFAULT, depending on the pages \
                 that it has already unmapped",
        applies: refused_beyond_all_addresses,
        then: Then::Stop,
    },
    Difference {
        name: "mremap checks before it unmaps",
        reason: "a refused mremap changes nothing; Linux has already unmapped the target",
        applies: only_linux_lost_the_target,
        then: Then::Stop,
    },
    Difference {
        name: "no page of the object for a private copy",
        reason: "a store to a private mapping of a page that the object does not have creates a \
             private page of zeros; Linux first creates a page in the object, which mincore \
             reports",
        applies: only_linux_has_object_pages,
        then: Then::GoOn,
    },
    Difference {
        name: "prefaulted pages",
        reason: "a thread that touches private anonymous memory in sequence gets prefaulted \
             pages, which mincore reports",
        applies: some_were_mapped_ahead,
        then: Then::GoOn,
    },
];

/// Both sides refuse to move a range beyond all addresses, with one error or the other.
fn refused_beyond_all_addresses(context: &Context<'_>) -> bool {
    let one_of_both =
        |seen: &Seen| matches!(seen.outcome, Outcome::Refused(libc::EINVAL | libc::EFAULT));
    matches!(context.op, Op::Remap { len, .. } if *len > USER_END)
        && one_of_both(context.linux)
        && one_of_both(context.ours)
        && context.ours.areas == context.before
}

/// Both sides refuse a move, and only Linux has unmapped the target.
fn only_linux_lost_the_target(context: &Context<'_>) -> bool {
    let Op::Remap { flags, target, new_len, .. } = *context.op else {
        return false;
    };
    let (Outcome::Refused(linux), Outcome::Refused(ours)) =
        (&context.linux.outcome, &context.ours.outcome)
    else {
        return false;
    };
    let end = target.saturating_add(new_len);
    // This includes moves whose source was unmapped with the target; the error is `EFAULT` then.
    let left = context.linux.areas.iter().all(|area| area.end <= target || area.start >= end);
    linux == ours && flags & 2 != 0 && context.ours.areas == context.before && left
}

/// Every page present only on Linux is an object page.
fn only_linux_has_object_pages(context: &Context<'_>) -> bool {
    resident_but(context, |linux, area| linux && area.object != 0)
}

/// Every page present only in the subsystem is private anonymous. Pages present only on Linux are
/// object pages, as above.
fn some_were_mapped_ahead(context: &Context<'_>) -> bool {
    context.ahead && resident_but(context, |linux, area| linux == (area.object != 0))
}

/// Both sides report the present pages, and `may` permits each difference. `may` receives whether
/// Linux has the page, and the page's VMA.
fn resident_but(context: &Context<'_>, may: fn(bool, &Area) -> bool) -> bool {
    let (Outcome::Resident(errno, linux), Outcome::Resident(same_errno, ours)) =
        (&context.linux.outcome, &context.ours.outcome)
    else {
        return false;
    };
    let start = match *context.op {
        Op::Resident { addr, .. } => addr,
        _ => context.window.start(),
    };
    let fits = |linux: u8, at: u64| {
        let mut areas = context.before.iter();
        areas.any(|area| (area.start..area.end).contains(&at) && may(linux == 1, area))
    };
    errno == same_errno
        && context.linux.areas == context.ours.areas
        && (linux.iter().zip(ours).zip((start..).step_by(PAGE as usize)))
            .all(|((linux, ours), at)| linux == ours || fits(*linux, at))
}
