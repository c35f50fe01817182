//! An HTML page with plots. The page loads no resources and runs no scripts, and follows the
//! reader's light or dark mode.

pub mod plot;

use crate::error::CliError;
use crate::interrupt;
use crate::output::{self, Replacing};
use plot::Picture;
use std::fmt::Write;
use std::path::{Path, PathBuf};

const STYLE: &str = include_str!("style.css");

/// A page.
#[derive(Clone, Debug)]
pub struct Page {
    title: String,
    body: String,
}

impl Page {
    /// Creates a page without parts.
    pub fn new(title: impl Into<String>) -> Self {
        Self { title: title.into(), body: String::new() }
    }

    /// Adds a part: a heading, the meaning, and the plot in two sizes. The width of the screen
    /// selects the size.
    pub fn plot(&mut self, heading: &str, meaning: &str, picture: &Picture) {
        let (heading, meaning) = (escaped(heading), escaped(meaning));
        let sized = |svg: &str, class: &str| {
            let with = format!("<svg class=\"{class}\" role=\"img\" aria-label=\"{heading}\" ");
            svg.replacen("<svg ", &with, 1)
        };
        let (wide, narrow) = (sized(&picture.wide, "wide"), sized(&picture.narrow, "narrow"));
        let title = escaped(&picture.title);
        // Writing to a string cannot fail.
        let _ = writeln!(
            self.body,
            "<h2>{heading}</h2>\n<p>{meaning}</p>\n<figure>{wide}<figcaption>{title}</figcaption>{narrow}</figure>"
        );
    }

    /// Adds a part with text as shown on a terminal.
    pub fn text(&mut self, heading: &str, text: &str) {
        let (heading, text) = (escaped(heading), escaped(text.trim_matches('\n')));
        let _ = writeln!(self.body, "<h2>{heading}</h2>\n<pre>{text}</pre>");
    }

    fn html(&self) -> String {
        let (title, body) = (escaped(&self.title), &self.body);
        format!(
            "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n<meta name=\"viewport\" \
             content=\"width=device-width\">\n<link rel=\"icon\" href=\"data:,\">\n<title>{title}</title>\n<style>\n{STYLE}</style>\n\
             </head>\n<body>\n<h1>{title}</h1>\n{body}</body>\n</html>\n"
        )
    }
}

#[derive(Debug, clap::Args)]
pub struct HtmlArgs {
    /// Write a page with plots to FILE, which is replaced when the results are complete. The page
    /// is a single file without external resources
    #[arg(long, value_name = "FILE")]
    pub html: Option<PathBuf>,
}

/// The file of `--html`, if given.
#[derive(Debug)]
pub struct Html(Drawing);

impl Html {
    /// Opens the file named by `args`, which must differ from the `inputs`.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn open(args: &HtmlArgs, inputs: &[&Path]) -> Result<Self, CliError> {
        Drawing::open("--html", args.html.as_deref(), inputs).map(Self)
    }

    /// Writes the page created by `make`, if `--html` is given and the user does not interrupt the
    /// command.
    ///
    /// # Errors
    /// The page cannot be drawn or written.
    pub fn write(
        self,
        make: impl FnOnce() -> Result<Option<Page>, CliError>,
    ) -> Result<(), CliError> {
        self.0.write(|| Ok(make()?.map(|page| page.html())))
    }
}

/// The file of an option for a page or a picture, if given.
#[derive(Debug)]
pub struct Drawing {
    option: &'static str,
    file: Option<Replacing>,
}

impl Drawing {
    /// Opens the file `path` of `option`, which must differ from the `inputs`.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn open(
        option: &'static str,
        path: Option<&Path>,
        inputs: &[&Path],
    ) -> Result<Self, CliError> {
        let Some(path) = path else { return Ok(Self { option, file: None }) };
        if path == Path::new("-") {
            let why =
                format!("{option} -: the output is a file, not standard output: specify a name");
            return Err(CliError::Usage(why));
        }
        output::spare(option, path, inputs)?;
        let file = Replacing::new(path);
        let file = file.map_err(|error| CliError::Failed(format!("{option} {error}")))?;
        Ok(Self { option, file: Some(file) })
    }

    /// Writes the result of `draw`, if the option is given and the user does not interrupt the
    /// command.
    ///
    /// # Errors
    /// The result cannot be drawn or written.
    pub fn write(
        self,
        draw: impl FnOnce() -> Result<Option<String>, CliError>,
    ) -> Result<(), CliError> {
        let Self { option, file } = self;
        let Some(file) = file.filter(|_| !interrupt::requested()) else { return Ok(()) };
        let Some(text) = draw()?.filter(|_| !interrupt::requested()) else { return Ok(()) };
        let written = file.write(text.as_bytes());
        written.map_err(|error| CliError::Failed(format!("{option} {error}")))
    }
}

/// Escapes `text` for HTML.
fn escaped(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for letter in text.chars() {
        match letter {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            _ => out.push(letter),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn page_is_self_contained() {
        let mut page = Page::new("a <program> & more");
        let [wide, narrow] =
            ["<svg width=\"2\"></svg>", "<svg width=\"1\"></svg>"].map(str::to_owned);
        page.plot("one \"plot\"", "what", &Picture { title: "a & b".into(), wide, narrow });
        page.text("text", "\na < b\n");
        let html = page.html();
        for expected in [
            "<title>a &lt;program&gt; &amp; more</title>",
            "<svg class=\"wide\" role=\"img\" aria-label=\"one &quot;plot&quot;\" width=\"2\">",
            "<figcaption>a &amp; b</figcaption><svg class=\"narrow\" role=\"img\" ",
            "<pre>a &lt; b</pre>",
            "prefers-color-scheme: dark",
        ] {
            assert!(html.contains(expected), "no {expected:?} in {html}");
        }
        for loads in ["<script", "http:", "https:", "src=", "url("] {
            assert!(!html.contains(loads), "{loads:?} in {html}");
        }
    }
}
