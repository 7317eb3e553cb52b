//! The only builder of the BPF object, with pinned tools, and the check that the committed object is what it produces.
//!
//! Two builds in different directories give the same bytes: paths are remapped, and the two crates are built in a
//! staged workspace of their own, because cargo hashes the absolute path of a dependency outside of the workspace into
//! its symbols.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};
use object::{Object, ObjectSection};
use serde::Serialize;

use crate::command::{self, project_root};
use crate::digest;

mod slim;

/// `cargo xtask bpf ...`.
#[derive(clap::Subcommand)]
pub(crate) enum BpfCommand {
    /// Build the object and its manifest into tachyon/prebuilt
    Build {
        /// Get the pinned tools that are missing
        #[arg(long)]
        install: bool,
        /// Build the diagnostic object instead, which tells why walks stop, into target/bpf/log
        #[arg(long)]
        log: bool,
    },
    /// Build the object again and compare its bytes with the committed one
    Check {
        /// Get the pinned tools that are missing
        #[arg(long)]
        install: bool,
    },
    /// Get the pinned tools, build nothing
    Install,
    /// Run clippy over the kernel side, with its own toolchain
    Clippy,
}

/// The newest nightly whose LLVM matches the pinned `bpf-linker`.
pub(crate) const TOOLCHAIN: &str = "nightly-2026-05-20";
const LINKER_VERSION: &str = "0.10.3";
const TARGET: &str = "bpfel-unknown-none";
const LICENSE: &str = "Dual MIT/GPL";
/// The program's name in `tachyon-ebpf/Cargo.toml`.
const BINARY: &str = "tachyon";

/// What the object was made from and with, stored beside it in `manifest.toml`.
#[derive(Serialize)]
struct Manifest {
    sources: Sources,
    tools: Tools,
    object: ObjectFacts,
}

#[derive(Serialize)]
struct Sources {
    sha256: String,
}

#[derive(Serialize)]
struct Tools {
    toolchain: &'static str,
    rustc: String,
    bpf_linker: &'static str,
    target: &'static str,
}

#[derive(Serialize)]
struct ObjectFacts {
    file: &'static str,
    license: &'static str,
    sha256: String,
    size: usize,
}

/// Runs `cargo xtask bpf ...`.
///
/// # Errors
/// A tool is missing, the build fails, or (check) the bytes differ.
pub(crate) fn run(command: BpfCommand) -> Result<()> {
    match command {
        BpfCommand::Build { install, log: false } => build(install),
        BpfCommand::Build { install, log: true } => build_with_log(install).map(drop),
        BpfCommand::Check { install } => check(install),
        BpfCommand::Install => require_tools(true),
        BpfCommand::Clippy => clippy(),
    }
}

fn prebuilt() -> PathBuf {
    project_root().join("tachyon/prebuilt")
}

fn build(install: bool) -> Result<()> {
    require_tools(install)?;
    let lock = project_root().join("tachyon-ebpf/Cargo.lock");
    if !lock.is_file() {
        command::run(nightly(&["cargo", "generate-lockfile"]).current_dir(project_root().join("tachyon-ebpf")))?;
    }
    let bytes = build_object(&project_root().join("target/bpf"), &[])?;
    let manifest = manifest_of(&bytes)?;
    let dir = prebuilt();
    fs::create_dir_all(&dir).with_context(|| format!("cannot create {}", dir.display()))?;
    for (name, contents) in [("tachyon.bpf.o", bytes.as_slice()), ("manifest.toml", manifest.as_bytes())] {
        let path = dir.join(name);
        fs::write(&path, contents).with_context(|| format!("cannot write {}", path.display()))?;
    }
    eprintln!(
        "wrote {} ({} bytes, sha256 {})",
        dir.join("tachyon.bpf.o").display(),
        bytes.len(),
        digest::of_bytes(&bytes)
    );
    Ok(())
}

