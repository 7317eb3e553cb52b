//! Tests that passed at their second try: in CI each is a failure, unless it is on the list of known ones
//! (`.config/flakes.toml`, with a reason each).

use std::path::Path;
use std::{fs, io};

use anyhow::{Context, Result, ensure};
use serde::Deserialize;

use crate::command::{in_ci, project_root};

/// Where nextest writes the outcome of each test (`.config/nextest.toml`).
const RESULTS: &str = "target/nextest/default/junit.xml";

/// `.config/flakes.toml`.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct List {
    #[serde(default)]
    flake: Vec<Known>,
}

/// A test that may pass at its second try.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Known {
    /// `package::binary test::name`, as nextest prints it.
    test: String,
    reason: String,
}

/// One test of a run.
#[derive(Debug, PartialEq, Eq)]
struct Outcome {
    test: String,
    /// Set if it passed at a later try: its message at the first failure.
    failed: Option<String>,
}

/// How much of a failed test's message is shown: an assertion may print a whole report.
const MOST_SAID: usize = 400;

/// Removes the results of an earlier run.
///
/// # Errors
/// They cannot be removed.
pub(crate) fn forget() -> Result<()> {
    match fs::remove_file(project_root().join(RESULTS)) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error).context("cannot remove old test results"),
        _ => Ok(()),
    }
}

/// Names the tests of the last run that passed at their second try.
///
/// # Errors
/// In CI, if one is not on the list. Everywhere, if the list has no reason for a test, or `whole` was run and the list has
/// a test that does not exist.
pub(crate) fn judge(whole: bool) -> Result<()> {
    let read = |path: &Path| fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()));
    let list = read(&project_root().join(".config/flakes.toml"))?;
    let list: List = toml::from_str(&list).context("cannot parse .config/flakes.toml")?;
    let outcomes = outcomes(&read(&project_root().join(RESULTS))?)?;
    let unknown = unknown(&list.flake, &outcomes, whole)?;
    ensure!(
        unknown.is_empty() || !in_ci(),
        "passed at the second try and not known to: {}\n\
         hint: mend the test or what it tests; only what nobody can mend goes into .config/flakes.toml, with its reason",
        unknown.join(", ")
    );
    Ok(())
}

/// The flaky tests that are not on the list; all flaky ones are printed.
fn unknown(known: &[Known], outcomes: &[Outcome], whole: bool) -> Result<Vec<String>> {
    for Known { test, reason } in known {
        ensure!(!reason.trim().is_empty(), "{test} is called flaky for no reason");
        let there = outcomes.iter().any(|outcome| outcome.test == *test);
        ensure!(there || !whole, "{test} is called flaky, and there is no such test");
    }
    let mut unknown = Vec::new();
    for (test, said) in outcomes.iter().filter_map(|outcome| Some((&outcome.test, outcome.failed.as_ref()?))) {
        let why = known.iter().find(|known| known.test == *test).map(|known| known.reason.as_str());
        eprintln!("FLAKY: {test}: {}\n{said}", why.unwrap_or("not known to be"));
        if why.is_none() {
            unknown.push(test.clone());
        }
    }
    Ok(unknown)
}

/// The tests of a JUnit file that nextest wrote. A test that passed at a later try has a `flakyFailure` or `flakyError`, whose `message` is how its
/// panic began.
fn outcomes(junit: &str) -> Result<Vec<Outcome>> {
    let mut outcomes = Vec::new();
    for case in junit.split("<testcase ").skip(1) {
        let (head, rest) = case.split_once('>').context("a test case of the results has no end")?;
        let attribute = |name: &str| Some(head.split_once(&format!("{name}=\""))?.1.split_once('"')?.0);
        let (name, class) = attribute("name").zip(attribute("classname")).context("a test case without a name")?;
        let body = if head.ends_with('/') { "" } else { rest.split("</testcase>").next().unwrap_or_default() };
        let failure = ["<flakyFailure ", "<flakyError "].iter().find_map(|element| Some(body.split_once(element)?.1));
        let failed = failure.map(|failure| {
            let message = failure.split_once("message=\"").and_then(|(_, rest)| Some(rest.split_once('"')?.0));
            let message = message.unwrap_or("it said nothing");
            let message = quick_xml::escape::unescape(message).unwrap_or(message.into());
            message.chars().take(MOST_SAID).collect()
        });
        outcomes.push(Outcome { test: format!("{class} {name}"), failed });
    }
    ensure!(!outcomes.is_empty(), "the results name no test");
    Ok(outcomes)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As nextest 0.9.143 writes it, shortened.
    const JUNIT: &str = r#"<?xml version="1.0" encoding="UTF-8"?>
<testsuites name="nextest-run" tests="3" failures="0" errors="0">
    <testsuite name="tachyon-tests::live" tests="2">
        <testcase name="shares::known" classname="tachyon-tests::live" timestamp="2026" time="3.1">
            <flakyFailure timestamp="2026" time="2.9" message="thread &apos;a&apos; panicked at a.rs:1:&#10;why" type="test failure">why</flakyFailure>
        </testcase>
        <testcase name="shares::calm" classname="tachyon-tests::live" timestamp="2026" time="3.1">
        </testcase>
    </testsuite>
    <testsuite name="xtask">
        <testcase name="plain" classname="xtask" time="0.1"/>
    </testsuite>
</testsuites>"#;

    fn known(test: &str, reason: &str) -> Vec<Known> {
        vec![Known { test: test.to_owned(), reason: reason.to_owned() }]
    }

    #[test]
    fn second_tries_are_found() {
        let found = outcomes(JUNIT).unwrap();
        let shown: Vec<_> = found.iter().map(|outcome| (outcome.test.as_str(), outcome.failed.as_deref())).collect();
        let wanted = [
            ("tachyon-tests::live shares::known", Some("thread 'a' panicked at a.rs:1:\nwhy")),
            ("tachyon-tests::live shares::calm", None),
            ("xtask plain", None),
        ];
        assert_eq!(shown, wanted);
        assert!(outcomes("<testsuites></testsuites>").is_err(), "results without a test are no results");
    }

    #[test]
    fn only_listed_ones_may_be() {
        let outcomes = outcomes(JUNIT).unwrap();
        assert_eq!(unknown(&[], &outcomes, true).unwrap(), ["tachyon-tests::live shares::known"]);
        let listed = known("tachyon-tests::live shares::known", "a reason");
        assert!(unknown(&listed, &outcomes, true).unwrap().is_empty());
        assert!(unknown(&known("tachyon-tests::live shares::known", " "), &outcomes, true).is_err(), "no reason");
        let gone = known("tachyon-tests::live gone", "a reason");
        assert!(unknown(&gone, &outcomes, true).is_err(), "a test that is not there");
        assert!(unknown(&gone, &outcomes, false).is_ok(), "of a part of the tests that is not known");
    }

    #[test]
    fn the_list_can_be_read() {
        let text = fs::read_to_string(project_root().join(".config/flakes.toml")).unwrap();
        let list: List = toml::from_str(&text).unwrap();
        assert!(list.flake.iter().all(|known| !known.reason.trim().is_empty()));
    }
}
