//! A file that no program has among its modules would not be run, and nobody would notice.

use std::path::Path;

/// That `root`, the text of a program's first file, has each file of tests whose name begins with `start` as a module.
pub fn every_file_is_run(start: &str, root: &str) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests");
    for file in folder.read_dir().expect("the tests are there") {
        let name = file.expect("it has a name").file_name().into_string().expect("it is text");
        if let Some(module) = name.strip_suffix(".rs").filter(|module| module.starts_with(start)) {
            assert!(root.contains(&format!("\nmod {module};\n")), "{module} is not run");
        }
    }
}
