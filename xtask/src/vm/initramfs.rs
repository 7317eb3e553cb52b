//! The guest's root directory: busybox, CPython with just the modules it loads, the profiler, and the guest's script.

use std::fs::{self, File};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};
use object::Endianness;
use object::elf::{FileHeader64, PT_INTERP};
use object::read::elf::{FileHeader, ProgramHeader};

use crate::command::{self, project_root};

const PYTHON: &str = "/usr/bin/python3.11";

/// Builds the archive in `work`; it holds the profiler if `with_profiler` says so.
///
/// # Errors
/// A file is missing, or the profiler does not build.
pub(crate) fn build(work: &Path, with_profiler: bool) -> Result<PathBuf> {
    let root = Root(work.join("root"));
    for dir in ["bin", "dev", "proc", "sys", "tmp", "usr/bin"] {
        fs::create_dir_all(root.0.join(dir)).with_context(|| format!("cannot create the guest's {dir}"))?;
    }
    let busybox = command::find("busybox").context("busybox is not found")?;
    root.add_program(&busybox, "bin/busybox")?;
    symlink("busybox", root.0.join("bin/sh")).context("cannot link the guest's sh")?;
    let scripts = project_root().join("tests/kernel");
    root.add(&scripts.join("init.sh"), "init")?;
    fs::set_permissions(root.0.join("init"), fs::Permissions::from_mode(0o755))
        .context("cannot make init executable")?;
    let program = scripts.join("known_stack.py");
    root.add(&program, "known_stack.py")?;
    root.add_python(&program)?;
    if with_profiler {
        root.add_program(&profiler(work)?, "usr/bin/tachyon-bpf")?;
    }
    pack(&root.0, &work.join("initramfs.cpio"))
}

/// The profiler as the tests build it, without its debug information.
fn profiler(work: &Path) -> Result<PathBuf> {
    let cargo = || {
        let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
        cargo.current_dir(project_root()).args(["build", "--package", "tachyon", "--bin", "tachyon-bpf"]);
        cargo
    };
    // The second time there is nothing to build or to complain of, only the path to learn.
    command::run(&mut cargo())?;
    let lines = command::stdout(cargo().args(["--message-format", "json"]))?;
    let built = lines
        .lines()
        .filter_map(|line| serde_json::from_str::<serde_json::Value>(line).ok())
        .find_map(|message| message.get("executable")?.as_str().map(PathBuf::from))
        .context("cargo named no executable of tachyon-bpf")?;
    let stripped = work.join("tachyon-bpf");
    command::run_quietly("stripping tachyon-bpf", Command::new("strip").arg("-o").arg(&stripped).arg(built))?;
    Ok(stripped)
}

/// The directory that becomes the guest's `/`.
struct Root(PathBuf);

impl Root {
    fn add(&self, file: &Path, inside: &str) -> Result<()> {
        let target = self.0.join(inside);
        let parent = target.parent().context("a file in the guest's root has a parent")?;
        fs::create_dir_all(parent).with_context(|| format!("cannot create {}", parent.display()))?;
        fs::copy(file, &target).with_context(|| format!("cannot copy {}", file.display()))?;
        Ok(())
    }

    /// A program, and if it is dynamic its libraries and its loader at the paths where it looks for them.
    fn add_program(&self, program: &Path, inside: &str) -> Result<()> {
        self.add(program, inside)?;
        if !is_dynamic(program)? {
            return Ok(());
        }
        let libraries = command::stdout(Command::new("ldd").arg(program))?;
        for path in library_paths(&libraries)? {
            self.add(Path::new(path), path.trim_start_matches('/'))?;
        }
        Ok(())
    }

    fn add_python(&self, program: &Path) -> Result<()> {
        self.add_program(Path::new(PYTHON), PYTHON.trim_start_matches('/'))?;
        let flags = ["-I", "-S", "-X", "utf8"];
        let modules = command::stdout(Command::new(PYTHON).args(flags).arg(program).arg("--modules"))?;
        // os.py is the landmark by which CPython finds its library (Modules/getpath.py).
        let landmark = format!("/usr/lib/{}/os.py", PYTHON.trim_start_matches("/usr/bin/"));
        for module in modules.lines().chain([landmark.as_str()]) {
            ensure!(Path::new(module).is_absolute(), "python loads a module from {module}");
            self.add(Path::new(module), module.trim_start_matches('/'))?;
        }
        Ok(())
    }
}

/// Whether the program asks for a loader; `ldd` fails for one that does not.
fn is_dynamic(program: &Path) -> Result<bool> {
    let cannot = || format!("cannot parse {}", program.display());
    let bytes = fs::read(program).with_context(|| format!("cannot read {}", program.display()))?;
    let file = FileHeader64::<Endianness>::parse(&*bytes).with_context(cannot)?;
    let endian = file.endian().with_context(cannot)?;
    let segments = file.program_headers(endian, &*bytes).with_context(cannot)?;
    Ok(segments.iter().any(|segment| segment.p_type(endian) == PT_INTERP))
}

/// The absolute paths in what `ldd` prints: `NAME => PATH (ADDRESS)`, or `PATH (ADDRESS)` for the loader.
fn library_paths(ldd: &str) -> Result<Vec<&str>> {
    let mut paths = Vec::new();
    for line in ldd.lines() {
        if line.contains("not found") {
            bail!("a library is missing: {}", line.trim());
        }
        let target = line.rsplit("=> ").next().unwrap_or(line).trim();
        paths.extend(target.split(' ').next().filter(|path| path.starts_with('/')));
    }
    Ok(paths)
}

/// Not compressed: unpacking takes an emulated CPU longer than reading.
fn pack(root: &Path, archive: &Path) -> Result<PathBuf> {
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
        let text =
            "\tlinux-vdso.so.1 (0x7f)\n\tlibm.so.6 => /lib/x/libm.so.6 (0x7f)\n\t/lib64/ld-linux-x86-64.so.2 (0x7f)\n";
        assert_eq!(library_paths(text).unwrap(), ["/lib/x/libm.so.6", "/lib64/ld-linux-x86-64.so.2"]);
        assert_eq!(library_paths("\tstatically linked\n").unwrap(), Vec::<&str>::new());
        assert!(library_paths("\tlibq.so => not found\n").is_err());
    }

    #[test]
    fn a_program_that_asks_for_a_loader_is_dynamic() {
        assert!(is_dynamic(Path::new("/proc/self/exe")).unwrap());
        assert!(is_dynamic(&project_root().join("Cargo.toml")).is_err());
    }
}
