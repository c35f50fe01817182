//! Builds the kernel and the static guest programs, and embeds the results.
//!
//! A nested cargo builds both: the kernel for a target without an operating system, the programs
//! with a static C library. A dependency of this crate could be built in neither way. All profiles
//! share one target folder, so that checks, tests and releases build the kernel and the programs
//! once. This script has no dependencies, so cargo starts it first: it is the longest step of the
//! build.
//!
//! A failed part does not stop the rest of the build: the reason and the command that fixes it are
//! embedded in its place. `FAULTLESS_EMBED=no` skips both parts on purpose.

use std::env;
use std::ffi::OsString;
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;

const BARE: &str = "x86_64-unknown-none";
const HOSTED: &str = "x86_64-unknown-linux-gnu";
/// The guest programs of every build; the other programs are tests, and require the feature `qemu`.
const PROGRAMS: [&str; 4] = ["counts", "reclaim", "rows", "workload"];
/// The link mode of a guest program: at a fixed address, statically linked.
const STATIC: &str = "-Ctarget-feature=+crt-static\x1f-Crelocation-model=static";
/// The sources of the programs in a folder, below `crates`.
const SOURCES: [&str; 8] =
    ["bare", "collections", "disk", "personality", "guest", "workload", "faultless", "native"];

fn main() {
    let manifest = PathBuf::from(env::var_os("CARGO_MANIFEST_DIR").expect("set by cargo"));
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("set by cargo"));
    let root = manifest.join("../..").canonicalize().unwrap_or(manifest);
    watch(&root);

    let skipped = env::var_os("FAULTLESS_EMBED").is_some_and(|wish| wish == "no");
    let left_out =
        || "excluded by FAULTLESS_EMBED=no; build again without this variable".to_owned();
    let (kernel, guests) = if skipped {
        (Err(left_out()), Err(left_out()))
    } else {
        // The kernel is one crate for most of its build time, which leaves a CPU for the programs.
        thread::scope(|both| {
            let kernel = both.spawn(|| kernel(&root, &out));
            let guests = guests(&root, &out);
            (kernel.join().expect("errors are returned"), guests)
        })
    };

    let mut code = String::new();
    let kernel = match kernel {
        Ok(file) => format!("Ok(include_bytes!({file:?}))"),
        Err(why) => format!("Err({why:?})"),
    };
    let guests = match guests {
        Ok(files) => {
            let pairs =
                files.iter().map(|(name, file)| format!("({name:?}, include_bytes!({file:?}))"));
            format!("Ok(&[{}])", pairs.collect::<Vec<_>>().join(", "))
        }
        Err(why) => format!("Err({why:?})"),
    };
    let _ = writeln!(code, "static KERNEL: Result<&[u8], &str> = {kernel};");
    let _ = writeln!(code, "static GUESTS: Result<&[(&str, &[u8])], &str> = {guests};");
    fs::write(out.join("embedded.rs"), code).expect("a writable OUT_DIR");
}

/// Declares the dependencies of a build.
fn watch(root: &Path) {
    println!("cargo::rerun-if-env-changed=FAULTLESS_EMBED");
    let parts = SOURCES.iter().flat_map(|part| {
        ["src", "Cargo.toml", "build.rs", "kernel.ld"].map(|file| format!("crates/{part}/{file}"))
    });
    let files = ["Cargo.toml", "Cargo.lock", ".cargo/config.toml", "crates/boot/build.rs"];
    for file in parts.chain(files.map(str::to_owned)) {
        // A missing file would make cargo run this script each time.
        if root.join(&file).exists() {
            println!("cargo::rerun-if-changed={}", root.join(&file).display());
        }
    }
    // A target that is installed later appears in this folder. (A missing file would make cargo run
    // this script each time.)
    let rustc = env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    if let Ok(found) = Command::new(rustc).args(["--print", "sysroot"]).output() {
        let sysroot = String::from_utf8_lossy(&found.stdout);
        let targets = Path::new(sysroot.trim()).join("lib/rustlib");
        let bare = targets.join(BARE);
        let watched = if bare.exists() { bare } else { targets };
        println!("cargo::rerun-if-changed={}", watched.display());
    }
}

fn kernel(root: &Path, out: &Path) -> Result<String, String> {
    let args = [
        "-p",
        "faultless-personality",
        "--features",
        "kernel",
        "--target",
        BARE,
        "--profile",
        "kernel",
    ];
    let built = cargo(root, "bare", &args, None)?;
    keep(&built.join(BARE).join("kernel/faultless-kernel"), out)
}

