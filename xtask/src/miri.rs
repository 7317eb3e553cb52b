//! Checks for undefined behaviour with Miri: the walk, and the profiler's decoders that need neither C nor the system.
//!
//! Miri runs code some thousand times slower than a processor. The whole of it takes two processors a quarter of an hour; the
//! short form has a test for each part of the walk, so that every place with unsafe code is executed.

use std::process::Command;

use anyhow::{Result, ensure};

use crate::bpf::TOOLCHAIN;
use crate::command;

/// Arguments of `cargo xtask miri`.
#[derive(clap::Args)]
pub(crate) struct MiriArgs {
    /// One test of each part of the walk, as CI runs it
    #[arg(long)]
    quick: bool,
}

/// One test of each file of `tachyon-common/tests`, by nextest's filters; a name that matches no test is an error.
const QUICK: &[(&str, &str)] = &[
    ("code", "equal_content_is_equal"),
    ("codes", "sent_once_and_known_from_then_on"),
    ("linked", "what_c_has_called_is_linked_where_no_call_is_on_its_way"),
    ("search", "one_of_several_thread_states"),
    ("unwind", "each_kind_of_rule_finds_its_caller"),
    ("unwind_arm64", "whatever_was_saved_wherever_it_lies_the_caller_is_found"),
    ("verdicts", "the_last_verdict_holds_until_the_table_changes"),
    ("walk", "exact_stacks_of_every_family"),
    ("whose", "the_running_task_is_told"),
];

/// Sums of tens of thousands of waits take it long, and involve no unsafe code.
const ALL: &str = "not test(/^wait::tests::/)";

/// From the profiler: the decoder with unsafe code, and those without that are fast enough.
const DECODERS: [&str; 4] =
    ["events::decode", "remote::maps", "inspect::entering::arm64", "kernel::btf::tests::a_signature"];

/// Runs `cargo xtask miri`.
///
/// # Errors
/// A test fails, or a test of the short form does not exist.
pub(crate) fn run(args: &MiriArgs) -> Result<()> {
    if args.quick {
        return quick();
    }
    // A process for each test: Miri uses one CPU only.
    command::run(&mut miri(&["nextest", "run", "-p", "tachyon-common", "-E", ALL]))?;
    command::run(miri(&["test", "-p", "tachyon", "--lib", "--"]).args(DECODERS))
}

fn quick() -> Result<()> {
    let tests: Vec<String> = QUICK.iter().map(|(file, test)| format!("(binary({file}) & test(={test}))")).collect();
    let tests = tests.join(" | ");
    let listed = ["nextest", "list", "-p", "tachyon-common", "--message-format", "oneline", "-E", &tests];
    let found = command::stdout(&mut miri(&listed))?;
    ensure!(found.lines().count() == QUICK.len(), "the short form wants tests that are not there; these are:\n{found}");
    command::run(&mut miri(&["nextest", "run", "-p", "tachyon-common", "-E", &tests]))
}

fn miri(arguments: &[&str]) -> Command {
    let mut cargo = Command::new("rustup");
    cargo.args(["run", TOOLCHAIN, "cargo", "miri"]).args(&arguments[..2]).arg("--locked").args(&arguments[2..]);
    cargo.env("MIRIFLAGS", "-Zmiri-disable-isolation");
    cargo
}
