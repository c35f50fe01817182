//! Runs a guest program as the first process of a stock Linux, as the reference for correct
//! results: `cargo run -p faultless-boot --features qemu --example stock -- victims`.
//!
//! Only programs that set up their own environment can run this way: `rows`, `counts`, `victims`.

#[path = "../../trace/examples/output/mod.rs"]
mod output;

use faultless_boot::linux::{LinuxMachine, Stock};
use faultless_boot::{Clock, Limits, Nodes, Program, guest};
use std::error::Error;
use std::io::Write;
use std::process::ExitCode;
use std::time::Duration;

fn main() -> ExitCode {
    output::run(|out| stock(out))
}

fn stock(out: &mut impl Write) -> Result<(), Box<dyn Error>> {
    let mut args = std::env::args().skip(1);
    let name = args.next().ok_or("which guest program?")?;
    let kernel = match Stock::cached() {
        Some(kernel) => kernel,
        None => Stock::download()?,
    };
    let machine = LinuxMachine {
        cpus: 2,
        memory: 192 << 20,
        nodes: Nodes::default(),
        clock: Clock::Real,
        cpu: "max,-erms".into(),
        kernel,
        disk: None,
        swap: None,
        words: Vec::new(),
    };
    let limits = Limits { timeout: Some(Duration::from_secs(600)), ..Limits::default() };
    let run = machine.run(&Program::guest(guest(&name)?).args(args), &limits)?;
    write!(out, "{}", run.console)?;
    match run.cut {
        Some(why) => Err(why.into()),
        None => Ok(()),
    }
}
