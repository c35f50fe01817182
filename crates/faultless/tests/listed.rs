//! Detects test files that are missing from the modules of every test program, and would silently
//! not run.

use std::path::Path;

/// Checks that `root`, the text of `main.rs` in the test folder `name`, declares each other file of
/// the folder as a module.
pub fn every_file_is_run(name: &str, root: &str) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests").join(name);
    for file in folder.read_dir().expect("the tests are there") {
        let name = file.expect("it has a name").file_name().into_string().expect("it is text");
        if let Some(module) = name.strip_suffix(".rs").filter(|module| *module != "main") {
            assert!(root.contains(&format!("\nmod {module};\n")), "{module} is not run");
        }
    }
}
