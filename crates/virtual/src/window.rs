//! The steady window of a run: the time in which all CPUs work, and no CPU starts up.
//!
//! A run of many CPUs has a start, in which CPUs take their first frames and tables and conflict
//! until they work apart, and an end, in which some CPUs are done and leave the machine to the
//! remaining CPUs. Figures of the steady state exclude both. A CPU is *measured* while
//!
//! - it has completed its warm-up: a number of calls and faults;
//! - it works: it is not off the books, and its program does not wait for another CPU;
//! - it has not ended its work.
//!
//! The window is open while each CPU of the crew is measured. It opens when the last CPU completes
//! its warm-up, and closes as soon as one CPU ends its work. All CPUs are therefore measured in the
//! same stretch of simulated time, and each competes with all other CPUs from the first to the last
//! moment. In a program of rounds the window closes when the first CPU has done its part of a
//! round, and opens again when all CPUs are in the next round; its stretches add up.
//!
//! # Clocks
//!
//! Each CPU has a clock, and CPUs run in the order of their clocks. The clock of the CPU that opens
//! or closes the window is the time of the change. The clocks of the others differ at this moment:
//! a CPU runs ahead by at most a call without lines of other CPUs, and a wait for a line or for
//! another CPU is charged at its end. Calls and charges are counted in the order of execution. A
//! call that overlaps with an end of the window counts at its completion. The window therefore has
//! the ends of some calls that began before it, and lacks the ends of those in progress when it
//! closes: less than one call of each CPU for each stretch, in both directions.
//!
//! The measurement takes no simulated time and moves no line, so a run takes the same course with
//! and without a window.

use crate::accounts::Accounts;
use crate::profile::Time;
use core::mem;

/// The counts of a machine at a moment.
#[derive(Clone, Debug)]
pub(crate) struct Moment {
    pub(crate) at: Time,
    pub(crate) accounts: Accounts,
    pub(crate) counters: Vec<(&'static str, u64)>,
}

/// The counts of a window, and of the calls before it. Times are in picoseconds.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Steady {
    /// The CPUs of the crew.
    pub cpus: usize,
    /// Calls and faults of each CPU in its warm-up.
    pub warm_up: u64,
    /// The length of the window.
    pub length: Time,
    /// Calls and faults completed in the window.
    pub calls: u64,
    /// Calls and faults completed in the whole run, except work off the books.
    pub all_calls: u64,
    /// The fewest of these calls and faults of a CPU.
    pub fewest: u64,
    /// The activity of all CPUs in the window.
    pub accounts: Accounts,
    /// The subsystem's counters in the window, by name.
    pub counters: Vec<(&'static str, u64)>,
    /// The time of each call of the warm-up, by its number on its CPU: from the completion of the
    /// preceding call to its own completion, without work off the books and waits of the program.
    /// Each is the sum over all CPUs.
    pub starts: Vec<Time>,
}

/// The progress of a CPU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Stage {
    #[default]
    Absent,
    Begun,
    Ended,
}

/// A CPU of the crew.
#[derive(Clone, Copy, Debug, Default)]
struct Member {
    stage: Stage,
    aside: bool,
    /// Whether its program waits for another CPU.
    waiting: bool,
    /// Completed calls and faults.
    calls: u64,
    /// The time of its last change or completed call.
    since: Time,
    /// The time of its work between its last completed call and `since`.
    worked: Time,
}

impl Member {
    fn works(&self) -> bool {
        self.stage == Stage::Begun && !self.aside && !self.waiting
    }

    fn is_measured(&self, warm_up: u64) -> bool {
        self.works() && self.calls >= warm_up
    }

    /// Advances to `now`.
    fn advance(&mut self, now: Time) {
        if self.works() {
            self.worked += now - self.since;
        }
        self.since = now;
    }
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Window {
    members: Box<[Member]>,
    /// CPUs that are not measured.
    missing: usize,
    opened: Option<Moment>,
    steady: Steady,
}

impl Window {
    /// Creates a closed window for a crew of the first `cpus` CPUs.
    pub(crate) fn new(cpus: usize, warm_up: u64) -> Self {
        let steady = Steady { cpus, warm_up, ..Steady::default() };
        Self { members: vec![Member::default(); cpus].into(), missing: cpus, opened: None, steady }
    }

    pub(crate) fn is_open(&self) -> bool {
        self.opened.is_some()
    }

    /// Returns whether the window must open or close now.
    pub(crate) fn is_due(&self) -> bool {
        (self.missing == 0) != self.is_open()
    }

    /// Opens or closes the window.
    pub(crate) fn turn(&mut self, now: Moment) {
        let Some(begin) = self.opened.take() else {
            self.opened = Some(now);
            return;
        };
        let steady = &mut self.steady;
        steady.length += now.at.saturating_sub(begin.at);
        steady.accounts += now.accounts.since(&begin.accounts);
        steady.counters.resize(now.counters.len(), ("", 0));
        for ((sum, now), before) in steady.counters.iter_mut().zip(now.counters).zip(begin.counters)
        {
            *sum = (now.0, sum.1 + now.1.saturating_sub(before.1));
        }
    }

    /// Returns the counts so far.
    pub(crate) fn steady(&self) -> Steady {
        let fewest = self.members.iter().map(|member| member.calls).min().unwrap_or(0);
        Steady { fewest, ..self.steady.clone() }
    }

