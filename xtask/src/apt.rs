//! Debian's package tools: installing what is missing here, and fetching packages from other suites without installing
//! them.
//!
//! The mirrors are those that this machine's own apt is configured with, never hard-coded ones.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};

use crate::{cache, command};

/// The archives that this machine's apt reads.
pub(crate) struct Mirrors {
    /// The one with the ordinary suites.
    pub(crate) debian: String,
    /// The one with the `-security` suites, when apt is configured with it.
    pub(crate) security: Option<String>,
}

impl Mirrors {
    /// Asks apt, which understands both forms of its sources.
    ///
    /// # Errors
    /// This machine's apt reads no Debian archive.
    pub(crate) fn of_this_machine() -> Result<Self> {
        let targets = || {
            command::stdout(Command::new("apt-get").args([
                "indextargets",
                "--format",
                "$(REPO_URI) $(ORIGIN) $(LABEL)",
                "Created-By: Packages",
            ]))
            .context("this task needs a Debian machine with apt")
        };
        // The origin is known once the index has been read.
        if let Some(mirrors) = Self::parse(&targets()?) {
            return Ok(mirrors);
        }
        update()?;
        Self::parse(&targets()?).context("apt is configured with no archive of Debian\nhint: see /etc/apt/sources.list")
    }

    fn parse(targets: &str) -> Option<Self> {
        let labelled = |wanted: &str| {
            targets.lines().find_map(|line| match line.split(' ').collect::<Vec<_>>()[..] {
                [uri, "Debian", label] if label == wanted => Some(uri.to_owned()),
                _ => None,
            })
        };
        Some(Self { debian: labelled("Debian")?, security: labelled("Debian-Security") })
    }
}

fn update() -> Result<()> {
    command::run_quietly("apt-get update", Command::new("apt-get").args(["-o", NO_EXPIRY, "update"]))
}

/// A mirror may be a snapshot, older than its index allows.
pub(crate) const NO_EXPIRY: &str = "Acquire::Check-Valid-Until=false";

/// Installs the packages whose program is missing: pairs of (program, package).
///
/// # Errors
/// Not root, or apt cannot install them.
pub(crate) fn ensure(programs: &[(&str, &str)]) -> Result<()> {
    let missing: Vec<&str> =
        programs.iter().filter(|(program, _)| command::find(program).is_none()).map(|&(_, package)| package).collect();
    if missing.is_empty() {
        return Ok(());
    }
    let list = missing.join(" ");
    command::require_root(&format!("installing {list}"))?;
    update()?;
    command::run_quietly(
        &format!("apt-get install {list}"),
        Command::new("apt-get")
            .env("DEBIAN_FRONTEND", "noninteractive")
            .args(["install", "--yes", "--no-install-recommends"])
            .args(missing),
    )
}

/// One suite's package index in a private directory: this machine's own apt stays as it is.
pub(crate) struct Suite {
    config: PathBuf,
    dir: PathBuf,
}

impl Suite {
    /// Reads the index of `suite` (and its security suite) into `dir`, unless it is there already.
    pub(crate) fn open(dir: &Path, suite: &str, mirrors: &Mirrors) -> Result<Self> {
        Self::open_for(dir, suite, mirrors, "")
    }

    /// The same for packages of an architecture other than this machine's, by Debian's name for it.
    pub(crate) fn open_for(dir: &Path, suite: &str, mirrors: &Mirrors, architecture: &str) -> Result<Self> {
        let opened = Self { config: dir.join("apt.conf"), dir: dir.to_owned() };
        let mut sources = format!("deb {} {suite} main\n", mirrors.debian);
        // sid has no security suite; before bullseye it had another name.
        if let Some(security) = mirrors.security.as_ref().filter(|_| suite != "sid") {
            sources.push_str(&format!("deb {security} {suite}-security main\n"));
        }
        if !cache::is_finished(dir, &sources) {
            opened.write(&sources, architecture)?;
            opened.update(suite)?;
            cache::finish(dir, &sources)?;
        }
        Ok(opened)
    }

    /// Reads the index again, for instance when the archive no longer has what it lists.
    pub(crate) fn update(&self, suite: &str) -> Result<()> {
        let what = format!("reading the package index of {suite}");
        command::run_quietly(&what, self.command("apt-get").args(["-o", NO_EXPIRY, "update"]))
    }

