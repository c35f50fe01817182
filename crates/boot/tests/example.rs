//! The bare machine's example, a kernel of its own, boots and serves page faults without a personality.

mod common;

use common::{boot, busybox, deterministic, host, parallel};
use faultless_boot::{End, Machine, Program};
use std::path::{Path, PathBuf};
use std::process::Command;

/// Builds the example as the kernel itself is built, beside it.
fn example() -> PathBuf {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let target = root.join("target/bare");
    let mut cargo = Command::new(env!("CARGO"));
    cargo.current_dir(&root).args(["build", "--profile", "kernel", "--features", "kernel"]);
    cargo.args(["-p", "faultless-bare", "--example", "pages", "--target", "x86_64-unknown-none"]);
    cargo.arg("--target-dir").arg(&target).env("CARGO_PROFILE_KERNEL_STRIP", "debuginfo");
    for name in ["RUSTFLAGS", "CARGO_ENCODED_RUSTFLAGS"] {
        cargo.env_remove(name);
    }
    host(&mut cargo, "rustup target add x86_64-unknown-none");
    target.join("x86_64-unknown-none/kernel/examples/pages")
}

#[test]
fn pages() {
    let kernel = Some(example());
    for machine in [deterministic(), parallel()] {
        let machine = Machine { kernel: kernel.clone(), ..machine };
        // It has no use for the program that it is given.
        let ran = boot(&machine, &Program::file(busybox()).expect("it is a program"));
        assert_eq!(ran.end, End::Exited(0), "{ran}");
        let said = ran.report.messages.join("\n");
        let expected = [
            &format!("{} CPUs, 1 MiB mapped", machine.cpus),
            &format!("{} CPUs know all cache modes", machine.cpus),
            "256 pages stored to, ",
            "Write behind the end: Segv { mapped: false }",
        ];
        assert!(expected.iter().all(|part| said.contains(*part)), "{ran}");
        // Each fault maps several pages, and one is that of the program's code.
        let faults = said.split("256 pages stored to, ").nth(1).and_then(|it| it.split(' ').next());
        let faults: u32 = faults.and_then(|it| it.parse().ok()).expect("a count");
        assert!((8..=257).contains(&faults), "{ran}");
    }
}
