//! Free-threaded interpreters that are in no package at hand and whose source is not available: the executables that
//! cx_Freeze puts in front of a frozen program are complete, optimised CPythons, and its package index has one for each
//! version.
//!
//! Such an executable is static, stripped, not position-independent, and built by the Python Packaging Authority's
//! `manylinux` images. Its `main` would start a frozen program; a jump over it to `Py_BytesMain`, which takes the same
//! arguments, makes it the ordinary `python`. Nothing else is changed. The modules in C come with it, those in Python
//! from Debian sid's package of the same minor version.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use object::{Object, ObjectSegment, ObjectSymbol};

use crate::{cache, command};

/// One such interpreter.
pub(crate) struct Wheel {
    /// Its version, as in its executable's name: `3.14t`.
    pub(crate) version: &'static str,
    /// SHA-256 of the wheel.
    sha256: &'static str,
}

/// Tagged references and per-thread bytecode; CPython 3.14.9.
pub(crate) const FREE_THREADED_3_14: Wheel =
    Wheel { version: "3.14t", sha256: "b8547956f9cbeabaae9cc758bbc65531962c3fb4fa0c2431c802089e7ea86cca" };

/// CPython 3.15.1.
pub(crate) const FREE_THREADED_3_15: Wheel =
    Wheel { version: "3.15t", sha256: "a1c31d6740d6d7ae858ab9e02231928cd49ee5f68d7980a8760b65f333c48890" };

/// The package, pinned: a new release may have a new patch release of CPython.
const PACKAGE: &str = "freeze-core==0.8.1";

/// What its current wheels are built for.
const PLATFORM: &str = "manylinux2014_x86_64";

impl Wheel {
    fn dir(&self, zoo: &Path) -> PathBuf {
        zoo.join(format!("python{}-wheel", self.version))
    }

    /// Its executable, whether it exists or not.
    pub(crate) fn executable(&self, zoo: &Path) -> PathBuf {
        self.dir(zoo).join("bin").join(format!("python{}", self.version))
    }

    /// Fetches it and puts it together; returns at once if it exists. `pip` is any Python with pip, `sid` the chroot.
    ///
    /// # Errors
    /// The wheel cannot be fetched, is not the pinned one, or its interpreter does not run.
    pub(crate) fn set_up(&self, zoo: &Path, pip: &Path, sid: &Path) -> Result<()> {
        ensure!(cfg!(target_arch = "x86_64"), "the jump to `Py_BytesMain` is written for x86-64 alone");
        let dir = self.dir(zoo);
        let _lock = cache::lock(zoo)?;
        let stamp = format!("{PACKAGE} {}\n", self.sha256);
        if cache::is_finished(&dir, &stamp) {
            return Ok(());
        }
        cache::remove(&dir)?;
        let work = tempfile::tempdir().context("cannot make a directory")?;
        let wheel = self.fetch(pip, work.path())?;
        let unpacked = work.path().join("unpacked");
        command::run(Command::new(pip).args(["-m", "zipfile", "-e"]).arg(&wheel).arg(&unpacked))?;
        let made = self.put_together(&unpacked, &dir, sid).and_then(|()| self.judge(zoo));
        made.and_then(|()| cache::finish(&dir, &stamp))
    }

    /// pip compares the digest.
    fn fetch(&self, pip: &Path, work: &Path) -> Result<PathBuf> {
        let wanted = work.join("wanted.txt");
        fs::write(&wanted, format!("{PACKAGE} --hash=sha256:{}\n", self.sha256))
            .with_context(|| format!("cannot write {}", wanted.display()))?;
        let number = self.version.trim_end_matches('t');
        let abi = format!("cp{}", self.version.replace('.', ""));
        let mut line = Command::new(pip);
        line.args(["-m", "pip", "download", "--disable-pip-version-check", "--no-deps", "--only-binary=:all:"]);
        line.args(["--platform", PLATFORM, "--implementation", "cp", "--python-version", number, "--abi", &abi]);
        line.arg("--dest").arg(work).arg("--requirement").arg(&wanted);
        command::run_quietly(&format!("fetching {PACKAGE} for {abi}"), &mut line)?;
        let mut files = fs::read_dir(work).context("cannot list what pip fetched")?.filter_map(Result::ok);
        let wheel = files.find(|file| file.path().extension().is_some_and(|end| end == "whl"));
        Ok(wheel.context("pip fetched no wheel")?.path())
    }

