//! `cargo xtask package`: for each processor a wheel for pip (`wheel`), whose program is static; a release archive with the same
//! program, its manual page and completions, the documents, the licences of everything that is linked into it and its bill of
//! materials (`sbom`); an image (`image`); and, linked with Debian's C library, a Debian package (`deb`).
//!
//! An archive is unpacked again and checked before it counts as done: its contents, whether the program is for that
//! processor, and whether it starts (another processor's under QEMU's user emulation). Its bytes depend only on the sources
//! and the tools: names are sorted, times are the commit's.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use object::Endianness;
use object::elf::{EM_AARCH64, EM_X86_64, FileHeader64};
use object::read::elf::FileHeader as _;

use crate::vm::machine::Machine;
use crate::{apt, cache, command, digest};

mod deb;
mod image;
mod linked;
mod roots;
mod sbom;
mod systemd;
mod wheel;

use linked::{Linked, Package};

/// Arguments of `cargo xtask package`.
#[derive(clap::Args)]
pub(crate) struct PackageArgs {
    /// Processors: x86_64, aarch64
    #[arg(long = "target", value_delimiter = ',', value_parser = machine, default_value = "x86_64,aarch64")]
    targets: Vec<Machine>,
    /// Pack the unoptimised build that the tests use: shows in seconds that an archive would be whole
    #[arg(long)]
    dev: bool,
    /// The unoptimised build for this machine's processor, where there is one already
    #[arg(long, value_name = "PROGRAM", requires = "dev")]
    profiler: Option<PathBuf>,
    /// Archives alone: no Debian packages, no images and no trial of the wheel, which take minutes
    #[arg(long, conflicts_with = "suites")]
    archives_only: bool,
    /// x86-64's Debian package under a real systemd alone, in a guest of QEMU
    #[arg(long, conflicts_with_all = ["archives_only", "suites", "targets"])]
    systemd: bool,
    /// Debian suites to try the packages in
    #[arg(long, value_name = "SUITE", value_delimiter = ',', default_value = "bookworm,trixie,sid")]
    suites: Vec<String>,
    /// Where the archives go
    #[arg(short, long, value_name = "DIR", default_value = "target/package")]
    output: PathBuf,
}

fn machine(name: &str) -> Result<Machine, String> {
    let known = [Machine::X86_64, Machine::Arm64];
    known.into_iter().find(|machine| machine.rust() == name).ok_or_else(|| "known are x86_64 and aarch64".to_owned())
}

/// The documents of the project that are packed beside `docs/`.
const DOCUMENTS: [&str; 9] = [
    "README.md",
    "ARCHITECTURE.md",
    "CHANGELOG.md",
    "SECURITY.md",
    "LICENSE",
    "LICENSE-APACHE",
    "LICENSE-GPL2",
    "LICENSE-MIT",
    "deploy/seccomp.json",
];

/// Completions: the shell, and the name under which it looks for them.
const COMPLETIONS: [(&str, &str); 3] =
    [("bash", "tachyon-bpf.bash"), ("fish", "tachyon-bpf.fish"), ("zsh", "_tachyon-bpf")];

const THIRD_PARTY: &str = "THIRD-PARTY-LICENSES.txt";

