//! Detects test files that are missing from the modules of every test program, and would silently
//! not run.

use std::path::Path;

/// Checks that `root`, the text of `main.rs` in the test folder `name`, declares each other file of
/// the folder as a module.
pub fn every_file_is_run(name: &str, root: &str) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests").join(name);
    for file in folder.read_dir().expect("a readable folder of tests") {
        let name =
            file.expect("a readable entry").file_name().into_string().expect("a name in UTF-8");
        if let Some(module) = name.strip_suffix(".rs").filter(|module| *module != "main") {
            assert!(root.contains(&format!("\nmod {module};\n")), "{module} is not included");
        }
    }
}
