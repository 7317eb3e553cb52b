//! Interpreters that no distribution packages: built once from a source package, kept in the cache.
//!
//! A mirror keeps a suite's source packages only while they are current, and some drop them sooner than the index says:
//! each build names several suites and takes the first whose source can be fetched. Where none has it,
//! `$TACHYON_DEB_SRC` names another archive, as a line of apt's: `deb-src [trusted=yes] URL SUITE main`. Only the
//! upstream archive of a source package is used.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::{apt, cache, command};

/// A build.
pub(crate) struct Build {
    /// First part of its name in the list.
    pub(crate) kind: &'static str,
    /// Its directory in the cache.
    dir: &'static str,
    /// Source package, for instance `python3.14`.
    package: &'static str,
    /// Where to look for that package, the best first.
    suites: &'static [&'static str],
    /// Arguments of `configure`.
    configure: &'static [&'static str],
    /// Whether the C library is musl.
    musl: bool,
}

/// The first free-threaded version: no tagged references yet, and no per-thread bytecode. Built without the optimiser's
/// larger tricks: code that nobody's release has, and half the time.
pub(crate) const FREE_THREADED_3_13: Build = Build {
    kind: "built",
    dir: "python3.13t",
    package: "python3.13",
    suites: &["trixie", "sid"],
    configure: &["--disable-gil", "OPT=-DNDEBUG -O1", "CFLAGS=-O1 -g0"],
    musl: false,
};

/// Another C library: threads, thread pointers and the loader are not glibc's.
pub(crate) const MUSL_3_13: Build = Build {
    kind: "musl",
    dir: "python3.13-musl",
    package: "python3.13",
    suites: &["trixie", "sid"],
    configure: &["OPT=-DNDEBUG -O1", "CFLAGS=-O1 -g0"],
    musl: true,
};

/// Tagged references and per-thread bytecode.
pub(crate) const FREE_THREADED_3_14: Build = Build {
    kind: "built",
    dir: "python3.14t",
    package: "python3.14",
    suites: &["sid", "forky"],
    configure: &["--disable-gil", "OPT=-DNDEBUG -O1", "CFLAGS=-O1 -g0"],
    musl: false,
};

/// Neither tests nor pip are of use here.
const CONFIGURE: [&str; 3] = ["-q", "--without-ensurepip", "--disable-test-modules"];

/// What is installed: no byte code, no manual.
const INSTALL: [&str; 5] = ["-s", "altbininstall", "libinstall", "inclinstall", "sharedinstall"];

impl Build {
    /// Its executable, whether it exists or not.
    pub(crate) fn executable(&self, zoo: &Path, version: &str) -> PathBuf {
        zoo.join(self.dir).join("bin").join(format!("python{version}"))
    }

    /// Builds it; returns at once when it is there.
    ///
    /// # Errors
    /// No suite has the source, or it does not build.
    pub(crate) fn set_up(&self, zoo: &Path) -> Result<()> {
        let dir = zoo.join(self.dir);
        let _lock = cache::lock(zoo)?;
        let stamp = format!("{} {} musl={}\n", self.package, self.configure.join(" "), self.musl);
        if cache::is_finished(&dir, &stamp) {
            return Ok(());
        }
        let mut packages = vec![("gcc", "gcc"), ("make", "make"), ("xz", "xz-utils")];
        if self.musl {
            packages.push(("musl-gcc", "musl-tools"));
        }
        apt::ensure(&packages)?;
        cache::remove(&dir)?;
        let work = zoo.join(format!("{}.build", self.dir));
        cache::remove(&work)?;
        let source = match self.fetch(&work) {
            Ok(source) => source,
            Err(error) => {
                cache::remove(&work)?;
                return Err(error);
            }
        };
        eprintln!("building {} in {} (some minutes)", self.dir, work.display());
        self.build(&source, &dir)?;
        cache::remove(&work)?;
        cache::finish(&dir, &stamp)
    }

    /// Fetches and unpacks the source; gives its directory.
    fn fetch(&self, work: &Path) -> Result<PathBuf> {
        let mut failures = Vec::new();
        let mirror = apt::Mirrors::of_this_machine()?.debian;
        let lines = self.suites.iter().map(|suite| format!("deb-src {mirror} {suite} main"));
        for line in lines.chain(std::env::var("TACHYON_DEB_SRC").ok()) {
            match self.fetch_from(&line, work) {
                Ok(source) => return Ok(source),
                Err(error) => failures.push(format!("  {line}: {error:#}")),
            }
        }
        bail!(
            "no suite has the source of {}:\n{}\nhint: TACHYON_DEB_SRC='deb-src [trusted=yes] URL SUITE main'",
            self.package,
            failures.join("\n")
        )
    }

    fn fetch_from(&self, line: &str, work: &Path) -> Result<PathBuf> {
        let sources = apt::Sources::open(&work.join("archive"), &format!("{line}\n"))?;
        let file = sources.upstream(self.package)?;
        let source = work.join("source");
        fs::create_dir_all(&source).with_context(|| format!("cannot create {}", source.display()))?;
        let mut tar = Command::new("tar");
        tar.arg("-xf").arg(&file).arg("-C").arg(&source).arg("--strip-components=1");
        command::run_quietly(&format!("unpacking {}", file.display()), &mut tar)?;
        Ok(source)
    }

    fn build(&self, source: &Path, prefix: &Path) -> Result<()> {
        let mut configure = Command::new(source.join("configure"));
        configure.current_dir(source).arg(format!("--prefix={}", prefix.display()));
        configure.args(CONFIGURE).args(self.configure);
        if self.musl {
            // CPython compares the compiler's idea of the platform with its own: gcc's is Debian's, with glibc.
            let compiler = source.join("musl-cc");
            let script = "#!/bin/sh\ncase \"$1\" in --print-multiarch) exit 0;; esac\nexec musl-gcc \"$@\"\n";
            fs::write(&compiler, script).with_context(|| format!("cannot write {}", compiler.display()))?;
            command::run(Command::new("chmod").arg("+x").arg(&compiler))?;
            // Libraries of the machine are built for glibc.
            configure.arg(format!("CC={}", compiler.display())).arg("PKG_CONFIG=false");
        }
        let jobs = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        command::run_quietly("configure", &mut configure)?;
        let make = || {
            let mut make = Command::new("nice");
            make.arg("make").current_dir(source);
            make
        };
        command::run_quietly("make", make().arg("-s").arg(format!("-j{jobs}")))?;
        command::run_quietly("make install", make().args(INSTALL))
    }
}