    fn write(&self, sources: &str, architecture: &str) -> Result<()> {
        cache::remove(&self.dir)?;
        for sub in ["lists/partial", "archives/partial", "parts"] {
            let path = self.dir.join(sub);
            fs::create_dir_all(&path).with_context(|| format!("cannot create {}", path.display()))?;
        }
        let dir = self.dir.display();
        let architecture = match architecture {
            "" => String::new(),
            other => format!("APT::Architecture \"{other}\";\nAPT::Architectures {{ \"{other}\"; }};\n"),
        };
        let config = format!(
            "{architecture}Dir::Etc::SourceList \"{dir}/sources.list\";\nDir::Etc::SourceParts \"{dir}/parts\";\n\
             Dir::State \"{dir}\";\nDir::State::Lists \"{dir}/lists\";\nDir::State::Status \"{dir}/status\";\n\
             Dir::Cache \"{dir}\";\nDir::Cache::Archives \"{dir}/archives\";\n\
             APT::Sandbox::User \"root\";\nAcquire::Languages \"none\";\n"
        );
        for (name, text) in [("sources.list", sources), ("status", ""), ("apt.conf", &config)] {
            let path = self.dir.join(name);
            fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))?;
        }
        Ok(())
    }

    fn command(&self, program: &str) -> Command {
        let mut command = Command::new(program);
        command.env("APT_CONFIG", &self.config).current_dir(&self.dir);
        command
    }

    /// The packages whose name matches, with every version the index lists: (package, version), newest first.
    pub(crate) fn versions(&self, name_pattern: &str) -> Result<Vec<(String, String)>> {
        let found = command::stdout(self.command("apt-cache").args(["search", "--names-only", name_pattern]))?;
        let mut all = Vec::new();
        for name in found.lines().filter_map(|line| line.split(' ').next()) {
            let madison = command::stdout(self.command("apt-cache").args(["madison", name]))?;
            for line in madison.lines() {
                if let [package, version, _] = line.split('|').map(str::trim).collect::<Vec<_>>()[..] {
                    all.push((package.to_owned(), version.to_owned()));
                }
            }
        }
        all.sort_by_key(|(_, version)| std::cmp::Reverse(natural(version)));
        all.dedup();
        Ok(all)
    }

    /// Fetches one package and unpacks it into `target`, without installing anything.
    pub(crate) fn unpack(&self, package: &str, version: &str, target: &Path) -> Result<()> {
        let dir = tempfile::tempdir_in(&self.dir).context("cannot create a directory for a package")?;
        let wanted = format!("{package}={version}");
        command::run_quietly(
            &format!("fetching {package} {version}"),
            self.command("apt-get").current_dir(dir.path()).arg("download").arg(wanted),
        )?;
        let file = fs::read_dir(dir.path())?
            .filter_map(Result::ok)
            .map(|entry| entry.path())
            .find(|path| path.extension().is_some_and(|extension| extension == "deb"))
            .with_context(|| format!("apt-get downloaded no file for {package}"))?;
        command::run_quietly(&format!("unpacking {package}"), Command::new("dpkg-deb").arg("-x").arg(file).arg(target))
    }
}

/// The source packages of one suite, in a private directory.
pub(crate) struct Sources(Suite);

impl Sources {
    /// Reads the index of the suite that `line` names into `dir`.
    pub(crate) fn open(dir: &Path, line: &str) -> Result<Self> {
        let opened = Suite { config: dir.join("apt.conf"), dir: dir.to_owned() };
        opened.write(line, "")?;
        opened.update(line.trim())?;
        Ok(Self(opened))
    }

    /// Fetches what it can of a package, in the newest version that the archive has; the upstream tarball is enough.
    pub(crate) fn upstream(&self, package: &str) -> Result<PathBuf> {
        let listed = command::stdout(self.0.command("apt-cache").args(["showsrc", "--only-source", package]))?;
        let mut versions: Vec<&str> = listed.lines().filter_map(|line| line.strip_prefix("Version: ")).collect();
        versions.sort_by_key(|version| std::cmp::Reverse(natural(version)));
        let mut failure = anyhow::anyhow!("the index lists no source of {package}");
        for version in versions {
            match self.upstream_of(package, version) {
                Ok(file) => return Ok(file),
                Err(error) => failure = error,
            }
        }
        Err(failure)
    }

    fn upstream_of(&self, package: &str, version: &str) -> Result<PathBuf> {
        let Suite { dir, .. } = &self.0;
        let wanted = format!("{package}={version}");
        // A mirror that has lost one of the package's files has not lost all of them.
        let fetched = command::run_quietly(
            &format!("fetching the source of {package} {version}"),
            self.0.command("apt-get").args(["source", "--download-only", "--only-source", &wanted]),
        );
        let is_upstream = |path: &PathBuf| {
            let name = path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
            name.starts_with(package) && name.contains(".orig.tar.") && !name.ends_with(".asc")
        };
        let found = fs::read_dir(dir)?.filter_map(Result::ok).map(|entry| entry.path()).find(is_upstream);
        match (found, fetched) {
            (Some(file), _) => Ok(file),
            (None, Err(error)) => Err(error),
            (None, Ok(())) => anyhow::bail!("apt-get fetched no upstream archive of {package} {version}"),
        }
    }
}

/// Fetches one file of an archive with apt's own client, which compares its SHA-256.
///
/// # Errors
/// The archive does not have it, or has a different one.
pub(crate) fn download(url: &str, sha256: &str, file: &Path) -> Result<()> {
    let mut helper = Command::new("/usr/lib/apt/apt-helper");
    helper.args(["-o", "APT::Sandbox::User=root", "download-file", url]).arg(file).arg(format!("SHA256:{sha256}"));
    command::run_quietly(&format!("fetching {url}"), &mut helper)
}

/// A version split into its numbers, which orders the kernels of one suite.
fn natural(version: &str) -> Vec<u64> {
    version.split(|c: char| !c.is_ascii_digit()).filter_map(|number| number.parse().ok()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mirrors_are_told_apart_by_label() {
        let targets =
            "http://a.example/debian/ Debian Debian\nhttp://s.example/ Debian Debian-Security\nhttp://n.example/  \n";
        let mirrors = Mirrors::parse(targets).unwrap();
        assert_eq!(mirrors.debian, "http://a.example/debian/");
        assert_eq!(mirrors.security.as_deref(), Some("http://s.example/"));
        assert!(Mirrors::parse("http://n.example/ . nodistro\n").is_none());
    }

    #[test]
    fn versions_order_by_number() {
        assert!(natural("5.10.223-1") < natural("5.10.1000-1"));
        assert!(natural("7.2.13-1") > natural("7.2.9-3"));
    }
}
