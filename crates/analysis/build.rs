//! Builds the library preloaded by `advise --try` and `run`, and embeds it. It has no dependencies,
//! so a single call of rustc suffices.
//!
//! The library uses no C library and no start files, so rustc's own linker builds it for each
//! target. A rustc without this linker uses the linker of the target. A failed build of the library
//! does not fail the build of this crate: the reason is embedded instead, and reported when the
//! library is needed.

use std::env;
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The directory of the library's source, with one file for each module.
const SOURCES: &str = "../preload/src";

fn main() {
    println!("cargo::rerun-if-changed={SOURCES}");
    println!("cargo::rerun-if-changed=build.rs");
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("set by cargo"));
    let library = out.join("preload.so");
    let own = ["-Clinker=rust-lld", "-Clinker-flavor=ld.lld"].map(OsString::from).to_vec();
    let mut other = vec![OsString::from("-Clink-arg=-nostartfiles")];
    if let Some(linker) = env::var_os("RUSTC_LINKER") {
        let mut option = OsString::from("-Clinker=");
        option.push(linker);
        other.push(option);
    }
    let built = build(&library, &own).or_else(|_| build(&library, &other));
    let embedded = match built {
        Ok(()) => format!("Ok(include_bytes!({library:?}))"),
        Err(why) => format!("Err({why:?})"),
    };
    let code = format!("static LIBRARY: Result<&[u8], &str> = {embedded};\n");
    fs::write(out.join("preload.rs"), code).expect("a writable OUT_DIR");
}

/// Builds the file `library` with the options of a linker. Returns the messages of a failed build.
fn build(library: &Path, linker: &[OsString]) -> Result<(), String> {
    let rustc = env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    let mut command = Command::new(rustc);
    command.args(["--crate-type=cdylib", "--crate-name=faultless_preload", "--edition=2024"]);
    command.args(["-Copt-level=2", "-Ccodegen-units=1", "-Cpanic=abort", "-Cstrip=symbols"]);
    let target = env::var("TARGET").expect("set by cargo");
    if target.contains("musl") {
        // By default this target makes only static programs, with start files of Rust.
        command.args(["-Ctarget-feature=-crt-static", "-Clink-self-contained=no"]);
    }
    if env::var("HOST").is_ok_and(|host| host != target) {
        command.args(["--target", &target]);
    }
    command.args(linker).arg("-o").arg(library).arg(Path::new(SOURCES).join("lib.rs"));
    match command.output() {
        Ok(output) if output.status.success() => Ok(()),
        Ok(output) => Err(String::from_utf8_lossy(&output.stderr).into_owned()),
        Err(error) => Err(format!("rustc: {error}")),
    }
}
