//! Packages from PyPI, in virtual environments of the tools' cache.

use crate::Interpreter;
use crate::interpreters::cache;
use std::path::Path;
use std::process::Command;

fn run(command: &mut Command) {
    let output = command.output().expect("it can be run");
    assert!(output.status.success(), "{command:?}:\n{}", String::from_utf8_lossy(&output.stderr));
}

/// The interpreter with these packages (`name==version`), which are fetched once. Only for those that run in the test's
/// own root directory, and for one test at a time, which the live tests' lock ensures.
///
/// # Panics
/// When they cannot be fetched.
#[must_use]
pub fn with_wheels(interpreter: &Interpreter, packages: &[&str]) -> Interpreter {
    assert!(interpreter.root.is_none(), "{} runs in another root directory", interpreter.name);
    let venv = cache().join("wheels").join(interpreter.name);
    let (python, list) = (venv.join("bin/python"), venv.join("installed"));
    let wanted = packages.join("\n");
    if std::fs::read_to_string(&list).ok().as_deref() != Some(&*wanted) {
        let remove = |path: &Path| if path.exists() { std::fs::remove_dir_all(path) } else { Ok(()) };
        remove(&venv).expect("the cache is ours");
        std::fs::create_dir_all(venv.parent().expect("it has one")).expect("the cache can be written");
        run(Command::new(&interpreter.path).args(["-m", "venv"]).arg(&venv));
        let install = ["-m", "pip", "install", "--disable-pip-version-check", "--only-binary=:all:"];
        run(Command::new(&python).args(install).args(packages));
        std::fs::write(&list, wanted).expect("the cache can be written");
    }
    Interpreter { path: python, ..interpreter.clone() }
}

/// What `PYTHONPATH` has to be for an interpreter to import a package that `cargo xtask test` sets up for pyenv's 3.13 and sid's 3.14:
/// `ddtrace`, which publishes the span that each thread is in, and `uvloop`; for 3.13 `gevent` with `eventlet` beside it, and for sid's 3.14
/// and 3.15 `greenlet`.
///
/// # Panics
/// When it is missing.
#[must_use]
pub fn package(name: &str, interpreter: &Interpreter) -> String {
    let (path, at) = match &interpreter.root {
        Some(root) => {
            let dir = Path::new(if interpreter.minor == 15 { "opt/3.15" } else { "opt" }).join(name);
            (Path::new("/").join(&dir), root.join(&dir))
        }
        None => (cache().join(name), cache().join(name)),
    };
    assert!(at.join(name).is_dir(), "{name} is missing in {}\nhint: cargo xtask test", at.display());
    path.to_str().expect("ASCII").to_owned()
}
