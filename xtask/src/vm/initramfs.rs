//! The guest's root directory: busybox, CPython with just the modules it loads, the profiler, and the guest's script.

use std::fs::{self, File};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use object::Endianness;
use object::elf::{DT_NEEDED, FileHeader64};
use object::read::elf::{Dyn, FileHeader, ProgramHeader};

use super::machine::Machine;
use crate::command::{self, project_root};

const PYTHON: &str = "/usr/bin/python3.11";

/// Builds the archive in `work`; it contains the profiler if one is given. `dir` is the cache.
///
/// # Errors
/// A file is missing.
pub(crate) fn build(dir: &Path, work: &Path, machine: Machine, profiler: Option<&Path>) -> Result<PathBuf> {
    let root = Root { inside: work.join("root"), from: machine.programs_root(dir)?, machine };
    for dir in ["bin", "dev", "proc", "sys", "tmp", "usr/bin"] {
        fs::create_dir_all(root.inside.join(dir)).with_context(|| format!("cannot create the guest's {dir}"))?;
    }
    root.add_program(&root.busybox()?, "bin/busybox")?;
    symlink("busybox", root.inside.join("bin/sh")).context("cannot link the guest's sh")?;
    if machine == Machine::X86_64 {
        // Drops capabilities, which busybox's own version cannot.
        root.add_program(Path::new("/usr/bin/setpriv"), "usr/bin/setpriv")?;
    }
    let scripts = project_root().join("tests/kernel");
    root.add(&scripts.join("init.sh"), "init")?;
    fs::set_permissions(root.inside.join("init"), fs::Permissions::from_mode(0o755))
        .context("cannot make init executable")?;
    let program = scripts.join("known_stack.py");
    root.add(&program, "known_stack.py")?;
    root.add(&scripts.join("deepest.py"), "deepest.py")?;
    root.add(&scripts.join("waits.py"), "waits.py")?;
    root.add_python(&program)?;
    root.add_program(&extension(work, machine)?, "extension.so")?;
    root.add_program(&kick(work, machine)?, "usr/bin/kick")?;
    if let Some(profiler) = profiler {
        root.add_program(&stripped(profiler, work, machine)?, "usr/bin/tachyon-bpf")?;
    }
    pack(&root.inside, &work.join("initramfs.cpio"))
}

/// The C code that the guest's program calls, and that calls it.
fn extension(work: &Path, machine: Machine) -> Result<PathBuf> {
    let library = work.join("extension.so");
    let mut compiler = Command::new(machine.cc());
    compiler.args(["-O2", "-fPIC", "-shared", "-fno-optimize-sibling-calls"]).args(machine.c_flags()).arg("-o");
    let source = project_root().join("tests/programs/extension.c");
    command::run_quietly("compiling extension.c", compiler.arg(&library).arg(source))?;
    Ok(library)
}

/// The program that tests whether a thread can be met between its wait and its own code.
fn kick(work: &Path, machine: Machine) -> Result<PathBuf> {
    let program = work.join("kick");
    let mut compiler = Command::new(machine.cc());
    compiler.args(["-O2", "-Wall", "-o"]).arg(&program).arg(project_root().join("tests/kernel/kick.c"));
    command::run_quietly("compiling kick.c", &mut compiler)?;
    Ok(program)
}

/// A copy of the profiler without its debug information.
fn stripped(profiler: &Path, work: &Path, machine: Machine) -> Result<PathBuf> {
    let stripped = work.join("tachyon-bpf");
    let mut strip = Command::new(machine.strip());
    command::run_quietly("stripping tachyon-bpf", strip.arg("-o").arg(&stripped).arg(profiler))?;
    Ok(stripped)
}

/// The directory that becomes the guest's `/`.
struct Root {
    inside: PathBuf,
    /// The root directory that programs and libraries are taken from.
    from: PathBuf,
    machine: Machine,
}

impl Root {
    fn add(&self, file: &Path, inside: &str) -> Result<()> {
        let target = self.inside.join(inside);
        let parent = target.parent().context("a file in the guest's root has a parent")?;
        fs::create_dir_all(parent).with_context(|| format!("cannot create {}", parent.display()))?;
        fs::copy(file, &target).with_context(|| format!("cannot copy {}", file.display()))?;
        Ok(())
    }

    /// Adds a program or library, with its loader and all libraries that it names, at the paths where they are looked up.
    fn add_program(&self, program: &Path, inside: &str) -> Result<()> {
        if self.inside.join(inside).exists() {
            return Ok(());
        }
        self.add(program, inside)?;
        for wanted in wanted_by(program)? {
            // The loader is given by path, a library by name.
            let wanted = wanted.trim_start_matches('/');
            let multiarch = format!("{}-linux-gnu", self.machine.rust());
            let places = [String::new(), format!("lib/{multiarch}/"), format!("usr/lib/{multiarch}/")];
            let place =
                places.iter().map(|place| format!("{place}{wanted}")).find(|path| self.from.join(path).is_file());
            let place = place.with_context(|| format!("{} wants {wanted}, which is not found", program.display()))?;
            self.add_program(&self.from.join(&place), &place)?;
        }
        Ok(())
    }

