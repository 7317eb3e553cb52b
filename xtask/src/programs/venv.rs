//! What the programs need from PyPI: three virtual environments in the cache, each file pinned by its digest.

use crate::{cache, command, zoo};
use anyhow::{Context as _, Result};
use std::path::PathBuf;
use std::process::Command;

/// The interpreter: wheels are for one minor version, and so are their digests.
pub(super) const MINOR: &str = "3.13";

/// A virtual environment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Venv {
    /// Arrays, tables and learning; torch with its CUDA libraries: 7 GiB.
    Libraries,
    /// Servers, workers and schedulers: 0.7 GiB.
    Services,
    /// What `--quick` needs, and py-spy.
    Small,
}

impl Venv {
    fn parts(self) -> (&'static str, &'static str) {
        match self {
            Self::Libraries => ("libraries", include_str!("../../programs/requirements/libraries.txt")),
            Self::Services => ("services", include_str!("../../programs/requirements/services.txt")),
            Self::Small => ("small", include_str!("../../programs/requirements/small.txt")),
        }
    }

    /// Its interpreter; installed if needed.
    ///
    /// # Errors
    /// A package is not available, or is not the pinned one.
    pub fn python(self) -> Result<PathBuf> {
        let (name, requirements) = self.parts();
        let all = cache::dir()?.join("programs");
        let venv = all.join(name);
        let python = venv.join("bin/python");
        let _lock = cache::lock(&all)?;
        if cache::is_finished(&venv, requirements) {
            return Ok(python);
        }
        let base = zoo::in_pyenv(MINOR).with_context(|| format!("hint: pyenv install {MINOR}"))?;
        cache::remove(&venv)?;
        command::run_quietly("making a virtual environment", Command::new(base.path).args(["-m", "venv"]).arg(&venv))?;
        let wanted = venv.join("wanted.txt");
        std::fs::write(&wanted, requirements).with_context(|| format!("cannot write {}", wanted.display()))?;
        let mut line = Command::new(&python);
        line.args(["-m", "pip", "install", "--disable-pip-version-check", "--no-deps", "--only-binary=:all:"]);
        line.args(["--no-cache-dir", "--require-hashes", "--requirement"]).arg(&wanted);
        command::run_quietly(&format!("installing {} packages: {name}", requirements.lines().count()), &mut line)?;
        cache::finish(&venv, requirements)?;
        Ok(python)
    }

    /// Names and versions of the packages that a page shows.
    pub fn versions(self) -> impl Iterator<Item = (&'static str, &'static str)> {
        self.parts().1.lines().filter_map(|line| line.split(' ').next()?.split_once("=="))
    }
}

/// The other profiler.
///
/// # Errors
/// It is not available.
pub(super) fn py_spy() -> Result<PathBuf> {
    Ok(Venv::Small.python()?.with_file_name("py-spy"))
}
