//! The progress of a measurement.

/// Receives the progress of a measurement. The default methods ignore the progress; `()` is an
/// observer that ignores all.
pub trait Observer: Sync {
    /// Begins a part of the measurement, described by `what`.
    fn begin(&self, what: &str) {
        let _ = what;
    }

    /// Completes `steps` more steps.
    fn advance(&self, steps: u64) {
        let _ = steps;
    }

    /// Takes a remark for the user.
    fn note(&self, note: &str) {
        let _ = note;
    }
}

impl Observer for () {}
