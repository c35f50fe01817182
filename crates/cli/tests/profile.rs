//! `faultless profile`: the bundled profiles, files of profiles, and messages about wrong fields.

mod common;

use common::{Ran, command, faultless};
use faultless_virtual::Profile;
use faultless_virtual::profile::{BUNDLED, unit};
use std::fs;
use std::path::Path;

#[test]
fn printed_bundled_profile_is_a_usable_file() {
    let dir = tempfile::tempdir().expect("a directory");
    let file = dir.path().join("mine.toml");
    let file = file.to_str().expect("text");
    let list = faultless(&["profile", "list"]).succeeds();
    let run =
        |profile| faultless(&["scale", "brk1", "--cpus", "2", "--profile", profile]).succeeds();
    for name in ["two-socket", "384-core", "eight-socket", "epyc-9965", "xeon-6980p", "graviton4"] {
        assert!(list.contains(name), "{list}");
        let text = faultless(&["profile", "show", name]).succeeds();
        fs::write(file, &text).expect("written");
        assert_eq!(run(file), run(name), "{name}");
        // The list explains every key of the profile.
        for key in text.lines().filter_map(|line| line.split_once(" = {")).map(|(key, _)| key) {
            let explained = |line: &str| line.split_whitespace().take(2).count() == 2;
            let row = list.lines().find(|line| line.split_whitespace().next() == Some(key));
            assert!(row.is_some_and(explained), "{key}: {list}");
        }
    }
    let error = faultless(&["profile", "show", "two-sockets"]).fails(2);
    assert!(error.contains("did you mean two-socket?"), "{error}");
    // The former name.
    assert_eq!(faultless(&["profiles"]).succeeds(), list);
    let text = faultless(&["profile", "show", "384-core"]).succeeds();
    assert_eq!(faultless(&["profiles", "384-core"]).succeeds(), text);
}

/// `new` writes a valid file, which `check` and `scale` accept, and replaces no file.
#[test]
fn a_new_profile_is_valid_and_can_be_simulated() {
    let dir = tempfile::tempdir().expect("a directory");
    let run = |args: &[&str]| Ran::of(command(args).current_dir(dir.path()));
    run(&["profile", "new", "lab", "--output", "lab.toml"]).succeeds();
    let text = fs::read_to_string(dir.path().join("lab.toml")).expect("written");
    assert_eq!(run(&["profile", "new", "lab"]).succeeds(), text);
    assert!(text.contains("# From another socket. Unit: ns.\nremote_ns = {"), "{text}");
    let out = run(&["profile", "check", "lab.toml"]).succeeds();
    assert!(out.contains("lab.toml: valid: lab ("), "{out}");
    assert!(out.contains("CPUs: 192 (2 sockets × 12 complexes × 8 CPUs)"), "{out}");
    assert!(out.contains("of them assumed: ") && out.contains(", line.own_ns"), "{out}");
    let brief = ["scale", "brk1", "passes=2", "--cpus", "1", "--profile"];
    let out = run(&[&brief[..], &["lab.toml"]].concat()).succeeds();
    assert!(out.contains("simulated: lab ("), "{out}");

    let error = run(&["profile", "new", "lab", "--output", "lab.toml"]).fails(2);
    assert!(error.contains("--output lab.toml: the file exists"), "{error}");
    let error = run(&["profile", "new", "two-socket"]).fails(2);
    assert!(error.contains("the name of a bundled profile; use another name"), "{error}");
}

