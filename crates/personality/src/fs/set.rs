//! Sets of CPUs and of memory nodes as texts.

use core::fmt::{self, Display};

/// A list of ranges: `0-2,5`.
pub(super) fn list(set: u64) -> impl Display {
    fmt::from_fn(move |text| {
        let has = |bit: u32| bit < u64::BITS && set & 1 << bit != 0;
        let mut comma = "";
        let mut bit = 0;
        while bit < u64::BITS {
            if !has(bit) {
                bit += 1;
                continue;
            }
            let first = bit;
            while has(bit + 1) {
                bit += 1;
            }
            write!(text, "{comma}{first}")?;
            if bit > first {
                write!(text, "-{bit}")?;
            }
            comma = ",";
            bit += 1;
        }
        Ok(())
    })
}

/// A mask of `bits` bits, in words of 32 from the highest on: `0f` for four of eight.
pub(super) fn mask(set: u64, bits: u32) -> impl Display {
    const WORD: u32 = u32::BITS;
    fmt::from_fn(move |text| {
        let mut comma = "";
        for first in (0..bits).step_by(WORD as usize).rev() {
            let word = set.checked_shr(first).unwrap_or(0) as u32;
            let digits = (bits - first).min(WORD).div_ceil(4) as usize;
            write!(text, "{comma}{word:0digits$x}")?;
            comma = ",";
        }
        Ok(())
    })
}
