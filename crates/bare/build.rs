//! Passes the linker script to kernels, on the bare target only.

fn main() {
    println!("cargo::rerun-if-changed=kernel.ld");
    println!("cargo::rerun-if-changed=build.rs");
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/kernel.ld");
    println!("cargo::metadata=LINKER_SCRIPT={script}");
    if std::env::var("CARGO_CFG_TARGET_OS").as_deref() == Ok("none") {
        println!("cargo::rustc-link-arg-examples=-T{script}");
        println!("cargo::rustc-link-arg-examples=--build-id=none");
        println!("cargo::rustc-link-arg-examples=-zmax-page-size=4096");
    }
}