    fn busybox(&self) -> Result<PathBuf> {
        let found = ["bin/busybox", "usr/bin/busybox"].map(|path| self.from.join(path));
        found.into_iter().find(|path| path.is_file()).context("busybox is not found")
    }

    fn add_python(&self, program: &Path) -> Result<()> {
        let inside = PYTHON.trim_start_matches('/');
        self.add_program(&self.from.join(inside), inside)?;
        // For another architecture, this machine's Python is asked: Debian's packages of one version have the same modules.
        let flags = ["-I", "-S", "-X", "utf8"];
        let modules = command::stdout(Command::new(PYTHON).args(flags).arg(program).arg("--modules"))?;
        // os.py is the landmark by which CPython finds its library (Modules/getpath.py).
        let landmark = format!("/usr/lib/{}/os.py", PYTHON.trim_start_matches("/usr/bin/"));
        for module in modules.lines().chain([landmark.as_str()]) {
            ensure!(Path::new(module).is_absolute(), "python loads a module from {module}");
            let module = module.trim_start_matches('/');
            self.add(&self.from.join(module), module)?;
        }
        Ok(())
    }
}

/// The loader's path, if there is one, and the names of the libraries that a file names itself. (`ldd` would run it, which
/// another machine's file cannot.)
fn wanted_by(program: &Path) -> Result<Vec<String>> {
    let cannot = || format!("cannot parse {}", program.display());
    let bytes = fs::read(program).with_context(|| format!("cannot read {}", program.display()))?;
    let data = bytes.as_slice();
    let file = FileHeader64::<Endianness>::parse(data).with_context(cannot)?;
    let endian = file.endian().with_context(cannot)?;
    let mut wanted = Vec::new();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    for segment in file.program_headers(endian, data).with_context(cannot)? {
        if let Some(loader) = segment.interpreter(endian, data).with_context(cannot)? {
            wanted.push(text(loader));
        }
    }
    let sections = file.sections(endian, data).with_context(cannot)?;
    if let Some((entries, names)) = sections.dynamic(endian, data).with_context(cannot)? {
        let names = sections.strings(endian, data, names).with_context(cannot)?;
        for entry in entries.iter().filter(|entry| entry.tag32(endian) == Some(DT_NEEDED)) {
            wanted.push(text(entry.string(endian, names).with_context(cannot)?));
        }
    }
    Ok(wanted)
}

/// Packs a directory that becomes a guest's `/`. Not compressed: unpacking takes an emulated CPU longer than reading.
///
/// # Errors
/// A file cannot be read, or the archive not be written.
pub(crate) fn pack(root: &Path, archive: &Path) -> Result<PathBuf> {
    let mut names = String::from(".\n");
    list(root, root, &mut names)?;
    let list = archive.with_extension("list");
    fs::write(&list, names).context("cannot write the list of the guest's files")?;
    let open = |result: std::io::Result<File>| result.with_context(|| format!("cannot open {}", archive.display()));
    let status = Command::new("cpio")
        .args(["--quiet", "--create", "--format=newc", "--owner=0:0"])
        .current_dir(root)
        .stdin(open(File::open(&list))?)
        .stdout(open(File::create(archive))?)
        .status()
        .context("cannot start cpio")?;
    ensure!(status.success(), "cpio failed: {status}");
    Ok(archive.to_owned())
}

/// The paths below `dir`, relative to `root`, directories before their contents.
fn list(root: &Path, dir: &Path, names: &mut String) -> Result<()> {
    for entry in fs::read_dir(dir).with_context(|| format!("cannot list {}", dir.display()))? {
        let entry = entry?;
        let path = entry.path();
        let name = path.strip_prefix(root).context("a file lies outside of the guest's root")?;
        names.push_str(name.to_str().with_context(|| format!("{} is not UTF-8", name.display()))?);
        names.push('\n');
        if entry.file_type()?.is_dir() {
            list(root, &path, names)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn libraries_and_loader_are_found() {
        let wanted = wanted_by(Path::new("/proc/self/exe")).unwrap();
        assert!(wanted.iter().any(|name| name.starts_with("libc.")), "{wanted:?}");
        assert!(wanted[0].starts_with('/') && wanted[0].contains("ld-"), "{wanted:?}");
        assert!(wanted_by(&project_root().join("Cargo.toml")).is_err());
    }
}
