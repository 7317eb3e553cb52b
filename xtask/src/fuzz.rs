//! The coverage-guided fuzzers: libFuzzer's, through cargo-fuzz, on the nightly compiler that the BPF object is built with.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, bail};

use crate::{bpf, cache, command, tools};

/// The newest version as of 2026-11.
const VERSION: &str = "0.13.1";

/// Decoders of untrusted files and records; `fuzz/coverage/` has one program for each.
const TARGETS: [&str; 7] = ["tach", "elf", "eh_frame", "symbols", "line_table", "events", "debug_offsets"];

/// Longest input: decoders do nothing with longer input that they would not do with this.
const MAX_LEN: u32 = 24 << 10;

/// Most bytes of a target's committed corpus; the rest stays in the cache of the machine that found it.
const MAX_CORPUS: u64 = 512 << 10;

/// Arguments of `cargo xtask fuzz`.
#[derive(clap::Args)]
pub(crate) struct FuzzArgs {
    /// Seconds for each target
    #[arg(long, default_value_t = 60)]
    seconds: u64,
    /// How many targets run at a time
    #[arg(long, default_value_t = 1)]
    beside: usize,
    /// Keeps what was found: the committed corpora become the smallest that reach as much
    #[arg(long, conflicts_with = "quick")]
    keep: bool,
    /// The short form: begins with the committed corpora alone, in a build without optimisation (4 minutes of CPU time, not 11)
    #[arg(long)]
    quick: bool,
    /// Only builds
    #[arg(long)]
    no_run: bool,
    /// Targets; all when there is none
    #[arg(value_parser = TARGETS)]
    targets: Vec<String>,
}

/// Runs `cargo xtask fuzz`.
///
/// # Errors
/// The tools are not available, or there is a finding.
pub(crate) fn run(args: &FuzzArgs) -> Result<()> {
    let fuzz = &Fuzz::new(args.quick)?;
    let targets: Vec<&str> = match &args.targets[..] {
        [] => TARGETS.to_vec(),
        targets => targets.iter().map(String::as_str).collect(),
    };
    // One by one: building all would include the fuzzers without libFuzzer, which could not be linked with coverage.
    for target in &targets {
        command::run(fuzz.cargo("build").args(["--features", "coverage", target]))?;
    }
    if args.no_run {
        return Ok(());
    }
    if !args.quick {
        fuzz.seeds()?;
    }
    for targets in targets.chunks(args.beside.max(1)) {
        std::thread::scope(|scope| {
            let run = |target| scope.spawn(move || fuzz.run(target, args));
            let running: Vec<_> = targets.iter().map(|&target| run(target)).collect();
            running.into_iter().try_for_each(|target| target.join().expect("it does not panic"))
        })?;
    }
    Ok(())
}

struct Fuzz {
    /// cargo-fuzz.
    program: PathBuf,
    /// Inputs that were found on this machine but are not committed.
    found: PathBuf,
    quick: bool,
}

impl Fuzz {
    fn new(quick: bool) -> Result<Self> {
        let program = tools::from_crates("cargo-fuzz", VERSION)?;
        bpf::require_tools(true)?;
        let found = if quick { command::project_root().join("target/fuzz/found") } else { cache::dir()?.join("fuzz") };
        if quick {
            cache::remove(&found)?;
        }
        Ok(Self { program, found, quick })
    }

    /// A command of cargo-fuzz, with this project's build.
    fn cargo(&self, verb: &str) -> Command {
        let mut cargo = bpf::nightly(&[]);
        cargo.current_dir(command::project_root()).arg(&self.program).args([
            "fuzz",
            verb,
            "--fuzz-dir",
            "fuzz",
            "--sanitizer",
            "none",
        ]);
        cargo.args(["--target-dir", "target/fuzz"]).env("RUSTUP_TOOLCHAIN", bpf::TOOLCHAIN);
        if self.quick {
            cargo.arg("--dev").env("CARGO_INCREMENTAL", "0");
            return cargo;
        }
        // Decoders have no unsafe code except a cast that Miri has checked, so no sanitizer is needed; debug assertions and
        // overflow checks are cargo-fuzz's default. Without joining all crates it builds in a third of the time.
        cargo
            .env("CARGO_PROFILE_RELEASE_LTO", "off")
            .env("CARGO_PROFILE_RELEASE_CODEGEN_UNITS", "16")
            .env("CARGO_PROFILE_RELEASE_DEBUG", "line-tables-only");
        cargo
    }

