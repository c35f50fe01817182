//! Links the kernel at its place, by the linker script of the bare machine.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    if let Ok(script) = std::env::var("DEP_FAULTLESS_BARE_LINKER_SCRIPT") {
        for arg in [&format!("-T{script}"), "--build-id=none", "-zmax-page-size=4096"] {
            println!("cargo::rustc-link-arg-bins={arg}");
        }
    }
}