/// A message has the file, the field, the value, the requirement and an example, for each problem.
#[test]
fn wrong_profiles_are_rejected_with_field_value_and_example() {
    let dir = tempfile::tempdir().expect("a directory");
    let run = |args: &[&str]| Ran::of(command(args).current_dir(dir.path()));
    let good = faultless(&["profile", "new"]).succeeds();
    let line = |key: &str| good.lines().find(|line| line.starts_with(key)).expect("a key");
    let bad = good
        .replace(line("sockets ="), "sockets = { value = 2.5, source = \"x\" }")
        .replace(line("remote_ns ="), "remote_ns = { value = -1, source = \"x\" }")
        .replace(line("walk_ns ="), "walk_n = 7");
    fs::write(dir.path().join("bad.toml"), bad).expect("written");
    let checked = run(&["profile", "check", "bad.toml"]).fails(2);
    for text in [
        "bad.toml: topology.sockets = 2.5: must be a whole number from 1 on; example: [topology] \
         sockets = { value = 2, source = ",
        "bad.toml: line.remote_ns = -1: must be between 0 and 1000000000; example: [line] remote_ns",
        "bad.toml: tlb.walk_n = 7: unknown key; the keys of [tlb] are walk_ns, ",
        "bad.toml: tlb.walk_ns: the key is missing; example: [tlb] walk_ns = { value = ",
    ] {
        assert!(checked.contains(text), "{text}: {checked}");
    }
    let error = run(&["scale", "brk1", "--profile", "bad.toml"]).fails(2);
    assert!(error.contains("--profile bad.toml: topology.sockets = 2.5"), "{error}");
    fs::write(dir.path().join("no.toml"), "name = \n").expect("written");
    let error = run(&["profile", "check", "no.toml"]).fails(2);
    assert!(error.contains("no.toml: ") && error.contains("line 1"), "{error}");
    let error = run(&["profile", "check", "two-socket"]).fails(2);
    assert!(error.contains("the bundled profile of this name is valid"), "{error}");
}

/// A word is a bundled name, and a file never replaces a bundled profile without a message.
#[test]
fn a_file_of_a_profile_needs_a_path_or_an_extension() {
    let dir = tempfile::tempdir().expect("a directory");
    let run = |profile: &str| {
        let brief = ["scale", "brk1", "passes=2", "--cpus", "1", "--policies", "speculative"];
        let args = [&brief[..], &["--profile", profile]].concat();
        Ran::of(command(&args).current_dir(dir.path()))
    };
    let text = faultless(&["profile", "new", "mine"]).succeeds();
    for name in ["mine", "mine.toml", "two-socket.toml"] {
        fs::write(dir.path().join(name), &text).expect("written");
    }
    let error = run("mine").fails(2);
    assert!(error.contains("no bundled profile of that name; ./mine names the file"), "{error}");
    for path in ["./mine", "mine.toml", "two-socket.toml"] {
        let ran = run(path);
        assert!(!ran.err.contains("bundled"), "{path}: {}", ran.err);
        assert!(ran.succeeds().contains("simulated: mine ("), "{path}");
    }
    let error = run("other.toml").fails(2);
    assert!(error.contains("--profile other.toml: No such file"), "{error}");
    let error = run("abacus").fails(2);
    assert!(error.contains("no bundled profile of that name; there are two-socket, "), "{error}");

    // Other numbers under a bundled name.
    let same = faultless(&["profile", "show", "two-socket"]).succeeds();
    fs::write(dir.path().join("same.toml"), &same).expect("written");
    let ran = run("same.toml");
    assert!(!ran.err.contains("bundled"), "the same numbers: {}", ran.err);
    let other = text.replace("name = \"mine\"", "name = \"two-socket\"");
    fs::write(dir.path().join("other.toml"), other).expect("written");
    let ran = run("other.toml");
    assert!(ran.err.contains("with the name of the bundled profile two-socket"), "{}", ran.err);
    ran.succeeds();
    let out = Ran::of(command(&["profile", "check", "other.toml"]).current_dir(dir.path()));
    assert!(out.succeeds().contains("Remark: name = \"two-socket\""));
}

#[test]
fn completions_and_manual_pages_have_the_commands_of_profiles() {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().to_str().expect("text");
    faultless(&["generate", path]).succeeds();
    for command in ["list", "show", "check", "new"] {
        let page = dir.path().join(format!("man/faultless-profile-{command}.1"));
        assert!(page.exists(), "{}", page.display());
    }
    let bash = fs::read_to_string(dir.path().join("completions/faultless.bash")).expect("written");
    assert!(bash.contains("list show check new"), "the commands are completed");
}

#[test]
fn guide_explains_every_field_with_its_unit() {
    let guide = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/guide/src/profiles.md");
    let text = fs::read_to_string(guide).expect("the guide");
    for section in Profile::format() {
        assert!(text.contains(&format!("### `[{}]`", section.name)), "{}", section.name);
        for (key, meaning) in section.keys {
            let row = format!("| `{key}` | {} | {meaning} |", unit(key));
            assert!(text.contains(&row), "{row}");
        }
    }
    for (name, _) in BUNDLED {
        let cpus = Profile::bundled(name).expect("a bundled profile").cpus();
        assert!(text.contains(&format!("| `{name}` | {cpus} | ")), "{name}");
    }
}
