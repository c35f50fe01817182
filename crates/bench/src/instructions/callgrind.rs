//! Reads the required parts of callgrind's profiles: the cost of each function by itself and in
//! total, and the cost of each source line, inlined or not.

use std::collections::HashMap;

/// The cost of one function.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Function {
    /// Instructions of the function itself, including inlined functions.
    pub own: u64,
    /// Instructions of called functions.
    pub called: u64,
    /// The number of calls from counted functions.
    pub calls: u64,
    /// Total instructions of these calls.
    pub in_calls: u64,
}

/// One part of a profile.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Profile {
    /// All counted instructions.
    pub total: u64,
    /// Functions by name.
    pub functions: HashMap<String, Function>,
    /// Instructions by source file and line.
    pub lines: HashMap<(String, u64), u64>,
}

impl Profile {
    /// Reads a part.
    ///
    /// # Errors
    /// The line that does not have callgrind's format.
    pub fn parse(text: &str) -> Result<Self, String> {
        let mut reader = Reader::default();
        for (at, line) in text.lines().enumerate() {
            reader.line(line).ok_or_else(|| format!("line {}: {line:?}", at + 1))?;
        }
        let profile = reader.profile;
        let own: u64 = profile.functions.values().map(|function| function.own).sum();
        if own != profile.total {
            return Err(format!("functions add up to {own}, not to {}", profile.total));
        }
        Ok(profile)
    }

    /// Returns the cost of `name`; zeros if it was never called.
    pub fn function(&self, name: &str) -> Function {
        self.functions.get(name).cloned().unwrap_or_default()
    }
}

#[derive(Default)]
struct Reader {
    profile: Profile,
    /// Names are written in full once and by number afterwards.
    files: HashMap<u64, String>,
    names: HashMap<u64, String>,
    file: String,
    function: String,
    /// The called function, and the number of calls, if the next cost belongs to a call.
    call: Option<(String, u64)>,
    callee: String,
    /// The line of the cost before, to which lines are relative.
    at: u64,
}

impl Reader {
    fn line(&mut self, line: &str) -> Option<()> {
        let first = line.bytes().next();
        if first.is_some_and(|byte| byte.is_ascii_digit() || b"+-*".contains(&byte)) {
            return self.cost(line);
        }
        if let Some(total) = line.strip_prefix("totals:").or(line.strip_prefix("summary:")) {
            self.profile.total = total.trim().parse().ok()?;
        } else if let Some(events) = line.strip_prefix("events:") {
            // Only instructions were requested.
            (events.trim() == "Ir").then_some(())?;
        } else if let Some(calls) = line.strip_prefix("calls=") {
            let calls = calls.split(' ').next()?.parse().ok()?;
            self.call = Some((std::mem::take(&mut self.callee), calls));
        } else if let Some((key, value)) = line.split_once('=') {
            match key {
                "fl" | "fi" | "fe" => self.file = named(&mut self.files, value)?,
                "cfi" | "cfl" => drop(named(&mut self.files, value)?),
                "fn" => self.function = named(&mut self.names, value)?,
                "cfn" => self.callee = named(&mut self.names, value)?,
                _ => {}
            }
        }
        Some(())
    }

    fn cost(&mut self, line: &str) -> Option<()> {
        let (position, cost) = line.split_once(' ')?;
        self.at = match position.split_at(1) {
            ("+", up) => self.at + up.parse::<u64>().ok()?,
            ("-", down) => self.at.checked_sub(down.parse().ok()?)?,
            ("*", _) => self.at,
            _ => position.parse().ok()?,
        };
        let cost: u64 = cost.trim().parse().ok()?;
        let functions = &mut self.profile.functions;
        if let Some((callee, calls)) = self.call.take() {
            functions.entry(self.function.clone()).or_default().called += cost;
            let callee = functions.entry(callee).or_default();
            callee.calls += calls;
            callee.in_calls += cost;
        } else {
            functions.entry(self.function.clone()).or_default().own += cost;
            *self.profile.lines.entry((self.file.clone(), self.at)).or_default() += cost;
        }
        Some(())
    }
}

/// Returns a name, written as `(7) name` the first time and as `(7)` afterwards.
fn named(known: &mut HashMap<u64, String>, text: &str) -> Option<String> {
    let Some((number, name)) = text.strip_prefix('(').and_then(|rest| rest.split_once(')')) else {
        return Some(text.into());
    };
    let number = number.parse().ok()?;
    match name.trim() {
        "" => known.get(&number).cloned(),
        name => {
            known.insert(number, name.into());
            Some(name.into())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PART: &str = "version: 1\npositions: line\nevents: Ir\n\nfl=(1) a.rs\nfn=(1) fault\n10 5\n\
        fi=(2) b.rs\n+2 3\ncfn=(2) zero\ncalls=4 40\n* 400\nfe=(1)\n-1 1\n\nfl=(2)\nfn=(2)\n40 396\n\
        cfn=(3) set\ncalls=4 1\n+0 4\n\nfn=(3)\n1 4\n\ntotals: 409\n";

    #[test]
    fn costs_by_function_and_line() {
        let profile = Profile::parse(PART).unwrap();
        assert_eq!(profile.total, 409);
        let fault = Function { own: 9, called: 400, calls: 0, in_calls: 0 };
        assert_eq!(profile.function("fault"), fault);
        let zero = Function { own: 396, called: 4, calls: 4, in_calls: 400 };
        assert_eq!(profile.function("zero"), zero);
        assert_eq!(profile.lines[&("b.rs".into(), 12)], 3);
        assert_eq!(profile.lines[&("a.rs".into(), 11)], 1);
        assert_eq!(profile.function("nobody"), Function::default());
    }

    #[test]
    fn inconsistent_profile_is_rejected() {
        assert!(Profile::parse(&PART.replace("409", "410")).is_err());
        assert!(Profile::parse("events: Ir Dr\n").unwrap_err().contains("line 1"));
        assert!(Profile::parse("events: Ir\nfn=(3)\n").is_err());
    }
}