/// Runs `cargo xtask package`.
///
/// # Errors
/// It does not build, or an archive is not as it must be.
pub(crate) fn run(args: PackageArgs) -> Result<()> {
    let output = command::project_root().join(&args.output);
    fs::create_dir_all(&output).with_context(|| format!("cannot create {}", output.display()))?;
    // The pages do not differ between processors, and this machine's own program can print them.
    let own = Machine::X86_64.profiler_or(args.profiler.as_deref())?;
    let targets = if args.systemd { vec![Machine::X86_64] } else { args.targets.clone() };
    for machine in targets {
        apt::ensure(machine.programs())?;
        let work = tempfile::tempdir().context("cannot create a directory for an archive")?;
        if !args.systemd {
            // The short form has no static program.
            let (program, c_library) = if args.dev {
                (machine.profiler_or(args.profiler.as_deref())?, "gnu")
            } else {
                (static_program(machine, &args, work.path(), &output)?, "musl")
            };
            let name = format!("tachyon-bpf-{}-{}-linux-{c_library}", env!("CARGO_PKG_VERSION"), machine.rust());
            let stage = work.path().join(&name);
            fill(&stage, machine, &own, &program)?;
            if !args.dev {
                sbom::judge(&stage.join(sbom::FILE))?;
            }
            archive(work.path(), &name, machine, &output)?;
            if args.archives_only {
                continue;
            }
            if !args.dev {
                image::make(machine, &stage, &output)?;
            }
        }
        let stage = command::project_root().join(STAGE);
        cache::remove(&stage)?;
        let program = if args.dev { machine.profiler_or(args.profiler.as_deref())? } else { machine.profiler(true)? };
        fill(&stage, machine, &own, &program)?;
        if args.systemd {
            return systemd::try_out(&deb::build_for_trial(machine, args.dev, work.path())?);
        }
        // The short form leaves out what only differs in the processor.
        if !args.dev || machine == Machine::X86_64 {
            let deb = deb::make(machine, args.dev, &args.suites, &output)?;
            if machine == Machine::X86_64 {
                systemd::try_out(&deb)?;
            }
        }
    }
    if args.archives_only {
        return Ok(());
    }
    if args.dev {
        return wheel::make(Machine::X86_64, true, &args.suites, &output).map(drop);
    }
    // As crates they must build on their own, with the BPF object that they contain.
    let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    cargo.current_dir(command::project_root()).args(["publish", "--dry-run", "--locked", "--allow-dirty"]);
    command::run(cargo.args(["--package", "tachyon-common", "--package", "tachyon"]))
}

/// The program that runs on any Linux, out of the wheel.
fn static_program(machine: Machine, args: &PackageArgs, work: &Path, output: &Path) -> Result<PathBuf> {
    let wheel = if args.archives_only {
        wheel::build(machine, false, work)?
    } else {
        wheel::make(machine, false, &args.suites, output)?
    };
    wheel::program(&wheel, work)
}

/// Packs `work/name`, and checks what was packed.
fn archive(work: &Path, name: &str, machine: Machine, output: &Path) -> Result<()> {
    let archive = output.join(format!("{name}.tar.gz"));
    pack(work, name, &archive)?;
    check(&archive, name, machine)?;
    let bytes = fs::read(&archive).with_context(|| format!("cannot read {}", archive.display()))?;
    let digest = digest::of_bytes(&bytes);
    let sum = output.join(format!("{name}.tar.gz.sha256"));
    fs::write(&sum, format!("{digest}  {name}.tar.gz\n")).with_context(|| format!("cannot write {}", sum.display()))?;
    eprintln!("{}: {} KiB, sha256 {digest}", archive.display(), bytes.len() >> 10);
    Ok(())
}

/// Where `[package.metadata.deb]` in `tachyon/Cargo.toml` finds the files of an archive.
const STAGE: &str = "target/package/stage";

/// The time of the last commit, in seconds, for everything that is timestamped.
fn commit_time() -> Result<String> {
    let mut git = Command::new("git");
    let time = command::stdout(git.current_dir(command::project_root()).args(["log", "-1", "--format=%ct"]))?;
    Ok(time.trim().to_owned())
}

/// Two builds of the same sources must be identical, byte for byte.
fn ensure_same(first: &Path, second: &Path) -> Result<()> {
    let read = |file: &Path| fs::read(file).with_context(|| format!("cannot read {}", file.display()));
    ensure!(read(first)? == read(second)?, "{}: made again, its bytes differ", first.display());
    Ok(())
}