    /// Applies `change` to a CPU of the crew at `now`.
    fn change(&mut self, cpu: usize, now: Time, change: impl FnOnce(&mut Member)) {
        let Some(member) = self.members.get_mut(cpu) else { return };
        let before = member.is_measured(self.steady.warm_up);
        member.advance(now);
        change(member);
        match (before, member.is_measured(self.steady.warm_up)) {
            (false, true) => self.missing -= 1,
            (true, false) => self.missing += 1,
            _ => {}
        }
    }

    /// Begins the work of a CPU.
    pub(crate) fn begin(&mut self, cpu: usize, now: Time) {
        self.change(cpu, now, |member| member.stage = Stage::Begun);
    }

    /// Ends the work of a CPU.
    pub(crate) fn end(&mut self, cpu: usize, now: Time) {
        self.change(cpu, now, |member| member.stage = Stage::Ended);
    }

    /// Begins or ends work off the books. Waits in this work have ended, too.
    pub(crate) fn set_aside(&mut self, cpu: usize, now: Time, aside: bool) {
        self.change(cpu, now, |member| (member.aside, member.waiting) = (aside, false));
    }

    /// Begins a wait of the program for another CPU, which ends with the next call or fault.
    pub(crate) fn wait(&mut self, cpu: usize, now: Time) {
        self.change(cpu, now, |member| member.waiting = true);
    }

    /// Begins a call or a fault.
    pub(crate) fn enter(&mut self, cpu: usize, now: Time) {
        self.change(cpu, now, |member| member.waiting = false);
    }

    /// Completes a call or a fault.
    pub(crate) fn complete(&mut self, cpu: usize, now: Time) {
        let Some(member) = self.members.get_mut(cpu).filter(|member| member.works()) else {
            return;
        };
        member.advance(now);
        let (number, took) = (member.calls, mem::take(&mut member.worked));
        let steady = &mut self.steady;
        steady.all_calls += 1;
        steady.calls += u64::from(self.opened.is_some());
        if number < steady.warm_up {
            // In order on each CPU, so the list grows by one element at most.
            steady.starts.resize(steady.starts.len().max(number as usize + 1), 0);
            steady.starts[number as usize] += took;
        }
        self.change(cpu, now, |member| member.calls += 1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::accounts::Spent;

    /// Opens or closes the window at `at` if required. `spent` is the time of all CPUs so far.
    fn turn(window: &mut Window, at: Time, spent: Time) {
        if window.is_due() {
            let mut accounts = Accounts::default();
            accounts.spent[Spent::Lines as usize] = spent;
            window.turn(Moment { at, accounts, counters: vec![("faults", spent / 10)] });
        }
    }

    /// Two CPUs with a warm-up of one call. Each tuple is the CPU, the time, and whether the window
    /// is open afterwards.
    #[test]
    fn window_is_open_while_all_cpus_are_measured() {
        let mut window = Window::new(2, 1);
        let calls = |window: &mut Window, calls: &[(usize, Time, bool)]| {
            for &(cpu, at, open) in calls {
                window.enter(cpu, at - 5);
                window.complete(cpu, at);
                turn(window, at, 10 * at);
                assert_eq!(window.is_open(), open, "{cpu} at {at}");
            }
        };
        window.begin(0, 100);
        window.begin(1, 100);
        // CPU 1 takes long for its first call.
        calls(&mut window, &[(0, 110, false), (0, 120, false), (1, 190, true)]);
        calls(&mut window, &[(0, 200, true), (1, 205, true)]);
        // The first CPU waits for the other, which ends the stretch.
        window.wait(0, 210);
        turn(&mut window, 210, 2100);
        assert!(!window.is_open());
        calls(&mut window, &[(1, 240, false)]);
        // Both are off the books: these calls do not count.
        window.set_aside(0, 250, true);
        window.set_aside(1, 250, true);
        calls(&mut window, &[(0, 260, false), (1, 270, false)]);
        window.wait(1, 280);
        window.set_aside(0, 300, false);
        window.set_aside(1, 300, false);
        turn(&mut window, 300, 3000);
        assert!(window.is_open());
        calls(&mut window, &[(1, 320, true), (0, 330, true)]);
        window.end(1, 340);
        turn(&mut window, 340, 3400);
        assert!(!window.is_open());
        calls(&mut window, &[(0, 400, false)]);

        let steady = window.steady();
        assert_eq!((steady.length, steady.calls), (20 + 40, 2 + 2));
        // CPU 0 has five calls on the books, and CPU 1 has four.
        assert_eq!((steady.all_calls, steady.fewest), (5 + 4, 4));
        assert_eq!(steady.accounts.spent[Spent::Lines as usize], 200 + 400);
        assert_eq!(steady.counters, [("faults", 20 + 40)]);
        assert_eq!(steady.starts, [10 + 90]);
    }

    #[test]
    fn times_of_first_calls_exclude_waits_and_work_off_the_books() {
        let mut window = Window::new(1, 3);
        window.begin(0, 0);
        window.complete(0, 10);
        window.wait(0, 12);
        window.enter(0, 50);
        window.complete(0, 55);
        window.set_aside(0, 60, true);
        window.set_aside(0, 90, false);
        window.complete(0, 98);
        assert_eq!(window.steady().starts, [10, 2 + 5, 5 + 8]);
        assert!(window.is_due());
    }

    #[test]
    fn other_cpus_are_ignored() {
        let mut window = Window::new(1, 0);
        window.begin(1, 0);
        window.complete(1, 10);
        assert!(!window.is_due());
        assert_eq!(window.steady(), Steady { cpus: 1, ..Steady::default() });
    }
}