/// Builds the diagnostic object, which is in no archive, and says how to use it.
///
/// # Errors
/// A tool is missing, or the build fails.
pub(crate) fn build_with_log(install: bool) -> Result<PathBuf> {
    require_tools(install)?;
    let dir = project_root().join("target/bpf/log");
    let bytes = build_object(&dir, &["log"])?;
    let path = dir.join("tachyon.bpf.o");
    fs::write(&path, bytes).with_context(|| format!("cannot write {}", path.display()))?;
    eprintln!(
        "wrote {}\nhint: target/debug/tachyon-bpf --bpf-log ... tells on standard error why walks stop",
        path.display()
    );
    Ok(path)
}

/// The text of `manifest.toml`: which sources and which tools gave these bytes.
fn manifest_of(object: &[u8]) -> Result<String> {
    let manifest = Manifest {
        sources: Sources { sha256: digest::of_sources(project_root()).context("cannot read the BPF sources")? },
        tools: Tools {
            toolchain: TOOLCHAIN,
            rustc: command::stdout(&mut nightly(&["rustc", "--version"]))?.trim().to_owned(),
            bpf_linker: LINKER_VERSION,
            target: TARGET,
        },
        object: ObjectFacts {
            file: "tachyon.bpf.o",
            license: LICENSE,
            sha256: digest::of_bytes(object),
            size: object.len(),
        },
    };
    let text = toml::to_string(&manifest).context("cannot write the manifest")?;
    Ok(format!("# Written by `cargo xtask bpf build`, never by hand.\n\n{text}"))
}

fn check(install: bool) -> Result<()> {
    let committed = prebuilt().join("tachyon.bpf.o");
    let committed = fs::read(&committed).with_context(|| {
        format!("cannot read the committed object {}\nhint: cargo xtask bpf build", committed.display())
    })?;
    if let Err(error) = require_tools(install) {
        let verdict = format!("NOT COMPARED: the BPF object was not rebuilt: {error:#}");
        if command::in_ci() {
            bail!(verdict);
        }
        eprintln!("xtask: {verdict}");
        return Ok(());
    }
    let target = tempfile::tempdir().context("cannot create a directory to build in")?;
    let rebuilt = build_object(target.path(), &[])?;
    ensure!(
        rebuilt == committed,
        "the committed BPF object differs from what its sources give: {} bytes, sha256 {}; rebuilt: {} bytes, sha256 {}\n\
         hint: cargo xtask bpf build, then commit tachyon/prebuilt",
        committed.len(),
        digest::of_bytes(&committed),
        rebuilt.len(),
        digest::of_bytes(&rebuilt),
    );
    let manifest = prebuilt().join("manifest.toml");
    let manifest = fs::read_to_string(&manifest).with_context(|| format!("cannot read {}", manifest.display()))?;
    let expected = manifest_of(&rebuilt)?;
    ensure!(
        manifest == expected,
        "the committed manifest of the BPF object is of other sources or tools; it should say\n{expected}\n\
         hint: cargo xtask bpf build, then commit tachyon/prebuilt"
    );
    eprintln!("the committed BPF object is what its sources give: {} bytes, byte for byte", rebuilt.len());
    Ok(())
}

/// The toolchain's clippy is a component of its own, which building does not need.
fn clippy() -> Result<()> {
    require_tools(false)?;
    if command::stdout(&mut nightly(&["cargo", "clippy", "--version"])).is_err() {
        command::run(Command::new("rustup").args(["component", "add", "clippy", "--toolchain", TOOLCHAIN]))?;
    }
    let mut cargo = nightly(&["cargo", "clippy", "--release", "--locked", "-Z", "build-std=core", "--target", TARGET]);
    cargo.current_dir(project_root().join("tachyon-ebpf"));
    cargo.arg("--target-dir").arg(project_root().join("target/bpf/clippy"));
    cargo.env("AYA_BPF_TARGET_ARCH", "x86_64");
    command::run(cargo.args(["--", "-D", "warnings"]))
}