/// The guest programs' names and files.
fn guests(root: &Path, out: &Path) -> Result<Vec<(String, String)>, String> {
    let mut names = PROGRAMS.map(str::to_owned).to_vec();
    let mut args = vec!["-p", "faultless-guest", "-p", "faultless-workload", "--target", HOSTED];
    args.extend(["--profile", "guest", "--no-default-features"]);
    if env::var_os("CARGO_FEATURE_QEMU").is_some() {
        args.push("--bins");
        names.extend(programs(&root.join("crates/guest/src/bin"))?);
        names.sort();
        names.dedup();
    } else {
        args.extend(PROGRAMS.iter().flat_map(|program| ["--bin", program]));
    }
    let built = cargo(root, "guest", &args, Some(STATIC))?.join(HOSTED).join("guest");
    names.into_iter().map(|name| Ok((name.clone(), keep(&built.join(name), out)?))).collect()
}

/// The names of the programs with a file each in `folder`.
fn programs(folder: &Path) -> Result<Vec<String>, String> {
    let files = fs::read_dir(folder).map_err(|error| format!("{}: {error}", folder.display()))?;
    let paths = files.flatten().map(|file| file.path());
    let sources = paths.filter(|path| path.extension().is_some_and(|kind| kind == "rs"));
    Ok(sources.filter_map(|path| Some(path.file_stem()?.to_str()?.to_owned())).collect())
}

/// Copies a program to the folder from which it is embedded.
fn keep(file: &Path, out: &Path) -> Result<String, String> {
    let name = file.file_name().unwrap_or_default();
    let kept = out.join(name);
    fs::copy(file, &kept).map_err(|error| format!("{}: {error}", file.display()))?;
    Ok(kept.display().to_string())
}

/// Builds with a nested cargo in the target folder `folder`. Returns this folder, or the reason for
/// the failure and a fix.
fn cargo(root: &Path, folder: &str, args: &[&str], flags: Option<&str>) -> Result<PathBuf, String> {
    if let Some(package) = ["personality", "guest"].iter().find(|part| args[1].ends_with(*part))
        && !root.join("crates").join(package).join("Cargo.toml").exists()
    {
        return Err(format!("crates/{package} is missing; build from the whole repository"));
    }
    let target = root.join("target").join(folder);
    let cargo = env::var_os("CARGO").unwrap_or_else(|| OsString::from("cargo"));
    let mut command = Command::new(cargo);
    command.current_dir(root).args(["build", "--target-dir"]).arg(&target);
    command.args(args);
    // The settings of the outer build do not apply to this build: flags, wrappers (clippy is one)
    // and profiles.
    for (name, _) in env::vars_os() {
        let text = name.to_string_lossy();
        let outer =
            ["CARGO_ENCODED_RUSTFLAGS", "RUSTFLAGS", "RUSTC_WRAPPER", "RUSTC_WORKSPACE_WRAPPER"];
        let settings = ["CARGO_PROFILE_", "CARGO_BUILD_", "CARGO_TARGET_", "CARGO_FEATURE_"];
        if outer.contains(&&*text) || settings.iter().any(|start| text.starts_with(start)) {
            command.env_remove(name);
        }
    }
    // The embedded files contain names for panics, but no line tables.
    command.env("CARGO_PROFILE_MEASURED_STRIP", "debuginfo");
    command.env("CARGO_PROFILE_KERNEL_STRIP", "debuginfo");
    if let Some(flags) = flags {
        command.env("CARGO_ENCODED_RUSTFLAGS", flags);
    }
    let output = command.output().map_err(|error| format!("cargo did not start: {error}"))?;
    if output.status.success() {
        return Ok(target);
    }
    let messages = String::from_utf8_lossy(&output.stderr);
    let why = reason(&messages);
    println!("cargo::warning={} is not embedded: {why}", args[1]);
    Err(why)
}

/// Returns the cause of cargo's error, and the command that fixes it.
fn reason(messages: &str) -> String {
    if messages.contains("can't find crate for `core`")
        || messages.contains("target may not be installed")
    {
        return format!(
            "the target {BARE} was missing: rustup target add {BARE}, then build again"
        );
    }
    if messages.contains("cannot find -lc") || messages.contains("linker `cc` not found") {
        return "the static C library was missing: apt-get install gcc libc6-dev, then build again"
            .into();
    }
    let first = messages.lines().find(|line| line.starts_with("error")).unwrap_or("cargo failed");
    format!("the build failed ({first})")
}
