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

/// Programs that an archive is made of and with, and their packages.
pub(crate) const PROGRAMS: [(&str, &str); 4] =
    [("busybox", "busybox-static"), ("cpio", "cpio"), ("dpkg-deb", "dpkg"), ("/usr/bin/python3.11", "python3.11")];

/// Prints the files of all modules that are loaded when those named by its arguments are.
const MODULES: &str = "
import sys
for name in sys.argv[1:]: __import__(name)
files = {getattr(module, '__file__', None) for module in sys.modules.values()}
print(*sorted(files - {None}), sep='\\n')
";

/// Builds the archive of `cargo xtask vm-test` in `work`; it contains the profiler if one is given. `dir` is the cache.
///
/// # Errors
/// A file is missing.
pub(crate) fn build(dir: &Path, work: &Path, machine: Machine, profiler: Option<&Path>) -> Result<PathBuf> {
    let root = Root::begin(dir, work, machine, "init.sh")?;
    if machine == Machine::X86_64 {
        // Drops capabilities, which busybox's own version cannot.
        root.add_program(Path::new("/usr/bin/setpriv"), "usr/bin/setpriv")?;
    }
    for program in ["known_stack.py", "deepest.py", "waits.py"] {
        root.add(&scripts().join(program), program)?;
    }
    root.add_python(&[])?;
    root.add_program(&extension(work, machine)?, "extension.so")?;
    root.add_program(&kick(work, machine)?, "usr/bin/kick")?;
    if let Some(profiler) = profiler {
        root.add_profiler(profiler, work)?;
    }
    pack(&root.inside, &work.join("initramfs.cpio"))
}

/// Builds the archive of a guest of this machine's processor that records the benchmark's target with default options.
///
/// # Errors
/// A file is missing.
pub(crate) fn build_usual(dir: &Path, work: &Path, profiler: &Path) -> Result<PathBuf> {
    let root = Root::begin(dir, work, Machine::X86_64, "usual.sh")?;
    root.add(&project_root().join("xtask/bench/deep.py"), "deep.py")?;
    root.add_python(&["mmap", "os"])?;
    root.add_profiler(profiler, work)?;
    pack(&root.inside, &work.join("initramfs.cpio"))
}

/// Where the guests' scripts are.
fn scripts() -> PathBuf {
    project_root().join("tests/kernel")
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
    /// Begins one in `work` with busybox and a script of `tests/kernel` as its first process.
    fn begin(dir: &Path, work: &Path, machine: Machine, script: &str) -> Result<Self> {
        let root = Self { inside: work.join("root"), from: machine.programs_root(dir)?, machine };
        for dir in ["bin", "dev", "proc", "sys", "tmp", "usr/bin"] {
            fs::create_dir_all(root.inside.join(dir)).with_context(|| format!("cannot create the guest's {dir}"))?;
        }
        root.add_program(&root.busybox()?, "bin/busybox")?;
        symlink("busybox", root.inside.join("bin/sh")).context("cannot link the guest's sh")?;
        root.add(&scripts().join("guest.sh"), "guest.sh")?;
        root.add(&scripts().join(script), "init")?;
        fs::set_permissions(root.inside.join("init"), fs::Permissions::from_mode(0o755))
            .context("cannot make init executable")?;
        Ok(root)
    }

    fn add_profiler(&self, profiler: &Path, work: &Path) -> Result<()> {
        self.add_program(&stripped(profiler, work, self.machine)?, "usr/bin/tachyon-bpf")
    }

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

    /// Adds CPython with the modules that it loads by itself, those given, and what these load.
    fn add_python(&self, modules: &[&str]) -> Result<()> {
        let inside = PYTHON.trim_start_matches('/');
        self.add_program(&self.from.join(inside), inside)?;
        // For another architecture, this machine's Python is asked: Debian's packages of one version have the same modules.
        let flags = ["-I", "-S", "-X", "utf8"];
        let loaded = command::stdout(Command::new(PYTHON).args(flags).args(["-c", MODULES]).args(modules))?;
        // os.py is the landmark by which CPython finds its library (Modules/getpath.py).
        let landmark = format!("/usr/lib/{}/os.py", PYTHON.trim_start_matches("/usr/bin/"));
        for module in loaded.lines().chain([landmark.as_str()]) {
            ensure!(Path::new(module).is_absolute(), "python loads a module from {module}");
            let inside = module.trim_start_matches('/');
            let file = self.from.join(inside);
            // Extension modules are libraries.
            if module.ends_with(".so") { self.add_program(&file, inside) } else { self.add(&file, inside) }?;
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
