//! `page`: an overview of the fleet as one HTML file, in the look of `tachyon-bpf`'s report, for people without a dashboard. It loads nothing.
//!
//! The page is committed ready-made (`prebuilt/fleet.html`, from `tachyon/report-page/`); what is written here is its data, and a summary
//! that needs no script.

use crate::args::PageArgs;
use crate::lake::Lake;
use crate::timeline::{Overview, overview};
use anyhow::{Context as _, bail};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use std::fmt::Write as _;
use std::io::{self, Write};
use tachyon::advice::Refusal;
use tachyon::sinks::text::escape_controls;

/// The page without its data.
const PAGE: &str = include_str!("../prebuilt/fleet.html");

/// Runs the command; reports what was written.
///
/// # Errors
/// When tables cannot be read, or the file cannot be written.
pub fn run(args: &PageArgs, out: &mut dyn Write) -> anyhow::Result<()> {
    let path = &args.output;
    if path.exists() && !args.force {
        bail!(Refusal::new(format!("{} exists already", path.display())).with_hint("--force replaces it"));
    }
    let lake = Lake::open(&args.root)?;
    let overview = overview(&lake, &args.root, args.period)?;
    let page = fill(&overview)?;
    let cannot = || format!("cannot write {}", path.display());
    let mut file = crate::convert::beside(path).with_context(cannot)?;
    file.write_all(page.as_bytes()).with_context(cannot)?;
    file.persist(path).map_err(|error| error.error).with_context(cannot)?;
    let told = format!("{}: {} services of {} hosts", path.display(), overview.services.len(), overview.hosts);
    // Standard error may be closed: the page is written all the same.
    let _closed: io::Result<()> = writeln!(out, "{}", escape_controls(&told));
    Ok(())
}

/// The page with its data in it.
fn fill(overview: &Overview) -> anyhow::Result<String> {
    let data = STANDARD.encode(serde_json::to_vec(overview)?);
    let mut page = String::with_capacity(PAGE.len() + data.len());
    // Each placeholder occurs once, so inserted text is never searched.
    let parts = [("title", html("The fleet")), ("first", first(overview)), ("data", data)];
    let mut rest = PAGE;
    while let Some((before, after)) = rest.split_once("@@") {
        let (name, after) = after.split_once("@@").context("the page has half a place")?;
        page += before;
        page += parts.iter().find(|(known, _)| *known == name).map_or("", |(_, text)| text);
        rest = after;
    }
    page += rest;
    Ok(page)
}

/// The summary without the script.
fn first(overview: &Overview) -> String {
    let all: f64 = overview.services.iter().map(|service| service.seconds).sum();
    let mut text = String::from(
        "<table class=\"first\"><thead><tr><th>Service</th><th>CPU hours</th><th>Share</th><th>Top function</th></tr></thead><tbody>",
    );
    for service in overview.services.iter().take(20) {
        let top = service.functions.first().map_or("", |function| &function.name);
        let (hours, share) = (service.seconds / 3600.0, service.seconds * 100.0 / all.max(f64::MIN_POSITIVE));
        // Writing to memory does not fail.
        let _written = write!(
            text,
            "<tr><td>{}</td><td>{hours:.1}</td><td>{share:.1} %</td><td><code>{}</code></td></tr>",
            html(&service.name),
            html(top)
        );
    }
    text + "</tbody></table>"
}

/// A text in an element.
fn html(text: &str) -> String {
    escape_controls(text)
        .replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
        .replace('"', "&quot;")
        .replace('@', "&#64;")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_end_nothing() {
        assert_eq!(html("</script>\u{1b}\"@@data@@"), "&lt;/script&gt;\\x1b&quot;&#64;&#64;data&#64;&#64;");
        for place in ["@@title@@", "@@first@@", "@@data@@"] {
            assert_eq!(PAGE.matches(place).count(), if place == "@@title@@" { 2 } else { 1 }, "{place}");
        }
    }
}
