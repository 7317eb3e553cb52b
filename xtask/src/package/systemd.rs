//! The Debian package under a real systemd: a guest boots Debian with it, installs the package and runs the agent as its
//! manual says (`systemd.sh`); this module judges what it sent.
//!
//! The guest's root is the throwaway root of the suite, as an initramfs: it needs no disk and no driver.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde::Deserialize;

use super::roots::Root;
use crate::vm::guest::{self, Given};
use crate::vm::initramfs;
use crate::vm::kernels::{self, Kernel};
use crate::vm::machine::Machine;
use crate::{apt, cache, command};

/// The suite whose systemd and kernel are tried.
const SUITE: &str = "bookworm";
const KERNEL: &str = "6.1";

/// Units that take an emulated system long and do not matter here.
const MASKED: [&str; 8] = [
    "systemd-udevd.service",
    "systemd-udev-trigger.service",
    "systemd-networkd.service",
    "systemd-resolved.service",
    "systemd-timesyncd.service",
    "getty@tty1.service",
    "serial-getty@ttyS0.service",
    "apt-daily.timer",
];

/// Runs the script when everything else is up.
const UNIT: &str = "[Unit]
After=multi-user.target
[Service]
Type=oneshot
StandardOutput=tty
TTYPath=/dev/ttyS0
ExecStart=/bin/sh /trial/script
";

/// Boots the suite with the package beside it.
///
/// # Errors
/// The guest does not boot, or the agent does not behave as its manual says.
pub(super) fn try_out(deb: &Path) -> Result<()> {
    apt::ensure(Machine::X86_64.programs())?;
    apt::ensure(&[("cpio", "cpio")])?;
    let root = Root::of(SUITE)?;
    let work = tempfile::tempdir().context("cannot create a directory for a guest")?;
    let inside = work.path().join("root");
    command::stdout(Command::new("cp").arg("--archive").arg(root.path()).arg(&inside))?;
    let write = |path: &str, text: &str| {
        let path = inside.join(path);
        fs::create_dir_all(path.parent().context("a file has a parent")?)
            .and_then(|()| fs::write(&path, text))
            .with_context(|| format!("cannot write {}", path.display()))
    };
    let link = |to: &str, path: &str| {
        let path = inside.join(path);
        // An existing one is an unwanted default.
        let _none = fs::remove_file(&path);
        symlink(to, &path).with_context(|| format!("cannot link {}", path.display()))
    };
    write("trial/script", include_str!("systemd.sh"))?;
    fs::copy(deb, inside.join("trial/tachyon-bpf.deb")).with_context(|| format!("cannot copy {}", deb.display()))?;
    write("etc/systemd/system/trial.service", UNIT)?;
    write(
        "etc/systemd/system/trial.target",
        "[Unit]\nRequires=multi-user.target trial.service\nAfter=multi-user.target\n",
    )?;
    write("etc/hostname", "guest\n")?;
    link("trial.target", "etc/systemd/system/default.target")?;
    link("/lib/systemd/systemd", "init")?;
    for unit in MASKED {
        link("/dev/null", &format!("etc/systemd/system/{unit}"))?;
    }
    // Nobody reads these files there, and the guest keeps them in memory.
    for dir in ["usr/share/doc", "usr/share/locale", "usr/share/man", "var/cache/apt", "var/lib/apt/lists"] {
        cache::remove(&inside.join(dir))?;
    }
    let archive = initramfs::pack(&inside, &work.path().join("initramfs.cpio"))?;
    cache::remove(&inside)?;
    let vm = cache::dir()?.join("vm");
    let lock = cache::lock(&vm)?;
    let kernel: Kernel = KERNEL.parse().map_err(anyhow::Error::msg)?;
    let image = kernels::fetch(&vm, kernel)?;
    drop(lock);
    let given =
        Given { cpus: 2, memory_mib: 2048, arguments: "systemd.show_status=0", at_most: Duration::from_secs(900) };
    let sent = guest::run(kernel, given, &image, &archive, work.path())?;
    let summary = judge(&sent).with_context(|| format!("the guest sent {}", listing(&sent)))?;
    eprintln!("the package under systemd: {summary}");
    Ok(())
}

/// Everything that it sent, as text, to find out what went wrong.
fn listing(sent: &Path) -> String {
    let entries = fs::read_dir(sent).into_iter().flatten().flatten();
    let mut files: Vec<_> = entries.map(|entry| entry.path()).filter(|path| path.is_file()).collect();
    files.sort();
    let text = |path: &Path| {
        let bytes = fs::read(path).unwrap_or_default();
        format!("--- {}\n{}", path.file_name().unwrap_or_default().display(), String::from_utf8_lossy(&bytes))
    };
    files.iter().map(|path| text(path)).collect()
}

