//! Interpreters that no distribution packages: built once from a source package, kept in the cache.
//!
//! A mirror keeps a suite's source packages only while they are current, and some drop them sooner than the index says,
//! while others that no index lists any more are still there: a build may name such archives with their digests, and
//! names several suites; it takes the first source that can be fetched. If there is none, `$TACHYON_DEB_SRC` names
//! another archive, as an apt line: `deb-src [trusted=yes] URL SUITE main`. Only the upstream archive of a source
//! package is used.

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
    /// Upstream archives in the mirror's pool, the best first: tried before the suites.
    pool: &'static [Archive],
    /// Where to look for that package, the best first.
    suites: &'static [&'static str],
    /// The compiler for it.
    compiler: Compiler,
    /// Arguments of `configure`.
    configure: &'static [&'static str],
}

/// The upstream archive of one version.
struct Archive {
    version: &'static str,
    sha256: &'static str,
}

/// A compiler for interpreters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Compiler {
    /// The machine's own.
    Gcc,
    /// The same, with another C library.
    MuslGcc,
    /// The first clang with the features that the tail-calling interpreter needs, and its tools.
    Clang19,
}

impl Compiler {
    /// The programs that it needs, and their packages.
    fn programs(self) -> &'static [(&'static str, &'static str)] {
        match self {
            Self::Gcc => &[("gcc", "gcc")],
            Self::MuslGcc => &[("gcc", "gcc"), ("musl-gcc", "musl-tools")],
            Self::Clang19 => &[
                ("clang-19", "clang-19"),
                ("ld.lld-19", "lld-19"),
                ("llvm-profdata-19", "llvm-19"),
                ("/usr/lib/llvm-19/lib/clang/19/lib/linux/libclang_rt.profile-x86_64.a", "libclang-rt-19-dev"),
            ],
        }
    }
}

/// What is still in the pool for 3.14, whose index lists a newer version that is not there.
const POOL_3_14: [Archive; 3] = [
    Archive { version: "3.14.7", sha256: "3b48dac8fb59f62eaa67ac83c1eb12bda1b7a08406dd286e252c11a66be27f81" },
    Archive { version: "3.14.6", sha256: "143b1dddefaec3bd2e21e3b839b34a2b7fb9842272883c576420d605e9f30c63" },
    Archive { version: "3.14.5", sha256: "7e32597b99e5d9a39abed35de4693fa169df3e5850d4c334337ffd6a19a36db6" },
];

/// The first free-threaded version: no tagged references yet, and no per-thread bytecode. Built without the larger
/// optimisations: code unlike any release, but in half the time.
pub(crate) const FREE_THREADED_3_13: Build = Build {
    kind: "built",
    dir: "python3.13t",
    package: "python3.13",
    pool: &[],
    suites: &["trixie", "sid"],
    compiler: Compiler::Gcc,
    configure: &["--disable-gil", "OPT=-DNDEBUG -O1", "CFLAGS=-O1 -g0"],
};

/// Tagged references and per-thread bytecode. With the modules for tests: one of them shows which copy of the bytecode
/// runs.
pub(crate) const FREE_THREADED_3_14: Build = Build {
    kind: "built",
    dir: "python3.14t",
    package: "python3.14",
    pool: &POOL_3_14,
    suites: &["sid"],
    compiler: Compiler::Gcc,
    configure: &["--disable-gil", "--enable-test-modules", "OPT=-DNDEBUG -O1", "CFLAGS=-O1 -g0"],
};

/// The evaluator as one function per instruction, which jump to each other.
pub(crate) const TAIL_CALLS_3_14: Build = Build {
    kind: "tail",
    dir: "python3.14-tail",
    package: "python3.14",
    pool: &POOL_3_14,
    suites: &["sid"],
    compiler: Compiler::Clang19,
    configure: &["--with-tail-call-interp", "CFLAGS=-g0"],
};

