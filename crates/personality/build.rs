//! Passes the bare machine's linker script to the kernel.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    if let Ok(script) = std::env::var("DEP_FAULTLESS_BARE_LINKER_SCRIPT") {
        println!("cargo::rustc-link-arg-bins=-T{script}");
        println!("cargo::rustc-link-arg-bins=--build-id=none");
        println!("cargo::rustc-link-arg-bins=-zmax-page-size=4096");
    }
}