/// The part of an account that is judged.
#[derive(Deserialize)]
struct Account {
    stored: u64,
    #[serde(default)]
    cut: bool,
    #[serde(default)]
    inconsistent: u64,
    #[serde(default)]
    processes: Vec<Process>,
}

#[derive(Deserialize)]
struct Process {
    #[serde(default)]
    labels: BTreeMap<String, String>,
}

fn judge(sent: &Path) -> Result<String> {
    let read = |name: &str| -> Result<String> {
        let text = fs::read_to_string(sent.join(name)).with_context(|| format!("it sent no {name}"))?;
        Ok(text.trim().to_owned())
    };
    for step in ["install", "start", "reload", "stop", "purge"] {
        let status = read(&format!("{step}.status"))?;
        ensure!(status == "0", "{step} ended with status {status}: {}", read(step)?);
    }
    ensure!(read("enabled")? == "disabled", "the package enabled the agent");
    ensure!(read("left")?.is_empty(), "after the purge systemd knows {}", read("left")?);
    let state = |name: &str| -> Result<BTreeMap<String, String>> {
        let text = read(name)?;
        Ok(text
            .lines()
            .filter_map(|line| line.split_once('='))
            .map(|(name, value)| (name.to_owned(), value.to_owned()))
            .collect())
    };
    let is = |name: &str, key: &str, value: &str| -> Result<()> {
        let found = state(name)?;
        ensure!(found.get(key).is_some_and(|found| found == value), "{name}: {key} is not {value}: {found:?}");
        Ok(())
    };
    is("started", "SubState", "running")?;
    is("started", "NRestarts", "0")?;
    for (name, restarts) in [("killed", "1"), ("watchdog", "2")] {
        is(name, "SubState", "running")?;
        is(name, "NRestarts", restarts)?;
    }
    is("stopped", "ActiveState", "inactive")?;
    is("stopped", "Result", "success")?;
    let status = read("status")?;
    ensure!(status.lines().any(|line| line.starts_with("NoNewPrivs:") && line.ends_with('1')), "{status}");
    ensure!(
        !status.lines().any(|line| line.starts_with("Uid:") && line.split_whitespace().any(|id| id == "0")),
        "{status}"
    );
    let journal = read("journal")?;
    for line in ["records this host at 19 Hz", "the configuration was read again", "recovered "] {
        ensure!(journal.contains(line), "the journal has no line with {line:?}");
    }
    let spool = read("spool")?;
    ensure!(!spool.contains(".part") && !spool.contains(".broken"), "the spool has something unfinished: {spool}");

    let mut accounts = Vec::new();
    for entry in fs::read_dir(sent.join("accounts")).context("it sent no accounts")? {
        let path = entry?.path();
        if path.file_name().is_some_and(|name| name != "state.json") {
            let text = fs::read(&path).with_context(|| format!("cannot read {}", path.display()))?;
            accounts.push(serde_json::from_slice::<Account>(&text).with_context(|| format!("{}", path.display()))?);
        }
    }
    ensure!(accounts.iter().any(|account| account.cut), "no segment was recovered");
    ensure!(accounts.iter().all(|account| account.inconsistent == 0), "an account is inconsistent");
    let samples: u64 = accounts.iter().map(|account| account.stored).sum();
    let labelled = accounts.iter().filter(|account| {
        account.processes.iter().any(|process| process.labels.get("service.name").is_some_and(|name| name == "shop"))
    });
    let whole = accounts.iter().filter(|account| !account.cut).count();
    let labelled = labelled.count();
    ensure!(labelled > 0 && labelled + 1 >= whole, "{labelled} of {whole} segments have the service's name");
    #[derive(Deserialize)]
    struct Table {
        samples: u64,
    }
    let report = read("report.json")?;
    let table: Table = serde_json::from_str(&report).with_context(|| read("report.log").unwrap_or_default())?;
    ensure!(table.samples == samples, "report counts {} samples, the accounts {samples}", table.samples);
    let security = read("security")?;
    let exposure =
        security.lines().rev().find(|line| line.contains("Overall exposure")).context("no exposure is told")?;
    Ok(format!(
        "{}, {} segments, {samples} samples, killed and watched, {}",
        read("version")?,
        accounts.len(),
        exposure.trim_matches(|letter: char| !letter.is_ascii_alphanumeric())
    ))
}
