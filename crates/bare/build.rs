//! Links the kernel at its place, on the bare target only: elsewhere there is no kernel to link.

fn main() {
    println!("cargo::rerun-if-changed=kernel.ld");
    println!("cargo::rerun-if-changed=build.rs");
    if std::env::var("CARGO_CFG_TARGET_OS").as_deref() == Ok("none") {
        let script = concat!(env!("CARGO_MANIFEST_DIR"), "/kernel.ld");
        println!("cargo::rustc-link-arg-bins=-T{script}");
        println!("cargo::rustc-link-arg-bins=--build-id=none");
        println!("cargo::rustc-link-arg-bins=-zmax-page-size=4096");
    }
}
