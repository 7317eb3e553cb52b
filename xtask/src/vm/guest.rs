//! One boot: QEMU without KVM, two serial lines, one for the console and one for the results in base64.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use super::kernels::Kernel;
use crate::command;

/// What a guest is given.
#[derive(Clone, Copy)]
pub(crate) struct Given {
    pub(crate) cpus: u32,
    pub(crate) memory_mib: u32,
    /// Kernel arguments in addition to those that every guest gets.
    pub(crate) arguments: &'static str,
    /// A guest that takes longer is stopped.
    pub(crate) at_most: Duration,
}

impl Given {
    /// For a check with only the profiler: emulated, it takes up to three minutes on an otherwise idle machine.
    pub(crate) fn check(cpus: u32) -> Self {
        Self { cpus, memory_mib: 1024, arguments: "", at_most: Duration::from_secs(480) }
    }
}

/// Lines of the console shown when a guest fails.
const TAIL_LINES: usize = 40;

/// The first output of a guest's script (`tests/kernel/guest.sh`).
const BOOTED: &str = "the guest has booted";

/// What it says right before it starts the profiler for the first time.
const PROFILER_NEXT: &str = "the profiler comes next";

/// A guest gets there within seconds; one that has not after this long hangs.
const AT_MOST_BEFORE: Duration = Duration::from_secs(120);

/// Whether it ended, or was stopped, before the profiler had a part in it: while it checked what the kernel promises, 5.10 once fell
/// silent until its time was over.
fn hung_before_profiler(console: &str) -> bool {
    console.contains(BOOTED) && !console.contains(PROFILER_NEXT) && !console.contains("Kernel panic")
}

/// Whether a kernel died for a reason that none of the guest's programs can cause: before it had started one, or because an emulated
/// CPU hit the breakpoint that the kernel uses while patching its code, and took it for a foreign one (7.2 while booting, once in some
/// dozens of boots; 6.12 with sixteen CPUs, when programs are attached to its tracepoints, on one machine twice in a row).
fn died_of_emulation(console: &str) -> bool {
    console.contains("Kernel panic") && (!console.contains(BOOTED) || console.contains("Oops: int3:"))
}

/// What a kernel prints when a CPU has been stuck for longer than its watchdog allows (20 s), and again while that lasts.
const LOCKUP: &str = "BUG: soft lockup";

/// Whether the kernel printed that: on one machine each boot of 5.10 ended there, even without the profiler, as if two emulated
/// CPUs were waiting for each other. On others it never did.
fn locked_up(console: &str) -> bool {
    console.contains(LOCKUP)
}

/// How QEMU emulates several CPUs.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Threads {
    OnePerProcessor,
    /// They take turns: slower, but never in conflict with each other.
    One,
}

impl Threads {
    fn accelerator(self) -> &'static str {
        match self {
            Self::OnePerProcessor => "tcg,thread=multi",
            Self::One => "tcg,thread=single",
        }
    }

    /// How long a guest may take; `TACHYON_VM_SECONDS` sets it for machines that also run other builds.
    fn at_most(self, given: Given) -> Duration {
        let seconds = std::env::var("TACHYON_VM_SECONDS").ok().and_then(|seconds| seconds.parse().ok());
        let at_most = seconds.map_or(given.at_most, Duration::from_secs);
        match self {
            Self::OnePerProcessor => at_most,
            Self::One => at_most * 2,
        }
    }
}

/// Boots `image` and returns the directory with the files that the guest sent. A kernel that died of its emulation, hung before
/// the profiler was started, or whose CPUs were locked up, is booted once more with one thread for all of them: such problems are
/// known from CPUs that run in parallel, and bugs in the profiler would show again.
///
/// # Errors
/// The guest did not end in time, or sent nothing complete; the message ends with the console's last lines.
pub(crate) fn run(kernel: Kernel, given: Given, image: &Path, initramfs: &Path, work: &Path) -> Result<PathBuf> {
    let first = boot(kernel, given, Threads::OnePerProcessor, image, initramfs, work);
    let Err(error) = &first else { return first };
    let console = read(&directory(work, kernel).join("console"));
    let what = if died_of_emulation(&console) {
        "it died of its emulation"
    } else if locked_up(&console) {
        "its emulated processors were locked up"
    } else if hung_before_profiler(&console) {
        "it hung before the profiler was started"
    } else {
        return first;
    };
    eprintln!("{what}, and it is booted once more, with one thread for all processors: {error:#}");
    command::notice(&format!(
        "kernel {}: {what}; what is told of it is of a boot with one thread for all processors",
        kernel.name()
    ))?;
    boot(kernel, given, Threads::One, image, initramfs, work)
}

