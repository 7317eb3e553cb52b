//! C code from `programs/`, compiled for a test and put where an interpreter can see it.

use crate::{Interpreter, program};
use std::path::{Path, PathBuf};
use std::process::Command;
use tempfile::TempDir;

/// A shared library that exists as long as this value.
#[derive(Debug)]
pub struct SharedLibrary {
    /// Its path as the interpreter sees it.
    pub path: PathBuf,
    _dir: TempDir,
}

impl SharedLibrary {
    /// Compiles `programs/NAME.c`, or `NAME.cc`, without frame pointers, as distributions do, into `NAME.so`.
    ///
    /// # Panics
    /// Without a C compiler, or when it fails.
    #[must_use]
    pub fn compile(name: &str, interpreter: &Interpreter) -> Self {
        let mut builder = tempfile::Builder::new();
        builder.prefix("library");
        let dir = match &interpreter.root {
            Some(root) => builder.tempdir_in(root.join("tmp")),
            None => builder.tempdir(),
        };
        let dir = dir.expect("a temporary directory can be made");
        let file = dir.path().join(format!("{name}.so"));
        let cpp = program(&format!("{name}.cc"));
        let (compiler, source) = if cpp.exists() { ("c++", cpp) } else { ("cc", program(&format!("{name}.c"))) };
        let mut compiler = Command::new(compiler);
        compiler.args(["-O2", "-fPIC", "-shared", "-fomit-frame-pointer", "-fno-optimize-sibling-calls", "-o"]);
        let output = compiler.arg(&file).arg(source).output().expect("a compiler is there");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let path = match &interpreter.root {
            Some(root) => Path::new("/").join(file.strip_prefix(root).expect("it was made there")),
            None => file,
        };
        Self { path, _dir: dir }
    }

    /// The path as text.
    ///
    /// # Panics
    /// When it is not valid text.
    #[must_use]
    pub fn text(&self) -> &str {
        self.path.to_str().expect("temporary directories have plain names")
    }
}
