//! Runs the whole test suite, including live tests, after setting up what it needs: the one command for newcomers.

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
    // Unit tests check unwind tables against its programs.
    let machines = cache::dir()?.join("vm");
    let lock = cache::lock(&machines)?;
    Machine::Arm64.programs_root(&machines)?;
    drop(lock);
    mount_tracefs()?;
    // One live test reads its log lines.
    bpf::build_with_log(true)?;
    if args.setup_only {
        return Ok(());
    }
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut tests = Command::new(&cargo);
    let nextest = command::find("cargo-nextest").is_some();
    if args.every_interpreter {
        // The program that the tests run.
        let mut build = Command::new(&cargo);
        command::run(build.current_dir(command::project_root()).args(["build", "--workspace", "--bins"]))?;
        let extras = zoo::missing_extras()?;
        extras.iter().for_each(|name| eprintln!("without {name}, which is not set up"));
        on_every_interpreter(&mut tests, nextest, &args.args, &extras);
        return command::run(tests.current_dir(command::project_root()).env("TACHYON_LIVE_TESTS", "required"));
    }
    if nextest {
        flakes::forget()?;
        tests.args(["nextest", "run", "--workspace"]);
    } else {
        eprintln!("cargo-nextest is not found: running cargo test, which runs the test programs one after the other");
        // Live tests measure: they must not compete for CPUs (nextest: .config/nextest.toml).
        tests.args(["test", "--workspace"]).env("RUST_TEST_THREADS", "1");
    }
    // This makes live tests fail instead of just saying why they cannot run.
    tests.env("TACHYON_LIVE_TESTS", "required");
    let whole = args.args.is_empty();
    command::run(tests.current_dir(command::project_root()).args(args.args))?;
    if nextest {
        flakes::judge(whole)?;
        // nextest does not run documentation examples.
        command::run(Command::new(cargo).current_dir(command::project_root()).args(["test", "--workspace", "--doc"]))?;
    }
    Ok(())
}

/// Adds arguments for the live tests, including the long form, except those on the interpreters with these names.
fn on_every_interpreter(cargo: &mut Command, nextest: bool, args: &[String], without: &[String]) {
    cargo.args(if nextest { &["nextest", "run"][..] } else { &["test"] });
    cargo.args(["--package", "tachyon-tests", "--test", "live"]);
    if nextest {
        cargo.args(["--run-ignored", "all"]).args(args).arg("--");
    } else {
        cargo.args(args).args(["--", "--include-ignored", "--test-threads", "1"]);
    }
    // Both support this option, and skip these on top of whatever else was asked for.
    cargo.args(without.iter().flat_map(|name| ["--skip", name]));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn interpreters_that_are_missing_are_left_out() {
        let words = |nextest| {
            let (args, without) = (["-j1".to_owned()], ["tail_3_14".to_owned(), "sid_3_15d".to_owned()]);
            let mut cargo = Command::new("cargo");
            on_every_interpreter(&mut cargo, nextest, &args, &without);
            cargo.get_args().map(|word| word.to_string_lossy().into_owned()).collect::<Vec<_>>().join(" ")
        };
        let tests = "--package tachyon-tests --test live";
        let skipped = "--skip tail_3_14 --skip sid_3_15d";
        assert_eq!(words(true), format!("nextest run {tests} --run-ignored all -j1 -- {skipped}"));
        assert_eq!(words(false), format!("test {tests} -j1 -- --include-ignored --test-threads 1 {skipped}"));
    }
}