/// Builds in a copy of the sources below `work` and returns the object.
fn build_object(work: &Path, features: &[&str]) -> Result<Vec<u8>> {
    let stage = work.join("stage");
    stage_sources(&stage)?;
    let target_dir = work.join("target");
    let home = |variable: &str, default: &str| {
        std::env::var_os(variable).map(PathBuf::from).or_else(|| Some(std::env::home_dir()?.join(default)))
    };
    let sysroot = command::stdout(&mut nightly(&["rustc", "--print", "sysroot"]))?;
    let mut flags = vec!["-C".to_owned(), format!("linker={}", linker()?.display())];
    // The last match wins: the narrower paths come later.
    let remaps = [
        (home("CARGO_HOME", ".cargo"), "/cargo"),
        (Some(PathBuf::from(sysroot.trim())), "/rust"),
        (Some(target_dir.clone()), "/target"),
        (Some(stage.clone()), "/tachyon-bpf"),
    ];
    for (from, to) in remaps {
        let from = from.context("no home directory for cargo\nhint: set CARGO_HOME")?;
        flags.push(format!("--remap-path-prefix={}={to}", from.display()));
    }
    // Through --config, because these join the flags of tachyon-ebpf/.cargo/config.toml; RUSTFLAGS would replace them.
    let flags = format!("target.{TARGET}.rustflags={flags:?}");
    let mut cargo = nightly(&["cargo", "build", "--release", "--locked", "-Z", "build-std=core", "--target", TARGET]);
    cargo.current_dir(stage.join("tachyon-ebpf")).arg("--config").arg(flags).arg("--target-dir").arg(&target_dir);
    if !features.is_empty() {
        cargo.arg("--features").arg(features.join(","));
    }
    // aya would use the builder's own architecture; the object is the same for all.
    cargo.env("AYA_BPF_TARGET_ARCH", "x86_64");
    command::run(&mut cargo)?;
    let path = target_dir.join(TARGET).join("release").join(BINARY);
    let bytes = fs::read(&path).with_context(|| format!("cannot read {}", path.display()))?;
    let bytes = slim::slim(&bytes)?;
    inspect(&bytes)?;
    // The map of aya-log: the shipped object has no log.
    let tells = bytes.windows(8).any(|name| name == b"AYA_LOGS");
    ensure!(tells == features.contains(&"log"), "only the diagnostic object may have aya-log's map in it");
    Ok(bytes)
}

/// Copies what the digest covers, and puts both crates into one workspace, with the BPF crate's lock file and profiles.
fn stage_sources(stage: &Path) -> Result<()> {
    let root = project_root();
    crate::cache::remove(stage)?;
    for file in digest::sources(root).context("cannot read the BPF sources")? {
        let target = stage.join(file.strip_prefix(root).expect("the sources lie below the project"));
        let parent = target.parent().expect("a file below the stage has a parent");
        fs::create_dir_all(parent).with_context(|| format!("cannot create {}", parent.display()))?;
        fs::copy(&file, &target).with_context(|| format!("cannot copy {}", file.display()))?;
    }
    let mut ebpf = read_toml(&root.join("tachyon-ebpf/Cargo.toml"))?;
    ebpf.remove("workspace");
    let profile = ebpf.remove("profile");
    let mut whole = read_toml(&root.join("Cargo.toml"))?;
    let workspace = whole.get_mut("workspace").and_then(toml::Value::as_table_mut);
    let mut workspace = workspace.context("Cargo.toml has no table [workspace]")?.clone();
    for key in ["default-members", "dependencies", "exclude"] {
        workspace.remove(key);
    }
    workspace.insert("members".to_owned(), vec!["tachyon-common", "tachyon-ebpf"].into());
    let mut whole = toml::Table::from_iter([("workspace".to_owned(), workspace.into())]);
    whole.extend(profile.map(|profile| ("profile".to_owned(), profile)));
    for (path, table) in [("Cargo.toml", whole), ("tachyon-ebpf/Cargo.toml", ebpf)] {
        let path = stage.join(path);
        fs::write(&path, table.to_string()).with_context(|| format!("cannot write {}", path.display()))?;
    }
    fs::rename(stage.join("tachyon-ebpf/Cargo.lock"), stage.join("Cargo.lock")).context("cannot move Cargo.lock")
}

