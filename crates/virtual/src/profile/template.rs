//! A commented profile to be filled in.

use super::Profile;
use super::problems::{example_value, unit};

/// The source of each number in a template.
const SOURCE: &str = "assumed: as in two-socket; replace the number and this text";

impl Profile {
    /// Returns a profile named `name` with a comment at each section and number. The numbers are
    /// those of the bundled profile `two-socket`, and marked as assumed. The optional section is
    /// commented out.
    pub fn template(name: &str) -> String {
        let quoted = toml::Value::from(name).to_string();
        let mut text = format!(
            "# The hardware costs of one machine, for simulated CPUs.\n\
             # Each number requires a value, and a source: a publication, a derivation or a\n\
             # measurement. A source that begins with \"assumed:\" marks a number without any.\n\n\
             # The name in results. A bundled profile must not have the same name.\n\
             name = {quoted}\n\
             # The machine, in one line.\n\
             summary = \"the machine, in one line\"\n"
        );
        for section in Self::format() {
            let mark = if section.optional { "# " } else { "" };
            text.push('\n');
            comment(&mut text, section.meaning);
            text += &format!("{mark}[{}]\n", section.name);
            for (key, meaning) in section.keys {
                let value = example_value(section.name, key);
                comment(&mut text, &format!("{meaning} Unit: {}.", unit(key)));
                text += &format!("{mark}{key} = {{ value = {value}, source = \"{SOURCE}\" }}\n");
            }
        }
        text
    }
}

/// Adds a comment, wrapped at 100 columns.
fn comment(text: &mut String, words: &str) {
    let mut line = String::from("#");
    for word in words.split_whitespace() {
        if line.chars().count() + 1 + word.chars().count() > 100 {
            text.push_str(&line);
            text.push('\n');
            line = String::from("#");
        }
        line.push(' ');
        line.push_str(word);
    }
    text.push_str(&line);
    text.push('\n');
}
