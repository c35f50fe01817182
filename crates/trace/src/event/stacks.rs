//! The call stacks of a recording: a tree of frames, in which stacks share the frames of their
//! callers.

use super::{MAX_FRAMES, MAX_FUNCTIONS};

/// A call stack, by the number of its innermost frame in [`Stacks`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct StackId(u32);

impl StackId {
    /// The stack of an event without a recorded stack, and the caller of an outermost frame.
    pub const NONE: Self = Self(0);

    /// Creates the stack with this number: 0 for [`NONE`](Self::NONE), else one more than the index
    /// of its innermost frame.
    pub const fn new(number: u32) -> Self {
        Self(number)
    }

    /// Returns the number.
    pub const fn number(self) -> u32 {
        self.0
    }

    /// Returns the index of the innermost frame.
    pub fn frame(self) -> Option<usize> {
        (self.0 as usize).checked_sub(1)
    }
}

/// A function of a recorded program.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Function {
    /// The name, demangled; empty if unknown.
    pub name: String,
    /// The name of the program or library without its directory; in brackets for code of another
    /// origin (`[jit]`, `[vdso]`). Empty if unknown.
    pub module: String,
    /// The source file; empty if unknown.
    pub file: String,
}

impl Function {
    /// Returns the name, or the module if the name is unknown.
    pub fn label(&self) -> &str {
        match (&*self.name, &*self.module) {
            ("", "") => "[unknown]",
            ("", module) => module,
            (name, _) => name,
        }
    }
}

/// A frame of a call stack.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Frame {
    /// The stack that called this frame.
    pub caller: StackId,
    /// The index of the function in [`Stacks::functions`].
    pub function: u32,
    /// The line in the function's source file; 0 if unknown.
    pub line: u32,
}

/// The call stacks of a recording.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Stacks {
    /// The functions.
    pub functions: Vec<Function>,
    /// The frames, each after the frame that called it.
    pub frames: Vec<Frame>,
}

impl Stacks {
    /// Returns the frames of `stack` with their functions, from the innermost frame on.
    pub fn of(&self, stack: StackId) -> impl Iterator<Item = (&Frame, &Function)> {
        let frame = |stack: StackId| stack.frame().and_then(|at| self.frames.get(at));
        std::iter::successors(frame(stack), move |of| frame(of.caller))
            .map(|frame| (frame, &self.functions[frame.function as usize]))
    }

    /// Returns the reason for which the tables are wrong, if they are.
    pub(super) fn check(&self) -> Result<(), &'static str> {
        if self.functions.len() > MAX_FUNCTIONS || self.frames.len() > MAX_FRAMES {
            return Err("more functions or frames than the limit of a recording");
        }
        for (at, frame) in self.frames.iter().enumerate() {
            if frame.function as usize >= self.functions.len() {
                return Err("a frame names a function that does not exist");
            }
            if frame.caller.number() as usize > at {
                return Err("a frame lies before the frame that called it");
            }
        }
        Ok(())
    }
}