fn read_toml(path: &Path) -> Result<toml::Table> {
    let text = fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
    text.parse().with_context(|| format!("cannot parse {}", path.display()))
}

/// A killed linker, or a wrong target, leaves something other than an object that the kernel accepts.
fn inspect(bytes: &[u8]) -> Result<()> {
    let file = object::File::parse(bytes).context("the built object is no ELF file")?;
    ensure!(file.architecture() == object::Architecture::Bpf, "the built object is for {:?}", file.architecture());
    let license = file.section_by_name("license").context("the built object has no section `license`")?;
    let license = license.data().context("cannot read the section `license`")?;
    let text = license.strip_suffix(b"\0").unwrap_or(license);
    ensure!(text == LICENSE.as_bytes(), "the built object's licence is {:?}", String::from_utf8_lossy(text));
    Ok(())
}

/// A program of the pinned toolchain, without what the calling cargo or the user's environment sets for other builds.
pub(crate) fn nightly(words: &[&str]) -> Command {
    let mut command = Command::new("rustup");
    command.args(["run", TOOLCHAIN]).args(words);
    let kept =
        ["CARGO_HOME", "CARGO_HTTP_", "CARGO_NET_", "CARGO_REGISTR", "RUSTUP_HOME", "RUSTUP_DIST_", "RUSTUP_UPDATE_"];
    for (name, _) in std::env::vars_os() {
        let name = name.to_string_lossy();
        if (name.starts_with("CARGO") || name.starts_with("RUST")) && !kept.iter().any(|kept| name.starts_with(kept)) {
            command.env_remove(&*name);
        }
    }
    command
}

fn linker() -> Result<PathBuf> {
    command::find("bpf-linker").context("bpf-linker is not found")
}

/// Looks for the pinned tools, and gets the missing ones if `install` says so.
///
/// # Errors
/// One is missing; the message lists the commands that would install it.
pub(crate) fn require_tools(install: bool) -> Result<()> {
    let mut missing: Vec<Command> = Vec::new();
    if command::find("rustup").is_none() {
        bail!("building the BPF object needs rustup, which is not found on PATH");
    }
    let components = command::stdout(&mut nightly(&["rustc", "--print", "sysroot"]))
        .map(|sysroot| PathBuf::from(sysroot.trim()).join("lib/rustlib/src/rust/library/core").is_dir());
    if !matches!(components, Ok(true)) {
        let mut rustup = Command::new("rustup");
        rustup.args(["toolchain", "install", TOOLCHAIN, "--profile", "minimal", "--no-self-update"]);
        rustup.args(["--component", "rust-src"]);
        missing.push(rustup);
    }
    let version =
        linker().and_then(|linker| command::stdout(Command::new(linker).arg("--version"))).unwrap_or_default();
    if version.trim() != format!("bpf-linker {LINKER_VERSION}") {
        let wanted = format!("bpf-linker@{LINKER_VERSION}");
        missing.push(nightly(&["cargo", "install", "--locked", "--force", &wanted]));
    }
    if missing.is_empty() {
        return Ok(());
    }
    if !install {
        let lines: Vec<String> = missing.iter().map(|tool| format!("  {}", command::shown(tool))).collect();
        bail!("building the BPF object needs tools that are missing; --install gets them with\n{}", lines.join("\n"));
    }
    missing.iter_mut().try_for_each(command::run)
}