/// Built nearly as python-build-standalone builds: tail calls, with profile-guided and link-time optimisation. Without
/// BOLT, whose version 19 crashes on it, and with a shorter profiling run.
pub(crate) const STANDALONE_3_14: Build = Build {
    kind: "standalone",
    dir: "python3.14-standalone",
    package: "python3.14",
    pool: &POOL_3_14,
    suites: &["sid"],
    compiler: Compiler::Clang19,
    configure: &[
        "--with-tail-call-interp",
        "--enable-optimizations",
        "--with-lto=thin",
        "PROFILE_TASK=-m compileall -q -f -d . ./Lib/json ./Lib/email ./Lib/asyncio",
        "CFLAGS=-g0",
        "LDFLAGS=-fuse-ld=lld",
    ],
};

/// Another C library: threads, thread pointers and the loader are not glibc's.
pub(crate) const MUSL_3_13: Build = Build {
    kind: "musl",
    dir: "python3.13-musl",
    package: "python3.13",
    pool: &[],
    suites: &["trixie", "sid"],
    compiler: Compiler::MuslGcc,
    configure: &["OPT=-DNDEBUG -O1", "CFLAGS=-O1 -g0"],
};

/// Neither tests nor pip are needed here.
const CONFIGURE: [&str; 3] = ["-q", "--without-ensurepip", "--disable-test-modules"];

/// What is installed: no byte code, no manual.
const INSTALL: [&str; 5] = ["-s", "altbininstall", "libinstall", "inclinstall", "sharedinstall"];

/// Builds what is missing, all at the same time: each spends a third of its time using only one CPU.
///
/// # Errors
/// For each build that failed: no suite has the source, or it does not build.
pub(crate) fn set_up(zoo: &Path, builds: &[&Build]) -> Vec<(&'static str, anyhow::Error)> {
    let prepare = || {
        let lock = cache::lock(zoo)?;
        let missing: Vec<_> = builds.iter().copied().filter(|build| !build.is_there(zoo)).collect();
        let mut programs = vec![("make", "make"), ("xz", "xz-utils")];
        programs.extend(missing.iter().flat_map(|build| build.compiler.programs()));
        if !missing.is_empty() {
            programs.sort_unstable();
            programs.dedup();
            apt::ensure(&programs)?;
        }
        Ok((lock, missing))
    };
    let (_lock, missing) = match prepare() {
        Ok(prepared) => prepared,
        Err(error) => return vec![("what is built", error)],
    };
    std::thread::scope(|scope| {
        let threads: Vec<_> = missing.iter().map(|build| (build.dir, scope.spawn(|| build.set_up(zoo)))).collect();
        let failed = threads.into_iter().filter_map(|(dir, thread)| match thread.join() {
            Ok(made) => made.err().map(|error| (dir, error)),
            Err(_) => Some((dir, anyhow::anyhow!("its thread has panicked"))),
        });
        failed.collect()
    })
}

impl Build {
    /// Its executable, whether it exists or not.
    pub(crate) fn executable(&self, zoo: &Path, version: &str) -> PathBuf {
        zoo.join(self.dir).join("bin").join(format!("python{version}"))
    }

    /// Builds it; returns at once if it exists.
    fn set_up(&self, zoo: &Path) -> Result<()> {
        let dir = zoo.join(self.dir);
        if self.is_there(zoo) {
            return Ok(());
        }
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
        cache::finish(&dir, &self.stamp())
    }

    fn is_there(&self, zoo: &Path) -> bool {
        cache::is_finished(&zoo.join(self.dir), &self.stamp())
    }

    fn stamp(&self) -> String {
        let musl = self.compiler == Compiler::MuslGcc;
        format!("{} {} musl={musl}\n", self.package, self.configure.join(" "))
    }

