//! What a system call is given, and what it is to the table of calls.

use crate::errno::Result;
use faultless_bare::arch::TrapFrame;

/// A call.
pub type Call = fn(Args<'_>) -> Result;
/// A call and its number.
pub type Entry = (u32, Call);

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
