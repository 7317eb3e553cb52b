//! Debian suites to try packages in: a root for each is made once and kept in the cache; every trial gets a throwaway
//! copy, without a network.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};

use crate::{apt, cache, command};

/// What a minimal Debian lacks: the package's dependencies, and a Python that can install wheels.
const PACKAGES: &str = "systemd,python3-pip,python3-venv";

/// The minimal Debian of a suite.
pub(super) struct Root {
    suite: String,
    dir: PathBuf,
}

impl Root {
    /// Makes it, unless it is in the cache.
    ///
    /// # Errors
    /// Not root, or the archive does not have the suite.
    pub(super) fn of(suite: &str) -> Result<Self> {
        command::require_root("installing packages in a root of their own")?;
        let roots = cache::dir()?.join("roots");
        let dir = roots.join(suite);
        let _lock = cache::lock(&roots)?;
        let stamp = format!("{suite} {PACKAGES}");
        if !cache::is_finished(&dir, &stamp) {
            apt::ensure(&[("debootstrap", "debootstrap")])?;
            cache::remove(&dir)?;
            let program = command::find("debootstrap").context("debootstrap was installed but is not found")?;
            let mut debootstrap = Command::new(program);
            debootstrap.args(["--variant=minbase", &format!("--include={PACKAGES}"), suite]).arg(&dir);
            debootstrap.arg(apt::Mirrors::of_this_machine()?.debian);
            command::run_quietly(&format!("making a root of Debian {suite}"), &mut debootstrap)?;
            // The packages are installed; their archives are a third of the root.
            command::stdout(Command::new("chroot").arg(&dir).args(["apt-get", "clean"]))?;
            cache::finish(&dir, &stamp)?;
        }
        Ok(Self { suite: suite.to_owned(), dir })
    }

    /// Where it is: to be copied, never changed.
    pub(super) fn path(&self) -> &Path {
        &self.dir
    }

    /// Runs a script in a copy, with these files beside it in `/mnt` and their names as its arguments.
    ///
    /// # Errors
    /// The script fails; its last output is in the message.
    pub(super) fn try_out(&self, what: &str, script: &str, files: &[&Path]) -> Result<()> {
        let given = tempfile::tempdir().context("cannot create a directory for a trial")?;
        fs::write(given.path().join("script"), script).context("cannot write a script")?;
        let mut names = Vec::new();
        for file in files {
            let name = file.file_name().with_context(|| format!("{} is no file", file.display()))?;
            fs::copy(file, given.path().join(name)).with_context(|| format!("cannot copy {}", file.display()))?;
            names.push(Path::new("/mnt").join(name));
        }
        let work = tempfile::tempdir().context("cannot create a directory for a trial")?;
        let mut trial = Command::new("unshare");
        trial.args(["--mount", "--pid", "--net", "--fork", "--kill-child", "sh", "-c", THROWAWAY, "sh"]);
        trial.args([self.dir.as_path(), work.path(), given.path()]).args(&names);
        // As on a system that sets no variables.
        trial.env_clear().env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin").env("LC_ALL", "C.UTF-8");
        command::run_quietly(&format!("{what} in Debian {}", self.suite), &mut trial)
    }
}

/// All mounts are in this process's own namespace and end with it.
const THROWAWAY: &str = r#"set -eu
root=$1 work=$2 given=$3
shift 3
mount -t tmpfs tmpfs "$work"
mkdir "$work/upper" "$work/work" "$work/merged"
mount -t overlay -o "lowerdir=$root,upperdir=$work/upper,workdir=$work/work" overlay "$work/merged"
mount --bind "$given" "$work/merged/mnt"
mount -t proc proc "$work/merged/proc"
exec chroot "$work/merged" sh /mnt/script "$@"
"#;
