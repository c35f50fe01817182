//! Builds the library preloaded by `advise --try` and `run`, and embeds it. It has no dependencies,
//! so a single call of rustc suffices.
//!
//! A failed build of the library does not fail the build of this crate: the reason is embedded
//! instead, and reported when the library is needed.

use std::env;
use std::fs;
use std::path::PathBuf;
use std::process::Command;

const SOURCE: &str = "../preload/src/lib.rs";

fn main() {
    println!("cargo::rerun-if-changed={SOURCE}");
    println!("cargo::rerun-if-changed=build.rs");
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("set by cargo"));
    let library = out.join("preload.so");
    let rustc = env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    let mut command = Command::new(rustc);
    command.args([
        "--crate-type",
        "cdylib",
        "--crate-name",
        "faultless_preload",
        "--edition",
        "2024",
    ]);
    command.args(["-O", "-C", "panic=abort", "-C", "strip=symbols", "-o"]).arg(&library);
    if let (Ok(target), Ok(host)) = (env::var("TARGET"), env::var("HOST"))
        && target != host
    {
        command.args(["--target", &target]);
    }
    let built = command.arg(SOURCE).output();
    let embedded = match built {
        Ok(output) if output.status.success() => format!("Ok(include_bytes!({library:?}))"),
        Ok(output) => format!("Err({:?})", String::from_utf8_lossy(&output.stderr)),
        Err(error) => format!("Err({:?})", format!("rustc: {error}")),
    };
    let code = format!("static LIBRARY: Result<&[u8], &str> = {embedded};\n");
    fs::write(out.join("preload.rs"), code).expect("a writable OUT_DIR");
}
