//! The programs that read exports: both `pprof`s, the Firefox profiler's importer, and where the others are.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;
use tempfile::TempDir;

/// Flat and cumulative samples by name.
pub type Costs = BTreeMap<String, (u64, u64)>;

/// The directory of the npm packages, or `None` if the readers are not installed.
pub fn tools() -> Option<PathBuf> {
    let cache = std::env::var_os("TACHYON_CACHE")
        .map_or_else(|| std::env::home_dir().unwrap_or_default().join(".cache/tachyon-bpf"), PathBuf::from);
    let tools = cache.join("tools");
    let installed = tools.join("node_modules/speedscope").is_dir()
        && ["go", "google-pprof", "chromium"].iter().all(|program| {
            std::env::split_paths(&std::env::var_os("PATH").unwrap_or_default())
                .any(|directory| directory.join(program).is_file())
        });
    if !installed {
        crate::not_run("the readers of exports\nhint: cargo xtask tools");
        return None;
    }
    Some(tools)
}

/// Runs a program that must succeed.
pub fn run(command: &mut Command) -> String {
    let output = command.output().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{command:?}: {text}{}", String::from_utf8_lossy(&output.stderr));
    text
}

/// The table that both print: flat, its share, the sum of shares, cumulative, its share, name.
fn costs(rows: &str) -> Costs {
    let costs = rows.lines().map(|row| {
        let words: Vec<&str> = row.split_whitespace().collect();
        let number = |place: usize| words[place].parse().unwrap_or_else(|_| panic!("{row}"));
        (words[5..].join(" "), (number(0), number(3)))
    });
    costs.collect()
}

/// What `go tool pprof` reports: costs, and its total.
pub fn go_pprof(file: &Path, more: &[&str]) -> (Costs, String) {
    let text = run(Command::new("go")
        .args(["tool", "pprof", "-sample_index=samples", "-top", "-nodecount=10000", "-nodefraction=0"])
        .args(["-edgefraction=0"])
        .args(more)
        .arg(file)
        .env("PPROF_TMPDIR", file.parent().unwrap()));
    let (head, rows) = text.split_once("cum%\n").unwrap_or_else(|| panic!("{text}"));
    (costs(rows), head.to_owned())
}

/// What Perl's pprof reports.
pub fn perl_pprof(file: &Path, more: &[&str]) -> (Costs, String) {
    let text = run(Command::new("google-pprof")
        .args(["--text", "--nodecount=10000", "--nodefraction=0", "--edgefraction=0"])
        .args(more)
        .arg("/usr/bin/python3")
        .arg(file));
    let (head, rows) = text.split_once('\n').unwrap_or_else(|| panic!("{text}"));
    (costs(rows), head.to_owned())
}

/// A profile in the Firefox profiler, by its own importer as a command line.
#[derive(Debug)]
pub struct Firefox {
    cli: PathBuf,
    home: TempDir,
}

impl Firefox {
    /// Loads a file.
    ///
    /// # Panics
    /// When the importer refuses it.
    #[must_use]
    pub fn load(tools: &Path, file: &Path) -> Self {
        let cli = tools.join("node_modules/@firefox-devtools/profiler-cli/dist/profiler-cli.js");
        let this = Self { cli, home: tempfile::tempdir().expect("a temporary directory can be made") };
        // It gives its daemon half a second to start, which is not always enough on a busy machine.
        for attempt in 1.. {
            let file = file.to_str().expect("a path of a test is text");
            let loaded = this.command(&["load", file]).output().expect("node can be run");
            if loaded.status.success() {
                break;
            }
            let told = String::from_utf8_lossy(&loaded.stderr).into_owned();
            assert!(attempt < 20 && told.contains("did not become ready"), "{told}");
            let late = told.split("running as pid ").nth(1).and_then(|rest| rest.split(',').next());
            if let Some(pid) = late {
                // It may have ended meanwhile.
                let _gone = Command::new("kill").arg(pid).output();
            }
        }
        this
    }

    fn command(&self, words: &[&str]) -> Command {
        let (mut command, home) = (Command::new("node"), self.home.path());
        command.arg(&self.cli).args(words).env("HOME", home).env("XDG_RUNTIME_DIR", home).current_dir(home);
        command
    }

    /// What it says about the file.
    ///
    /// # Panics
    /// When it fails.
    #[must_use]
    pub fn query(&self, words: &[&str]) -> String {
        run(&mut self.command(words))
    }
}

impl Drop for Firefox {
    fn drop(&mut self) {
        // Its daemon may have ended by itself.
        let _gone = self.command(&["stop", "--all"]).output();
    }
}