fn boot(
    kernel: Kernel,
    given: Given,
    threads: Threads,
    image: &Path,
    initramfs: &Path,
    work: &Path,
) -> Result<PathBuf> {
    let dir = directory(work, kernel);
    crate::cache::remove(&dir)?;
    fs::create_dir_all(&dir).with_context(|| format!("cannot create {}", dir.display()))?;
    let (console, results) = (dir.join("console"), dir.join("results.base64"));
    let (cpus, memory) = (given.cpus.to_string(), given.memory_mib.to_string());
    eprint!("booting kernel {} on {cpus} cpus {} ... ", kernel.name(), kernel.cpu());
    let start = Instant::now();
    let at_most = threads.at_most(given);
    let mut qemu = Guest(
        Command::new(kernel.machine.qemu())
            .args(["-accel", threads.accelerator(), "-m", &memory, "-cpu", kernel.cpu(), "-smp", &cpus])
            .args(["-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"])
            .arg("-serial")
            .arg(format!("file:{}", console.display()))
            .arg("-chardev")
            .arg(format!("file,id=results,path={}", results.display()))
            .args(kernel.machine.devices())
            .arg("-kernel")
            .arg(image)
            .arg("-initrd")
            .arg(initramfs)
            .arg("-append")
            .arg(format!("{} {}", kernel.machine.command_line(), given.arguments))
            .stdin(Stdio::null())
            .spawn()
            .with_context(|| format!("cannot start {}", kernel.machine.qemu()))?,
    );
    let ended = loop {
        if let Some(status) = qemu.0.try_wait().context("cannot wait for QEMU")? {
            break status.success();
        }
        if start.elapsed() > at_most {
            break false;
        }
        if threads == Threads::OnePerProcessor {
            let told = read(&console);
            let is_late = start.elapsed() > AT_MOST_BEFORE;
            if told.matches(LOCKUP).count() > 1 || (is_late && hung_before_profiler(&told)) {
                break false;
            }
        }
        std::thread::sleep(Duration::from_millis(100));
    };
    drop(qemu);
    eprintln!("{} after {:.1} s", if ended { "ended" } else { "stopped" }, start.elapsed().as_secs_f64());
    let received = dir.join("received");
    match unpack(&results, &received) {
        Ok(()) => Ok(received),
        Err(error) => {
            let why = if ended { "the guest ended" } else { "the guest was stopped: it took too long or QEMU failed" };
            bail!("no results: {why}: {error:#}\nlast lines of the console:\n{}", tail(&console));
        }
    }
}

/// Where a guest's serial lines go, and what it sent.
pub(crate) fn directory(work: &Path, kernel: Kernel) -> PathBuf {
    work.join("guests").join(kernel.name())
}

/// A QEMU that does not outlive its test.
struct Guest(Child);

impl Drop for Guest {
    fn drop(&mut self) {
        // Both fail only for a child that has ended and was waited for, which is fine.
        drop(self.0.kill());
        drop(self.0.wait());
    }
}

fn unpack(results: &Path, received: &Path) -> Result<()> {
    fs::create_dir_all(received).with_context(|| format!("cannot create {}", received.display()))?;
    if fs::metadata(results).map_or(0, |found| found.len()) == 0 {
        bail!("it sent nothing");
    }
    let archive = results.with_extension("tar.gz");
    // Whatever a serial line adds, such as carriage returns, is not base64.
    let mut decode = Command::new("sh");
    decode.args(["-c", "base64 --decode --ignore-garbage \"$1\" >\"$2\"", "sh"]).arg(results).arg(&archive);
    command::stdout(&mut decode)?;
    command::stdout(Command::new("tar").arg("-xzf").arg(&archive).arg("-C").arg(received))?;
    if !received.join("complete").is_file() {
        bail!("the guest's last file is missing");
    }
    Ok(())
}

/// The text of a console, whose bytes are not always text; empty if there is none yet.
fn read(console: &Path) -> String {
    String::from_utf8_lossy(&fs::read(console).unwrap_or_default()).into_owned()
}

fn tail(console: &Path) -> String {
    let text = read(console);
    let lines: Vec<&str> = text.lines().collect();
    lines.get(lines.len().saturating_sub(TAIL_LINES)..).unwrap_or_default().join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_emulation_does_is_tried_again() {
        let panic = "Kernel panic - not syncing: Fatal exception in interrupt";
        let of = |lines: &[&str]| died_of_emulation(&lines.join("\n"));
        assert!(of(&["Oops: general protection fault", panic]), "nothing of ours ran");
        assert!(of(&[BOOTED, "[   12.413099] Oops: int3: 0000 [#1] PREEMPT SMP NOPTI", panic]));
        assert!(!of(&[BOOTED, "BUG: kernel NULL pointer dereference", "Oops: Oops: 0002 [#1] SMP", panic]));
        assert!(!of(&[BOOTED, "the verifier refuses it"]), "it did not die");
        assert!(locked_up(&format!(
            "{BOOTED}\n[   81.2] watchdog: BUG: soft lockup - CPU#0 stuck for 22s! [kick:100]"
        )));
        assert!(!locked_up(&format!("{BOOTED}\n{panic}")));
        let python = "guest: python has pid 91, 2.85 s after boot";
        let hung = |lines: &[&str]| hung_before_profiler(&lines.join("\n"));
        assert!(hung(&[BOOTED, python]));
        assert!(
            !hung(&[BOOTED, python, "guest: kicked, the profiler comes next, 3.15 s after boot"]),
            "the profiler may have to do with it"
        );
        assert!(!hung(&[BOOTED, python, panic]), "that is no silence");
        assert!(!hung(&["Welcome to Debian!"]), "another guest, which says nothing of the kind");
    }
}
