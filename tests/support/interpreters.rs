//! The fixed list of interpreters. A missing one fails the tests that need it; nothing is skipped silently.

use std::path::PathBuf;
use std::process::Command;

/// Where an interpreter comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// pyenv's newest patch release of the minor version: `--enable-shared`.
    Pyenv,
    /// Debian's own: static, stripped, not position-independent.
    Debian,
    /// Debian sid's, in its chroot: files under another root, and the newest versions.
    Sid,
    /// Built or put together by `cargo xtask zoo`, under this name in its cache.
    Built(&'static str),
}

/// Name (as tests use it), source and version of each; a `t` ends the version of a free-threaded build, a `d` that of a
/// debug build. The last ones are those that only `cargo xtask zoo --all` sets up, see [`on_each_interpreter`].
///
/// [`on_each_interpreter`]: crate::on_each_interpreter
pub const INTERPRETERS: [(&str, Source, &str); 18] = [
    ("pyenv_3_8", Source::Pyenv, "3.8"),
    ("pyenv_3_9", Source::Pyenv, "3.9"),
    ("pyenv_3_10", Source::Pyenv, "3.10"),
    ("pyenv_3_11", Source::Pyenv, "3.11"),
    ("pyenv_3_12", Source::Pyenv, "3.12"),
    ("pyenv_3_13", Source::Pyenv, "3.13"),
    ("debian_3_11", Source::Debian, "3.11"),
    ("sid_3_14", Source::Sid, "3.14"),
    ("sid_3_15", Source::Sid, "3.15"),
    ("built_3_13t", Source::Built("python3.13t"), "3.13t"),
    ("musl_3_13", Source::Built("python3.13-musl"), "3.13"),
    ("built_3_14t", Source::Built("python3.14t"), "3.14t"),
    ("wheel_3_15t", Source::Built("python3.15t-wheel"), "3.15t"),
    ("sid_3_14d", Source::Sid, "3.14d"),
    ("sid_3_15d", Source::Sid, "3.15d"),
    ("wheel_3_14t", Source::Built("python3.14t-wheel"), "3.14t"),
    ("tail_3_14", Source::Built("python3.14-tail"), "3.14"),
    ("standalone_3_14", Source::Built("python3.14-standalone"), "3.14"),
];

/// How many at the end of the list are not run by any test in CI.
const EXTRA: usize = 5;

/// One interpreter of the list.
#[derive(Clone, Debug)]
pub struct Interpreter {
    /// Its name in the list.
    pub name: &'static str,
    /// Its minor version: 11 for 3.11.
    pub minor: u32,
    /// It has no GIL.
    pub free_threaded: bool,
    /// It was configured `--with-pydebug`: several times slower, even between two instructions of a program.
    pub debug: bool,
    /// The executable, as seen inside of `root`.
    pub path: PathBuf,
    /// Its root directory, if that is not the test's own.
    pub root: Option<PathBuf>,
}

impl Interpreter {
    /// The interpreter of this name.
    ///
    /// # Panics
    /// When it is missing; the message says how to get it.
    #[must_use]
    pub fn named(name: &str) -> Self {
        let (name, source, version) =
            *INTERPRETERS.iter().find(|(known, ..)| *known == name).expect("the name is in the list");
        let program = format!("python{version}");
        let (path, root, hint) = match source {
            Source::Pyenv => (newest(version), None, format!("pyenv install {version}")),
            Source::Debian => {
                (Some(PathBuf::from("/usr/bin").join(&program)), None, format!("apt-get install {program}"))
            }
            Source::Sid => {
                let path = PathBuf::from("/usr/bin").join(&program);
                (Some(path), Some(zoo().join("sid")), "cargo xtask zoo".to_owned())
            }
            Source::Built(dir) => {
                (Some(zoo().join(dir).join("bin").join(&program)), None, "cargo xtask zoo".to_owned())
            }
        };
        let there = |path: &PathBuf| match &root {
            Some(root) => root.join(path.strip_prefix("/").unwrap_or(path)).is_file(),
            None => path.is_file(),
        };
        let path = path.filter(there);
        let path =
            path.unwrap_or_else(|| panic!("{name}: interpreter is missing\nhint: {hint}, or `cargo xtask test`"));
        let free_threaded = version.ends_with('t');
        let minor = version.trim_end_matches(['t', 'd']).rsplit('.').next().and_then(|minor| minor.parse().ok());
        let minor = minor.expect("versions look like 3.11");
        Self { name, minor, free_threaded, debug: version.ends_with('d'), path, root }
    }

    /// Those that run in the test's own root directory, unchanged from a distribution's packages or pyenv.
    ///
    /// # Panics
    /// When one is missing.
    #[must_use]
    pub fn at_home() -> Vec<Self> {
        let home = |source: Source| matches!(source, Source::Pyenv | Source::Debian);
        INTERPRETERS.iter().filter(|(_, source, _)| home(*source)).map(|(name, ..)| Self::named(name)).collect()
    }

    /// How many of the list every test run uses.
    #[must_use]
    pub fn everywhere() -> usize {
        INTERPRETERS.len() - EXTRA
    }

    /// Whether `cframe` is published before it is filled: then a sample may find the thread entering the evaluator.
    #[must_use]
    pub fn has_entering_window(&self) -> bool {
        matches!(self.minor, 11 | 12)
    }

    /// Whether its compiler has put the store that publishes a frame before the one that completes its entry frame: one
    /// instruction, which some recordings hit and others do not.
    #[must_use]
    pub fn may_link_late(&self) -> bool {
        self.name.starts_with("wheel_")
    }

    /// A command that runs it, writing no byte code anywhere and ignoring the caller's settings.
    #[must_use]
    pub fn command(&self) -> Command {
        let mut command = match &self.root {
            Some(root) => {
                let mut command = Command::new("chroot");
                command.arg(root).arg(&self.path);
                command
            }
            None => Command::new(&self.path),
        };
        command.arg("-B").env("PYTHONNOUSERSITE", "1").env_remove("PYTHONPATH").env_remove("PYTHONHOME");
        command
    }
}

/// Where everything is kept that is fetched or made once.
pub(crate) fn cache() -> PathBuf {
    let cache = std::env::var_os("TACHYON_CACHE").map(PathBuf::from);
    let cache = cache.or_else(|| std::env::home_dir().map(|home| home.join(".cache/tachyon-bpf")));
    cache.expect("there is a home directory")
}

/// Where `cargo xtask zoo` puts what it makes.
fn zoo() -> PathBuf {
    cache().join("zoo")
}

fn newest(version: &str) -> Option<PathBuf> {
    let root = std::env::var_os("PYENV_ROOT")
        .map(PathBuf::from)
        .or_else(|| std::env::home_dir().map(|home| home.join(".pyenv")))?;
    let patch = |name: &str| name.strip_prefix(version)?.strip_prefix('.')?.parse::<u32>().ok();
    std::fs::read_dir(root.join("versions"))
        .ok()?
        .filter_map(|entry| {
            let entry = entry.ok()?;
            Some((patch(entry.file_name().to_str()?)?, entry.path().join("bin").join(format!("python{version}"))))
        })
        .max()
        .map(|(_, path)| path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_unique_and_speak_of_the_version() {
        for (index, (name, _, version)) in INTERPRETERS.iter().enumerate() {
            assert!(name.ends_with(&version.replace('.', "_")), "{name}");
            assert!(INTERPRETERS[..index].iter().all(|(other, ..)| other != name));
        }
    }
}
