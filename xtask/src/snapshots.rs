//! Makes snapshots of CI's interpreters: `tachyon-common/tests/snapshots.rs` walks them without the interpreters.
//!
//! The recorder is an example of the profiler (`tachyon/examples/snapshot.rs`), which can inspect interpreters; this starts
//! it for each of them.

use std::process::Command;

use anyhow::{Result, bail};

use crate::{command, zoo};

/// Arguments of `cargo xtask snapshots`.
#[derive(clap::Args)]
pub(crate) struct SnapshotsArgs {
    /// Only interpreters whose names begin so, e.g. pyenv_3_1
    #[arg(long, value_name = "NAME", default_value = "")]
    interpreter: String,
}

/// Runs `cargo xtask snapshots`.
///
/// # Errors
/// Not root, an interpreter is missing, or one could not be recorded.
pub(crate) fn run(args: &SnapshotsArgs) -> Result<()> {
    command::require_root("chroot and ptrace of the interpreters")?;
    let dir = command::project_root().join("tachyon-common/tests/snapshots");
    let mut met = false;
    for (name, python) in zoo::ci_interpreters()?.into_iter().filter(|(name, _)| name.starts_with(&args.interpreter)) {
        met = true;
        let mut recorder = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
        recorder.current_dir(command::project_root());
        recorder.args(["run", "--quiet", "--package", "tachyon", "--example", "snapshot", "--"]);
        recorder.arg(dir.join(format!("{name}.snap")));
        if let Some(root) = &python.root {
            recorder.arg("--root").arg(root);
        }
        command::run(recorder.arg(&python.path))?;
    }
    if !met {
        bail!("no interpreter's name begins with {}", args.interpreter);
    }
    Ok(())
}