/// Puts the files of an archive into `stage`.
fn fill(stage: &Path, machine: Machine, own: &Path, built: &Path) -> Result<()> {
    let root = command::project_root();
    for dir in ["completions", "deploy", "docs/dev", "docs/formats", "man"] {
        fs::create_dir_all(stage.join(dir)).with_context(|| format!("cannot create {dir} of an archive"))?;
    }
    let program = stage.join("tachyon-bpf");
    let mut strip = Command::new(machine.strip());
    command::stdout(strip.arg("-o").arg(&program).arg(built))?;
    fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).context("cannot make the program executable")?;
    let print = |arguments: &[&str], into: &str| -> Result<()> {
        let text = command::stdout(Command::new(own).args(arguments))?;
        fs::write(stage.join(into), text).with_context(|| format!("cannot write {into}"))
    };
    print(&["man"], "man/tachyon-bpf.1")?;
    for (shell, name) in COMPLETIONS {
        print(&["completions", shell], &format!("completions/{name}"))?;
    }
    let mut documents: Vec<PathBuf> = DOCUMENTS.iter().map(PathBuf::from).collect();
    for dir in ["docs", "docs/dev", "docs/formats"] {
        let entries = fs::read_dir(root.join(dir)).with_context(|| format!("cannot list {dir}"))?;
        let names = entries.flatten().map(|entry| Path::new(dir).join(entry.file_name()));
        documents.extend(names.filter(|path| path.extension().is_some_and(|end| end == "md" || end == "png")));
    }
    for document in &documents {
        fs::copy(root.join(document), stage.join(document))
            .with_context(|| format!("cannot copy {}", document.display()))?;
    }
    fs::write(stage.join(THIRD_PARTY), third_party(machine)?).with_context(|| format!("cannot write {THIRD_PARTY}"))?;
    fs::write(stage.join(sbom::FILE), sbom::of(machine)?).with_context(|| format!("cannot write {}", sbom::FILE))
}

/// Packs `dir/name`: two runs with the same files give the same bytes.
fn pack(dir: &Path, name: &str, archive: &Path) -> Result<()> {
    let packed = archive.with_extension("");
    command::stdout(tar(&commit_time()?).arg("-C").arg(dir).arg("-cf").arg(&packed).arg(name))?;
    command::stdout(Command::new("gzip").args(["--no-name", "--force", "-9"]).arg(&packed)).map(drop)
}

/// A `tar` that makes the same bytes from the same files, with this time for all of them.
fn tar(time: &str) -> Command {
    let mut tar = Command::new("tar");
    tar.args(["--sort=name", "--owner=0", "--group=0", "--numeric-owner", "--mode=u=rwX,go=rX", "--format=ustar"]);
    tar.arg(format!("--mtime=@{time}"));
    tar
}

/// Unpacks an archive and checks it against what was promised.
fn check(archive: &Path, name: &str, machine: Machine) -> Result<()> {
    let dir = tempfile::tempdir().context("cannot create a directory for an archive")?;
    command::stdout(Command::new("tar").arg("-xzf").arg(archive).arg("-C").arg(dir.path()))?;
    let root = dir.path().join(name);
    let read = |file: &str| fs::read(root.join(file)).with_context(|| format!("the archive has no {file}"));
    for file in DOCUMENTS.into_iter().chain(["docs/report.md", "docs/formats/tach.md", THIRD_PARTY, sbom::FILE]) {
        ensure!(!read(file)?.is_empty(), "{file} is empty");
    }
    for (shell, completions) in COMPLETIONS {
        let text = String::from_utf8(read(&format!("completions/{completions}"))?)?;
        ensure!(text.contains("--all-python"), "the completions for {shell} know no --all-python");
    }
    let page = String::from_utf8(read("man/tachyon-bpf.1")?)?;
    ensure!(page.contains(".TH") && page.contains("all\\-python"), "the manual page is none");
    let program = read("tachyon-bpf")?;
    let header = FileHeader64::<Endianness>::parse(program.as_slice()).context("the program is no ELF file")?;
    let wanted = if machine == Machine::Arm64 { EM_AARCH64 } else { EM_X86_64 };
    let found = header.e_machine(header.endian()?);
    ensure!(found == wanted, "the program is for ELF machine {found}, not {wanted}");
    let said = command::stdout(starting(machine, &root.join("tachyon-bpf"))?.arg("--version"))?;
    ensure!(said.contains(env!("CARGO_PKG_VERSION")), "the program calls itself {said:?}");
    Ok(())
}

