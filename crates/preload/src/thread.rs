//! Creates the helper thread.
//!
//! The C library creates the thread, so calls that affect all threads, such as `setuid`, include
//! the thread. The thread blocks the program's signals: handlers run in the program's threads.

use crate::symbols::{self, Signals, ThreadStart};
use core::ptr;

/// The size in bytes of the stack, which also contains the program's thread-local variables.
const STACK: usize = 256 << 10;
const DETACHED: i32 = 1;
const SIG_SETMASK: i32 = 2;
/// The signals 32 to 34, which the C libraries use between threads.
const INTERNAL: u64 = 0b111 << 31;

/// Creates a detached thread that runs `run`. Returns whether the thread exists.
pub fn create(run: ThreadStart) -> bool {
    let (Some(create), Some(init), Some(set_stack), Some(set_detached), Some(signals)) = (
        symbols::thread_create(),
        symbols::attributes_init(),
        symbols::attributes_set_stack(),
        symbols::attributes_set_detached(),
        symbols::thread_signals(),
    ) else {
        return false;
    };
    let (mut attributes, mut thread, mut before) = ([0; 16], 0, [0; 16]);
    let mut blocked: Signals = [u64::MAX; 16];
    blocked[0] = !INTERNAL;
    // SAFETY: the buffers are larger than C's types. The new thread inherits the blocked signals,
    // and this thread's signals are restored.
    unsafe {
        if init(&mut attributes) != 0 || set_detached(&mut attributes, DETACHED) != 0 {
            return false;
        }
        // A refused size leaves the default.
        set_stack(&mut attributes, STACK);
        if signals(SIG_SETMASK, &blocked, &mut before) != 0 {
            return false;
        }
        let created = create(&mut thread, &attributes, run, ptr::null_mut()) == 0;
        let mut unused = [0; 16];
        signals(SIG_SETMASK, &before, &mut unused);
        created
    }
}
