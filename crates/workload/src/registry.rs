//! The workloads by name.

use crate::outcome::Outcome;
use crate::param::{Kind, Param, ParamError, Settings};
use crate::program::{MODE, Program, SECONDS, THREADS, crew};
use crate::programs::{
    Brk1, Discard, Ebizzy, Forks, Llm, Mmap1, PageFault1, PageFault1Churn, PageFault2, PageFault3,
    PageFaultRead, Pft, SmallAllocs, Text, VmaFault, VmaMmap, VmaMmapTouch, VmaUnmap,
    VmaUnmapUntouched, XsBench,
};
use crate::system::{Crew, Failure, Mode, Needs, System};

/// An available workload.
#[derive(Debug)]
pub struct WorkloadInfo {
    /// The name.
    pub name: &'static str,
    /// A summary of the work, in one line.
    pub summary: &'static str,
    /// The counted unit, in the plural.
    pub unit: &'static str,
    /// The supported modes; the first is the default.
    pub modes: &'static [Mode],
    own: &'static [&'static Param],
    make: fn(&Settings) -> Result<Made, ParamError>,
}

impl WorkloadInfo {
    /// Returns the default value of `param`.
    pub fn default(&self, param: &Param) -> u64 {
        // The default mode depends on the workload.
        match self.modes.first() {
            Some(mode) if param.name == MODE.name => *mode as u64,
            _ => param.default,
        }
    }

    /// Returns the meaning of `param`, in one line.
    pub fn help(&self, param: &Param) -> String {
        match (self.modes, &param.kind) {
            ([only], _) if param.name == MODE.name => format!("workers are {} only", only.name()),
            (_, Kind::Choice(words)) => format!("{}: {}", param.help, words.join(", ")),
            _ => param.help.to_owned(),
        }
    }

    /// Returns the parameters: the common parameters, followed by the specific parameters.
    pub fn params(&self) -> Vec<&'static Param> {
        [&THREADS, &MODE, &SECONDS].into_iter().chain(self.own.iter().copied()).collect()
    }
}

macro_rules! programs {
    ($($program:ident),* $(,)?) => {
        /// A created program.
        #[derive(Debug)]
        enum Made {
            $($program($program)),*
        }

        static ALL: &[WorkloadInfo] = &[$(WorkloadInfo {
            name: $program::NAME,
            summary: $program::SUMMARY,
            unit: $program::UNIT,
            modes: $program::MODES,
            own: $program::PARAMS,
            make: |settings| Ok(Made::$program($program::new(settings)?)),
        }),*];

        impl Made {
            fn run<S: System>(&self, system: &S, crew: &Crew) -> Result<Outcome, Failure> {
                match self {
                    $(Self::$program(program) => Outcome::of(system, program, crew)),*
                }
            }

            fn needs(&self, crew: &Crew) -> Needs {
                match self {
                    $(Self::$program(program) => program.needs(crew)),*
                }
            }
        }
    };
}

programs!(
    Pft,
    PageFault1,
    PageFaultRead,
    PageFault1Churn,
    PageFault2,
    PageFault3,
    Text,
    Discard,
    VmaMmap,
    VmaMmapTouch,
    VmaFault,
    VmaUnmap,
    VmaUnmapUntouched,
    Brk1,
    Mmap1,
    SmallAllocs,
    Ebizzy,
    Forks,
    XsBench,
    Llm,
);

/// Returns all workloads.
pub fn all() -> &'static [WorkloadInfo] {
    ALL
}

/// A workload with its parameters set.
#[derive(Debug)]
pub struct Workload {
    info: &'static WorkloadInfo,
    settings: Settings,
    crew: Crew,
    made: Made,
}

impl Workload {
    /// Creates the workload named `name` with `arguments` of the form `parameter=value`.
    ///
    /// # Errors
    /// [`ParamError`] with the error and the valid values.
    pub fn parse<I>(name: &str, arguments: I) -> Result<Self, ParamError>
    where
        I: IntoIterator,
        I::Item: AsRef<str>,
    {
        let Some(info) = ALL.iter().find(|info| info.name == name) else {
            let names: Vec<_> = ALL.iter().map(|info| info.name).collect();
            return Err(ParamError::UnknownWorkload { name: name.into(), known: names.join(", ") });
        };
        let settings = Settings::parse(info.name, &info.params(), arguments)?;
        let crew = crew(&settings, info.modes)?;
        let made = (info.make)(&settings)?;
        Ok(Self { info, settings, crew, made })
    }

    /// Returns the description of the workload.
    pub fn info(&self) -> &'static WorkloadInfo {
        self.info
    }

    /// Returns its parameters with the values in force, given or default.
    pub fn params(&self) -> impl Iterator<Item = (&'static Param, u64)> + '_ {
        self.info.params().into_iter().map(|param| {
            // The default mode depends on the workload.
            let of_mode = (param.name == MODE.name).then_some(self.crew.mode as u64);
            (param, of_mode.unwrap_or_else(|| self.settings.get(param)))
        })
    }

    /// Returns the memory that suffices for a run.
    pub fn needs(&self) -> Needs {
        self.made.needs(&self.crew)
    }

    /// Returns the crew of a run.
    pub fn crew(&self) -> &Crew {
        &self.crew
    }

    /// Runs the workload on `system`.
    ///
    /// # Errors
    /// The first [`Failure`] of any worker.
    pub fn run<S: System>(&self, system: &S) -> Result<Outcome, Failure> {
        self.made.run(system, &self.crew)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn defaults_are_valid_values() {
        for info in all() {
            for param in info.params() {
                let text = param.kind.show(param.default);
                assert_eq!(
                    param.kind.parse(&text),
                    Some(param.default),
                    "{} {}",
                    info.name,
                    param.name
                );
            }
            let listed = info.params().into_iter();
            let listed = listed.map(|it| format!("{}={}", it.name, it.kind.show(info.default(it))));
            let listed =
                Workload::parse(info.name, listed).expect("listed parameters are accepted");
            let workload = Workload::parse(info.name, [""; 0]).expect("compatible defaults");
            assert!(listed.params().eq(workload.params()), "{}", info.name);
            assert_eq!(workload.crew().mode, info.modes[0]);
            assert_eq!(workload.crew().workers, 1);
        }
    }

    #[test]
    fn names_are_unique() {
        for (at, info) in all().iter().enumerate() {
            assert!(all()[..at].iter().all(|other| other.name != info.name));
            let params = info.params();
            for (at, param) in params.iter().enumerate() {
                assert!(
                    params[..at].iter().all(|other| other.name != param.name),
                    "{}",
                    param.name
                );
            }
        }
    }

    #[test]
    fn mistakes_are_explained() {
        let message = |name: &str, argument: &str| {
            Workload::parse(name, [argument]).expect_err("a mistake").to_string()
        };
        assert!(message("pfft", "").contains("page_fault1"));
        assert!(message("pft", "size").contains("name=value"));
        assert!(message("pft", "sice=1M").contains("size"));
        assert!(message("pft", "size=1").contains("a size from 4K to 64T"));
        assert!(message("pft", "threads=0").contains("from 1 to"));
        assert!(message("forks", "mode=threads").contains("processes"));
        assert!(message("page_fault1_churn", "mode=processes").contains("threads"));
        assert!(message("page_fault1_churn", "churner=alone").contains("threads"));
        assert!(message("discard", "role=split").contains("threads"));
        assert!(message("discard", "piece=1G").contains("at most"));
        assert!(message("vma_fault", "mode=processes").contains("threads"));
        assert!(message("ebizzy", "mode=both").contains("one of threads, processes"));
    }
}