/// The command that starts a program of a processor here.
fn starting(machine: Machine, program: &Path) -> Result<Command> {
    if machine == Machine::X86_64 {
        return Ok(Command::new(program));
    }
    apt::ensure(&[("qemu-aarch64", "qemu-user")])?;
    let libraries = machine.programs_root(&cache::dir()?.join("vm"))?;
    let mut command = Command::new("qemu-aarch64");
    command.arg("-L").arg(libraries).arg(program);
    Ok(command)
}

/// The crates that are linked into the program, with their licences and the texts that come with them.
fn third_party(machine: Machine) -> Result<String> {
    let linked = Linked::into_program(machine)?;
    let linked: Vec<&Package> = linked.libraries().filter(|found| !found.is_own()).collect();
    let mut text = String::from(
        "These libraries are linked into tachyon-bpf, unchanged; the zstd crates bring Zstandard (BSD-3-Clause) with them.\n\
         Under the LGPL of btf-rs everybody who has this program may exchange that library: the sources of this version, and\n\
         `cargo build` with another btf-rs, are all it takes.\n\n",
    );
    for found in &linked {
        let licence = found.license.as_deref().unwrap_or("see its text");
        writeln!(text, "{} {}: {licence} ({})", found.name, found.version, found.repository.as_deref().unwrap_or("-"))?;
    }
    // One text, however many crates have it.
    let mut texts: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for found in &linked {
        for (file, licence) in licence_texts(found)? {
            texts.entry(licence).or_default().push(format!("{} {} ({file})", found.name, found.version));
        }
    }
    let mut texts: Vec<_> = texts.into_iter().map(|(licence, of)| (of, licence)).collect();
    texts.sort();
    for (of, licence) in texts {
        write!(text, "\n{}\n{}\n\n{}\n", "=".repeat(78), of.join(", "), licence.trim_end())?;
    }
    Ok(text)
}

/// Names and contents of a crate's files about its licence.
fn licence_texts(found: &Package) -> Result<Vec<(String, String)>> {
    let dir = found.manifest_path.parent().context("a manifest lies in a directory")?;
    let entries = fs::read_dir(dir).with_context(|| format!("cannot list {}", dir.display()))?;
    let mut names: Vec<String> = entries.flatten().filter_map(|entry| entry.file_name().into_string().ok()).collect();
    let starts = ["LICENSE", "LICENCE", "COPYING", "NOTICE", "UNLICENSE"];
    names.retain(|name| starts.iter().any(|start| name.to_uppercase().starts_with(start)) && dir.join(name).is_file());
    names.sort();
    let read = |name: String| {
        let bytes = fs::read(dir.join(&name)).with_context(|| format!("cannot read {name} of {}", found.name))?;
        Ok((name, String::from_utf8_lossy(&bytes).into_owned()))
    };
    names.into_iter().map(read).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn licences_of_what_is_linked_are_told() {
        let text = third_party(Machine::Arm64).unwrap();
        for linked in ["aya 0.14.0: MIT OR Apache-2.0", "btf-rs 2", "zstd-sys", "GNU LESSER GENERAL PUBLIC LICENSE"] {
            assert!(text.contains(linked), "{linked}");
        }
        assert!(!text.contains("\ncriterion ") && !text.contains("\ntachyon "), "not linked, or our own");
    }

    #[test]
    fn an_archive_that_lacks_something_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let stage = dir.path().join("name");
        fs::create_dir_all(&stage).unwrap();
        fs::write(stage.join("README.md"), "text").unwrap();
        let archive = dir.path().join("name.tar.gz");
        pack(dir.path(), "name", &archive).unwrap();
        let first = fs::read(&archive).unwrap();
        let error = check(&archive, "name", Machine::X86_64).unwrap_err();
        assert!(format!("{error:#}").contains("the archive has no ARCHITECTURE.md"), "{error:#}");
        pack(dir.path(), "name", &archive).unwrap();
        assert_eq!(fs::read(&archive).unwrap(), first, "the same files give the same bytes");
    }
}