    /// Adds the seeds of the random mutation as inputs of these fuzzers.
    fn seeds(&self) -> Result<()> {
        let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
        cargo.current_dir(command::project_root()).args(["run", "--quiet", "--locked", "-p", "tachyon-fuzz", "--"]);
        command::run(cargo.arg("--write-seeds").arg(&self.found).args(TARGETS))
    }

    fn run(&self, target: &str, args: &FuzzArgs) -> Result<()> {
        let found = self.found.join(target);
        std::fs::create_dir_all(&found).with_context(|| format!("cannot create {}", found.display()))?;
        let committed = Path::new("fuzz/corpus").join(target);
        let _there = std::fs::create_dir_all(command::project_root().join(&committed));
        let artifacts = format!("-artifact_prefix={}/", self.found.display());
        let time = format!("-max_total_time={}", args.seconds);
        let bounds = [format!("-max_len={MAX_LEN}"), "-timeout=20".to_owned(), "-rss_limit_mb=2048".to_owned()];
        let mut cargo = self.cargo("run");
        cargo.args(["--features", "coverage", target]).arg(&found).arg(&committed).args(["--", &time, &artifacts]);
        cargo.args(&bounds).args(["-print_final_stats=1", "-verbosity=0", "-use_value_profile=0"]);
        let line = command::shown(&cargo);
        let output = cargo.output().with_context(|| format!("cannot start `{line}`"))?;
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        if !output.status.success() {
            eprintln!("{said}");
            bail!(
                "{target}: a finding\nhint: its input is named above; `{line}` with it in place of the folders repeats it"
            );
        }
        let number = |key: &str| {
            let line = said.lines().find_map(|line| line.strip_prefix(key))?;
            Some(line.trim_start_matches(':').trim().to_owned())
        };
        let executions = number("stat::number_of_executed_units").unwrap_or_default();
        let peak = number("stat::peak_rss_mb").unwrap_or_default();
        println!("{target:<14} {executions:>11} executions in {} s, no finding, {peak} MiB at most", args.seconds);
        if args.keep { self.keep(target, &found, &committed) } else { Ok(()) }
    }

    /// Keeps the smallest set of inputs with the coverage of all; of that the shortest, up to the total size limit.
    fn keep(&self, target: &str, found: &Path, committed: &Path) -> Result<()> {
        let smallest = self.found.join(format!("{target}-smallest"));
        cache::remove(&smallest)?;
        std::fs::create_dir_all(&smallest)?;
        let mut cargo = self.cargo("run");
        cargo.args(["--features", "coverage", target]).arg(&smallest).arg(found).arg(committed);
        command::run_quietly(
            &format!("the smallest corpus of {target}"),
            cargo.args(["--", "-set_cover_merge=1", &format!("-max_len={MAX_LEN}")]),
        )?;
        let committed = command::project_root().join(committed);
        cache::remove(&committed)?;
        std::fs::create_dir_all(&committed)?;
        let mut inputs = Vec::new();
        for input in std::fs::read_dir(&smallest)? {
            let input = input?;
            inputs.push((input.metadata()?.len(), input.file_name()));
        }
        inputs.sort();
        let (all, mut room) = (inputs.len(), MAX_CORPUS);
        inputs.retain(|(len, _)| {
            room = room.saturating_sub(*len);
            room > 0
        });
        for (_, name) in &inputs {
            std::fs::copy(smallest.join(name), committed.join(name))?;
        }
        println!("{target:<14} {} of {all} inputs are kept in {}", inputs.len(), committed.display());
        cache::remove(&smallest)
    }
}
