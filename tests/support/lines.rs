//! JSON lines, as far as tests look at them.

use serde::Deserialize;

/// One sample.
#[derive(Debug, Deserialize)]
pub struct Line {
    /// How its native and its Python stack fitted together; empty: no native frames were wanted.
    #[serde(default)]
    pub merge: String,
    /// Leaf first.
    pub frames: Vec<Frame>,
}

/// One frame.
#[derive(Debug, Deserialize)]
pub struct Frame {
    /// Its function, as the file has it.
    pub function: String,
    /// Its source file, or its object file; `None`: it has none.
    pub file: Option<String>,
    /// `python`, `native`, `kernel` or `special`.
    pub kind: String,
}

impl Line {
    /// All of a file.
    pub fn all(text: &str) -> impl Iterator<Item = Self> + '_ {
        text.lines().map(|line| serde_json::from_str(line).expect("each line is one sample"))
    }
}

impl Frame {
    /// Whether it is the target's own machine code.
    pub fn is_native(&self) -> bool {
        self.kind == "native"
    }

    /// The object file of a native frame, the source file of a Python one.
    pub fn object(&self) -> &str {
        self.file.as_deref().unwrap_or_default()
    }

    /// `object!function`, or a Python function's name.
    pub fn shown(&self) -> String {
        if self.is_native() { format!("{}!{}", self.object(), self.function) } else { self.function.clone() }
    }
}
