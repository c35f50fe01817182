//! Work included in the figures of Linux and not of the bare kernel, as reported by the booted
//! kernel.

use super::LinuxRun;
use crate::error::CliError;
use crate::report::{Style, filled, table};
use std::io::Write;

/// Work of every configuration of this Linux.
const ALWAYS: &str = "Always active on Linux, and without a switch: NUMA policy of each page, the lists and marks of reclaim, accounting per \
    process and zone, and the tick of the scheduler. The bare kernel has none of the work in this table. Both kernels zero a page with the same \
    512 stores of `rep stosq`.";

/// Parses the facts printed by a program: lines of `fact NAME TEXT`.
pub fn facts(text: &str) -> Vec<(String, String)> {
    let fact = |line: &str| {
        let (name, text) = line.trim().strip_prefix("fact ")?.split_once(' ')?;
        Some((name.to_owned(), text.trim().to_owned()))
    };
    text.lines().filter_map(fact).collect()
}

/// A kernel's facts, with lookups.
struct Facts<'a>(&'a [(String, String)]);

impl<'a> Facts<'a> {
    fn get(&self, name: &str) -> Option<&'a str> {
        self.0.iter().find(|(known, _)| known == name).map(|(_, text)| text.as_str())
    }

    /// Returns the rest of the word of `name` that begins with `start`.
    fn word(&self, name: &str, start: &str) -> Option<&'a str> {
        let words = self.get(name)?.split([' ', ',']);
        words.map(str::trim).find_map(|word| word.strip_prefix(start))
    }
}

const UNKNOWN: &str = "not known";

