//! A kernel in an empty directory outside the workspace boots and serves page faults without a
//! personality.

mod common;

use common::{boot, busybox, deterministic, host, parallel};
use faultless_boot::{End, Machine, Program};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Builds the example in the directory `home` as documented in `faultless-bare`.
fn example(home: &Path) -> PathBuf {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let root = root.canonicalize().expect("the folder of the workspace");
    let template = fs::read_to_string(root.join("crates/bare/template/Cargo.toml"));
    let manifest = template.expect("the template is text");
    let manifest = manifest.replace("\"faultless/", &format!("\"{}/", root.display()));
    let make = |name: &str| fs::create_dir(home.join(name)).expect("the directory is empty");
    [".cargo", "src"].iter().for_each(|name| make(name));
    fs::write(home.join("Cargo.toml"), manifest).expect("a writable directory");
    for (from, to) in [
        (".cargo/config.toml", ".cargo/config.toml"),
        ("crates/personality/build.rs", "build.rs"),
        ("crates/bare/examples/pages.rs", "src/main.rs"),
        // The same versions of the dependencies as here, which the host already has.
        ("Cargo.lock", "Cargo.lock"),
    ] {
        fs::copy(root.join(from), home.join(to)).expect("a writable directory");
    }
    let mut cargo = Command::new(env!("CARGO"));
    cargo.current_dir(home).args(["build", "--release"]);
    cargo.args(["--target", "x86_64-unknown-none"]).arg("--target-dir").arg(home.join("target"));
    for name in ["RUSTFLAGS", "CARGO_ENCODED_RUSTFLAGS"] {
        cargo.env_remove(name);
    }
    host(&mut cargo, "rustup target add x86_64-unknown-none");
    home.join("target/x86_64-unknown-none/release/my-kernel")
}

#[test]
fn pages() {
    let home = tempfile::tempdir().expect("a temporary directory");
    let kernel = Some(example(home.path()));
    for machine in [deterministic(), parallel()] {
        let machine = Machine { kernel: kernel.clone(), ..machine };
        // This kernel ignores the program.
        let ran = boot(&machine, &Program::file(busybox()).expect("a valid program"));
        assert_eq!(ran.end, End::Exited(0), "{ran}");
        let joined = ran.report.messages.join("\n");
        let expected = [
            &format!("{} CPUs, 1 MiB mapped", machine.cpus),
            &format!("{} CPUs know all cache modes", machine.cpus),
            "256 pages stored to, ",
            "Write behind the end: Segv { mapped: false }",
        ];
        assert!(expected.iter().all(|part| joined.contains(*part)), "{ran}");
        // Each fault maps several pages, and one fault is for the program's code.
        let faults =
            joined.split("256 pages stored to, ").nth(1).and_then(|it| it.split(' ').next());
        let faults: u32 = faults.and_then(|it| it.parse().ok()).expect("a count");
        assert!((8..=257).contains(&faults), "{ran}");
    }
}
