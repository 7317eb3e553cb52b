//! The whole test suite, live tests included, after setting up what it needs: the one command that a newcomer runs.

use std::path::Path;
use std::process::Command;

use anyhow::Result;

use crate::vm::machine::Machine;
use crate::{bpf, cache, command, flakes, tools, zoo};

/// Arguments of `cargo xtask test`.
#[derive(clap::Args)]
pub(crate) struct TestArgs {
    /// Set everything up, run no test
    #[arg(long)]
    setup_only: bool,
    /// Instead of the suite: the live tests on every interpreter, those that the suite runs on some of them too, and on those of
    /// `cargo xtask zoo --all` that are there
    #[arg(long, conflicts_with = "setup_only")]
    every_interpreter: bool,
    /// Passed on to `cargo nextest run`, or to `cargo test` where nextest is missing
    #[arg(last = true)]
    args: Vec<String>,
}

/// Where tracepoints are, for tests of chosen events; systemd mounts it, and a machine without it has an empty directory.
fn mount_tracefs() -> Result<()> {
    let root = Path::new("/sys/kernel/tracing");
    if root.join("events").is_dir() {
        return Ok(());
    }
    command::run(Command::new("mount").args(["-t", "tracefs", "tracefs"]).arg(root))
}

/// Runs `cargo xtask test`.
///
/// # Errors
/// Not root, an interpreter of the fixed list is missing, or a test failed.
pub(crate) fn run(args: TestArgs) -> Result<()> {
    command::require_root("loading BPF programs in the live tests")?;
    eprintln!(
        "the tests need the interpreters of `cargo xtask zoo`; packages that are missing are installed with apt-get"
    );
    zoo::set_up(false)?;
    tools::set_up()?;
    // Whose programs unit tests judge unwind tables by.
    let machines = cache::dir()?.join("vm");
    let lock = cache::lock(&machines)?;
    Machine::Arm64.programs_root(&machines)?;
    drop(lock);
    mount_tracefs()?;
    // Whose lines one live test reads.
    bpf::build_with_log(true)?;
    if args.setup_only {
        return Ok(());
    }
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut tests = Command::new(&cargo);
    let nextest = command::find("cargo-nextest").is_some();
    if args.every_interpreter {
        let extras = zoo::missing_extras()?;
        extras.iter().for_each(|name| eprintln!("without {name}, which is not set up"));
        tests.env("TACHYON_LIVE_TESTS", "required").args(on_every_interpreter(nextest, &extras)).args(args.args);
        // Which the tests run.
        command::run(Command::new(&cargo).current_dir(command::project_root()).args([
            "build",
            "--workspace",
            "--bins",
        ]))?;
        return command::run(tests.current_dir(command::project_root()));
    }
    if nextest {
        flakes::forget()?;
        tests.args(["nextest", "run", "--workspace"]);
    } else {
        eprintln!("cargo-nextest is not found: running cargo test, which runs the test programs one after the other");
        // Live tests measure: they must not compete for the processors (nextest: .config/nextest.toml).
        tests.args(["test", "--workspace"]).env("RUST_TEST_THREADS", "1");
    }
    // The live tests fail where they would otherwise say why they cannot run.
    tests.env("TACHYON_LIVE_TESTS", "required");
    let whole = args.args.is_empty();
    command::run(tests.current_dir(command::project_root()).args(args.args))?;
    if nextest {
        flakes::judge(whole)?;
        // nextest runs no examples of the documentation.
        command::run(Command::new(cargo).current_dir(command::project_root()).args(["test", "--workspace", "--doc"]))?;
    }
    Ok(())
}

/// What runs the live tests, the long form's too, but for those on the interpreters with these names.
fn on_every_interpreter(nextest: bool, without: &[String]) -> Vec<String> {
    let mut words: Vec<String> = Vec::new();
    let tests = ["--package", "tachyon-tests", "--test", "live"].map(str::to_owned);
    if nextest {
        words.extend(["nextest", "run"].map(str::to_owned).into_iter().chain(tests));
        words.extend(["--run-ignored", "all"].map(str::to_owned));
        if !without.is_empty() {
            words.extend(["--filterset".to_owned(), format!("not test(/::({})$/)", without.join("|"))]);
        }
    } else {
        words.extend(["test".to_owned()].into_iter().chain(tests));
        words.extend(["--", "--include-ignored", "--test-threads", "1"].map(str::to_owned));
        words.extend(without.iter().flat_map(|name| ["--skip".to_owned(), name.clone()]));
    }
    words
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn interpreters_that_are_missing_are_left_out() {
        let words = on_every_interpreter(true, &["tail_3_14".to_owned(), "sid_3_15d".to_owned()]).join(" ");
        assert!(words.ends_with("--run-ignored all --filterset not test(/::(tail_3_14|sid_3_15d)$/)"), "{words}");
        let words = on_every_interpreter(false, &["tail_3_14".to_owned()]).join(" ");
        assert!(words.ends_with("--include-ignored --test-threads 1 --skip tail_3_14"), "{words}");
        assert!(on_every_interpreter(true, &[]).ends_with(&["--run-ignored".to_owned(), "all".to_owned()]));
    }
}