    /// Makes the directories of an installed Python, so that the interpreter finds its library beside it.
    fn put_together(&self, unpacked: &Path, dir: &Path, sid: &Path) -> Result<()> {
        let core = unpacked.join("freeze_core");
        let abi = format!("cpython-{}-x86_64-linux-gnu", self.version.replace('.', ""));
        let console = core.join("bases").join(format!("console-{abi}"));
        let mut bytes = fs::read(&console).with_context(|| format!("cannot read {}", console.display()))?;
        jump_over_main(&mut bytes).with_context(|| format!("cannot use {}", console.display()))?;
        let library = dir.join("lib").join(format!("python{}", self.version));
        for dir in [&dir.join("bin"), &dir.join("lib")] {
            fs::create_dir_all(dir).with_context(|| format!("cannot create {}", dir.display()))?;
        }
        let executable = dir.join("bin").join(format!("python{}", self.version));
        fs::write(&executable, bytes).with_context(|| format!("cannot write {}", executable.display()))?;
        let in_python = sid.join("usr/lib").join(format!("python{}", self.version.trim_end_matches('t')));
        let copy = |from: &Path, to: &Path| command::run(Command::new("cp").arg("--archive").arg(from).arg(to));
        copy(&in_python, &library)?;
        cache::remove(&library.join("lib-dynload"))?;
        copy(&core.join("lib"), &library.join("lib-dynload"))?;
        // Where the modules in C look for the libraries that they were linked with.
        copy(&unpacked.join("freeze_core.libs"), &dir.join("lib"))?;
        command::run(Command::new("chmod").arg("0755").arg(&executable))
    }

    /// Checks that it runs, is what its name says, and finds both halves of its library.
    fn judge(&self, zoo: &Path) -> Result<()> {
        let program = "import sys, sysconfig, threading, math, select; \
                       print('%d.%d%s' % (*sys.version_info[:2], '' if sys._is_gil_enabled() else 't'))";
        let told = command::stdout(Command::new(self.executable(zoo)).args(["-B", "-c", program]))?;
        ensure!(told.trim() == self.version, "the interpreter for {} says that it is {}", self.version, told.trim());
        Ok(())
    }
}

/// Writes `jmp Py_BytesMain` over the start of `main`.
fn jump_over_main(bytes: &mut [u8]) -> Result<()> {
    const JUMP: usize = 5;
    let file = object::File::parse(&*bytes).context("it is no ELF file")?;
    ensure!(file.architecture() == object::Architecture::X86_64, "it is for {:?}", file.architecture());
    let symbol = |name: &str| {
        let found = file.dynamic_symbols().find(|symbol| symbol.name() == Ok(name) && symbol.is_definition());
        found.with_context(|| format!("it exports no {name}"))
    };
    let (main, target) = (symbol("main")?, symbol("Py_BytesMain")?.address());
    ensure!(main.size() >= JUMP as u64, "its main has no room for a jump");
    let at = main.address();
    let offset = file.segments().find_map(|segment| {
        let within = at.checked_sub(segment.address())?;
        let (start, size) = segment.file_range();
        (within + (JUMP as u64) <= size).then_some(start + within)
    });
    let offset = usize::try_from(offset.context("its main is in no segment")?).context("its main lies too far")?;
    let distance = i64::try_from(target)? - i64::try_from(at)? - JUMP as i64;
    let distance = i32::try_from(distance).context("Py_BytesMain is too far from main for a jump")?;
    let place = bytes.get_mut(offset..offset + JUMP).context("its main is beyond its end")?;
    place[0] = 0xe9;
    place[1..].copy_from_slice(&distance.to_le_bytes());
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt as _;

    /// A program that would print `main` says `Py_BytesMain`, with the same arguments.
    #[test]
    fn the_jump_lands() {
        let dir = tempfile::tempdir().unwrap();
        let source = dir.path().join("program.c");
        let code = "#include <stdio.h>\n\
                    int Py_BytesMain(int argc, char **argv) { printf(\"%d %s\\n\", argc, argv[1]); return 7; }\n\
                    int main(int argc, char **argv) { return puts(\"main\") + argc + (argv == 0); }\n";
        fs::write(&source, code).unwrap();
        for kind in ["-no-pie", "-pie"] {
            let program = dir.path().join(format!("program{kind}"));
            let mut cc = Command::new("cc");
            cc.args([kind, "-O1", "-fPIE", "-rdynamic", "-o"]).arg(&program).arg(&source);
            command::run(&mut cc).unwrap();
            let mut bytes = fs::read(&program).unwrap();
            jump_over_main(&mut bytes).unwrap();
            let patched = dir.path().join(format!("patched{kind}"));
            fs::write(&patched, bytes).unwrap();
            fs::set_permissions(&patched, fs::Permissions::from_mode(0o755)).unwrap();
            let output = Command::new(&patched).arg("word").output().unwrap();
            assert_eq!((output.status.code(), &*output.stdout), (Some(7), &b"2 word\n"[..]), "{kind}");
        }
    }

    #[test]
    fn what_is_no_python_is_refused() {
        assert!(jump_over_main(&mut b"no ELF file".to_vec()).is_err());
        let mut other = fs::read("/proc/self/exe").unwrap();
        let error = jump_over_main(&mut other).unwrap_err();
        assert!(format!("{error:#}").contains("exports no"), "{error:#}");
    }
}