/// The name of a kind of work, the place in which Linux reports it, and the state in a kernel's
/// facts.
type Work = (&'static str, &'static str, fn(&Facts<'_>) -> String);

const WORK: [Work; 6] = [
    ("charging pages and page tables to memory cgroups", "/proc/cgroups", |facts| {
        switch(facts.get("memcg").map(|enabled| enabled == "1"))
    }),
    (
        "zeroing every page at its allocation, also before a copy (init_on_alloc)",
        "kernel log",
        |facts| {
            // "stack:all(zero), heap alloc:on, heap free:off"
            switch(facts.word("auto_init", "alloc:").map(|state| state == "on"))
        },
    ),
    ("separate page tables for user mode (KPTI)", "vulnerabilities/meltdown", |facts| match facts
        .get("cpu.meltdown")
    {
        Some(text) if text.contains("PTI") => "active".to_owned(),
        Some(text) => format!("off ({})", text.to_lowercase()),
        None => UNKNOWN.to_owned(),
    }),
    ("audit of system calls", "kernel log", |facts| match facts.get("audit") {
        Some(text) if text.contains("disabled") => "off until a rule is set".to_owned(),
        Some(_) => "active".to_owned(),
        None => UNKNOWN.to_owned(),
    }),
    ("hooks of security modules (LSM)", "/sys/kernel/security/lsm", |facts| {
        facts.get("lsm").map_or(UNKNOWN.to_owned(), |list| list.replace(',', ", "))
    }),
    ("unmapping pages to detect the node that uses them", "numa_balancing", |facts| {
        switch(facts.get("numa_balancing").map(|state| state != "0"))
    }),
];

fn switch(active: Option<bool>) -> String {
    match active {
        Some(true) => "active",
        Some(false) => "off",
        None => UNKNOWN,
    }
    .to_owned()
}

/// Prints the table of work, with a column for each of `kernels`: names and facts.
///
/// # Errors
/// The output is closed.
pub fn print(
    out: &mut dyn Write,
    kernels: &[(String, &[(String, String)])],
    cpu: &str,
    style: Style,
) -> Result<(), CliError> {
    if kernels.iter().all(|(_, facts)| facts.is_empty()) {
        return Ok(());
    }
    let kernels: Vec<(&str, Facts<'_>)> =
        kernels.iter().map(|(name, facts)| (name.as_str(), Facts(facts))).collect();
    writeln!(out, "Additional work of Linux, with CPU {cpu}, as reported by the booted kernel")?;
    let mut head = vec!["work".to_owned(), "reported in".to_owned()];
    head.extend(kernels.iter().map(|(name, _)| (*name).to_owned()));
    let mut table = table::numbers(&head, style);
    for (name, place, state) in WORK {
        let states = kernels.iter().map(|(_, facts)| state(facts));
        table::row(&mut table, [name.to_owned(), place.to_owned()].into_iter().chain(states));
    }
    for (vulnerability, place) in mitigated(&kernels) {
        let states = kernels.iter().map(|(_, facts)| {
            let text = facts.get(&format!("cpu.{vulnerability}"));
            text.map_or(UNKNOWN.to_owned(), |text| mitigation(text, style))
        });
        let cells = [format!("mitigation of {vulnerability}"), place];
        table::row(&mut table, cells.into_iter().chain(states));
    }
    writeln!(out, "{table}")?;
    writeln!(out, "{}\n", filled(ALWAYS, style.width))?;
    Ok(())
}

/// Returns the vulnerabilities mitigated by any kernel, with their places, in order of their names.
fn mitigated(kernels: &[(&str, Facts<'_>)]) -> Vec<(String, String)> {
    let mut names: Vec<String> = Vec::new();
    for (name, text) in kernels.iter().flat_map(|(_, facts)| facts.0) {
        let Some(name) = name.strip_prefix("cpu.") else { continue };
        // KPTI has a separate row.
        if name != "meltdown" && text.contains("Mitigation") && !names.iter().any(|it| it == name) {
            names.push(name.to_owned());
        }
    }
    names.sort();
    let with_place = |name: String| {
        let place = format!("vulnerabilities/{name}");
        (name, place)
    };
    names.into_iter().map(with_place).collect()
}

/// Returns the state of a mitigation, in lines that fit in a column of the table.
fn mitigation(text: &str, style: Style) -> String {
    let text = text.replace("Mitigation: ", "active: ").replace("Vulnerable", "off: vulnerable");
    filled(&text, (style.width / 3).clamp(24, 44)).replace("\n  ", "\n")
}

/// Returns the name of a kernel's column.
pub fn column(stock: &str, run: LinuxRun) -> String {
    match run {
        LinuxRun::Default => stock.to_owned(),
        LinuxRun::Reduced => format!("{stock},\n{}", super::REDUCED.join(",\n")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DEFAULT: &str = "\
[    9.1] reboot: noise
row getppid 330 per_call
fact cmdline console=ttyS0 quiet
fact memcg 1
fact auto_init stack:all(zero), heap alloc:on, heap free:off
fact audit netlink subsys (disabled)
fact lsm lockdown,capability,landlock
fact cpu.meltdown Not affected
fact cpu.spectre_v2 Mitigation: Retpolines; STIBP: disabled
fact cpu.mds Not affected
fact numa_balancing 0\r
";

    fn printed(texts: [&str; 2]) -> String {
        let [one, other] = texts.map(facts);
        let kernels = [("6.12".to_owned(), &one[..]), ("6.12, less".to_owned(), &other[..])];
        let mut out = Vec::new();
        let style = Style { terminal: false, width: 200 };
        print(&mut out, &kernels, "max", style).expect("the output is memory");
        String::from_utf8(out).expect("text")
    }

    #[test]
    fn work_has_a_state_on_each_kernel() {
        let less = DEFAULT
            .replace("memcg 1", "memcg 0")
            .replace("Mitigation: Retpolines; STIBP: disabled", "Vulnerable; STIBP: disabled");
        let text = printed([DEFAULT, &less]);
        let states = |start: &str| {
            let line = text.lines().find(|line| line.starts_with(&format!("| {start}")));
            let cells = line.unwrap_or_else(|| panic!("no {start}: {text}")).split('|').skip(3);
            cells.map(|cell| cell.trim().to_owned()).take(2).collect::<Vec<_>>()
        };
        assert_eq!(states("charging pages"), ["active", "off"]);
        assert_eq!(states("zeroing every page"), ["active", "active"]);
        assert_eq!(states("separate page tables"), ["off (not affected)", "off (not affected)"]);
        assert_eq!(states("audit"), ["off until a rule is set", "off until a rule is set"]);
        assert_eq!(states("hooks")[0], "lockdown, capability, landlock");
        assert_eq!(states("unmapping pages"), ["off", "off"]);
        let spectre = states("mitigation of spectre_v2");
        assert!(spectre[0].starts_with("active: Retpolines"), "{spectre:?}");
        assert!(spectre[1].starts_with("off: vulnerable"), "{spectre:?}");
        assert!(!text.contains("mitigation of mds"), "the CPU is not affected: {text}");
    }

    #[test]
    fn missing_facts_are_printed_as_not_known() {
        let text = printed(["fact memcg 0", ""]);
        assert!(text.contains(" off |") && text.contains("not known"), "{text}");
        assert_eq!(printed(["", "row x 1 per_page"]), "", "no facts, no table");
    }
}