    /// Fetches and unpacks the source; returns its directory.
    fn fetch(&self, work: &Path) -> Result<PathBuf> {
        let mut failures = Vec::new();
        let mirror = apt::Mirrors::of_this_machine()?.debian;
        for archive in self.pool {
            match self.fetch_from_pool(&mirror, archive, work) {
                Ok(source) => return Ok(source),
                Err(error) => failures.push(format!("  pool, {}: {error:#}", archive.version)),
            }
        }
        let lines = self.suites.iter().map(|suite| format!("deb-src {mirror} {suite} main"));
        for line in lines.chain(std::env::var("TACHYON_DEB_SRC").ok()) {
            match self.fetch_from(&line, work) {
                Ok(source) => return Ok(source),
                Err(error) => failures.push(format!("  {line}: {error:#}")),
            }
        }
        bail!(
            "nobody has the source of {}:\n{}\nhint: TACHYON_DEB_SRC='deb-src [trusted=yes] URL SUITE main'",
            self.package,
            failures.join("\n")
        )
    }

    fn fetch_from(&self, line: &str, work: &Path) -> Result<PathBuf> {
        let sources = apt::Sources::open(&work.join("archive"), &format!("{line}\n"))?;
        let file = sources.upstream(self.package)?;
        Self::unpack(&file, work)
    }

    fn fetch_from_pool(&self, mirror: &str, archive: &Archive, work: &Path) -> Result<PathBuf> {
        fs::create_dir_all(work).with_context(|| format!("cannot create {}", work.display()))?;
        let name = format!("{}_{}.orig.tar.xz", self.package, archive.version);
        let file = work.join(&name);
        let initial = &self.package[..1];
        let url = format!("{}/pool/main/{initial}/{}/{name}", mirror.trim_end_matches('/'), self.package);
        apt::download(&url, archive.sha256, &file)?;
        Self::unpack(&file, work)
    }

    fn unpack(file: &Path, work: &Path) -> Result<PathBuf> {
        let source = work.join("source");
        fs::create_dir_all(&source).with_context(|| format!("cannot create {}", source.display()))?;
        let mut tar = Command::new("tar");
        tar.arg("-xf").arg(file).arg("-C").arg(&source).arg("--strip-components=1");
        command::run_quietly(&format!("unpacking {}", file.display()), &mut tar)?;
        Ok(source)
    }

    fn build(&self, source: &Path, prefix: &Path) -> Result<()> {
        let mut configure = Command::new(source.join("configure"));
        configure.current_dir(source).arg(format!("--prefix={}", prefix.display()));
        configure.args(CONFIGURE).args(self.configure);
        match self.compiler {
            Compiler::Gcc => {}
            Compiler::Clang19 => {
                configure.arg("CC=clang-19");
                // `configure` only accepts full paths.
                for (variable, tool) in [("LLVM_AR", "llvm-ar"), ("LLVM_PROFDATA", "llvm-profdata")] {
                    configure.arg(format!("{variable}=/usr/lib/llvm-19/bin/{tool}"));
                }
            }
            Compiler::MuslGcc => {
                // CPython compares the compiler's idea of the platform with its own: gcc's is Debian's, with glibc.
                let compiler = source.join("musl-cc");
                let script = "#!/bin/sh\ncase \"$1\" in --print-multiarch) exit 0;; esac\nexec musl-gcc \"$@\"\n";
                fs::write(&compiler, script).with_context(|| format!("cannot write {}", compiler.display()))?;
                command::run(Command::new("chmod").arg("+x").arg(&compiler))?;
                // The machine's libraries are built for glibc.
                configure.arg(format!("CC={}", compiler.display())).arg("PKG_CONFIG=false");
            }
        }
        let step = |what: &str, command: &mut Command| command::run_beside(&format!("{}: {what}", self.dir), command);
        let jobs = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        step("configure", &mut configure)?;
        let make = || {
            let mut make = Command::new("nice");
            make.arg("make").current_dir(source);
            make
        };
        step("make", make().arg("-s").arg(format!("-j{jobs}")))?;
        step("make install", make().args(INSTALL))
    }
}
