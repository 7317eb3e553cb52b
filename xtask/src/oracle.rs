//! The long form of the oracle suite: programs that record their own truth, each kind of work separately on each
//! interpreter, until there are tens of thousands of samples of it. `cargo xtask test` runs the short form.

use std::path::PathBuf;
use std::process::Command;

use anyhow::Result;

use crate::command;

/// Arguments of `cargo xtask oracle`.
#[derive(clap::Args)]
pub(crate) struct OracleArgs {
    /// Samples of each kind of work on each interpreter
    #[arg(long, value_name = "N", default_value_t = 50_000)]
    samples: u32,
    /// Only interpreters whose names begin so, e.g. pyenv_3_1
    #[arg(long, value_name = "NAME", default_value = "")]
    interpreter: String,
    /// Add what became of each kind's samples to this file, as JSON lines: interpreter, kind, samples, wrong, not sure, why
    #[arg(long, value_name = "FILE")]
    results: Option<PathBuf>,
}

/// The tests.
const KINDS: [&str; 12] = [
    "truth::every_stack_of_every_sample",
    "truth::what_is_called_anywhere",
    "truth::steps::every_instruction",
    "truth::threads_made_in_c",
    "truth::interpreters_of_their_own",
    "truth::greenlets",
    "truth::embedded",
    "truth::who_holds_the_gil",
    "truth::threads_and_their_time",
    "truth::programs_of_one_process",
    "wall::right",
    "wall_truth",
];

/// Runs `cargo xtask oracle`.
///
/// # Errors
/// Not root, or a stack that was called exact is wrong.
pub(crate) fn run(args: &OracleArgs) -> Result<()> {
    command::require_root("loading BPF programs")?;
    let cargo = || {
        let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
        cargo.current_dir(command::project_root());
        cargo
    };
    // The tests do not build the profiler: it belongs to another package. Both optimised: judging a sample takes longer than taking it.
    command::run(cargo().args(["build", "--release", "--package", "tachyon"]))?;
    let mut tests = cargo();
    // Not with nextest, which ends a test after five minutes.
    tests.args(["test", "--release", "--package", "tachyon-tests", "--test", "live", "--"]);
    tests.args(KINDS.map(|kinds| format!("{kinds}::{}", args.interpreter)));
    tests.args(["--test-threads", "1", "--nocapture"]);
    tests.env("TACHYON_LIVE_TESTS", "required").env("TACHYON_ORACLE_SAMPLES", args.samples.to_string());
    if let Some(results) = &args.results {
        // The tests run in their package's directory.
        tests.env("TACHYON_ORACLE_RESULTS", std::path::absolute(results)?);
    }
    command::run(&mut tests)
}
