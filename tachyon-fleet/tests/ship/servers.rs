//! Servers for the tests, each a process of its own, killed with its handle.

use serde_json::{Value, json};
use std::fs;
use std::io::{BufRead as _, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

/// Python with what servers need (`cargo xtask test` fetches it).
pub(crate) fn python() -> Option<PathBuf> {
    cached("servers/bin/python3")
}

/// Something in the cache of the tests.
pub(crate) fn cached(path: &str) -> Option<PathBuf> {
    let cache = std::env::var_os("TACHYON_CACHE").map(PathBuf::from);
    let cache = cache.or_else(|| Some(std::env::home_dir()?.join(".cache/tachyon-bpf")))?;
    Some(cache.join(path)).filter(|path| path.exists())
}

/// A server that writes what came to a file.
pub(crate) struct Server {
    child: Child,
    /// What it told at its start.
    pub(crate) told: Value,
    out: PathBuf,
    control: PathBuf,
    words: Vec<String>,
}

impl Server {
    /// Starts a script of `tests/servers` and waits until it listens.
    pub(crate) fn start(script: &str, dir: &Path, more: &[&str]) -> Self {
        let name = script.trim_end_matches(".py");
        let (out, control) = (dir.join(format!("{name}.out")), dir.join(format!("{name}.control")));
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/servers").join(script);
        let mut words = vec![path.display().to_string(), out.display().to_string()];
        if script != "proxy.py" {
            words.push(control.display().to_string());
        }
        words.extend(more.iter().map(|&word| word.to_owned()));
        let (child, told) = spawn(&words);
        Self { child, told, out, control, words }
    }

    /// Of a kind.
    pub(crate) fn port(&self, kind: &str) -> u64 {
        self.told[kind].as_u64().expect("it tells its ports")
    }

    pub(crate) fn url(&self, kind: &str) -> String {
        format!("http://127.0.0.1:{}", self.port(kind))
    }

    /// What it is to do from now on.
    pub(crate) fn control(&self, mut wanted: Value) {
        // The same ports after a restart.
        wanted["port"] = json!(self.told.get("grpc").unwrap_or(&self.told["http"]));
        wanted["http_port"] = self.told["http"].clone();
        let new = self.control.with_extension("new");
        fs::write(&new, wanted.to_string()).unwrap();
        fs::rename(&new, &self.control).unwrap();
    }

    /// What came, message by message.
    pub(crate) fn came(&self) -> Vec<Value> {
        let text = fs::read_to_string(&self.out).unwrap_or_default();
        text.lines().filter_map(|line| serde_json::from_str(line).ok()).collect()
    }

    pub(crate) fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    pub(crate) fn restart(&mut self) {
        let (child, told) = spawn(&self.words);
        assert_eq!(told["http"], self.told["http"], "it listens where it did");
        self.child = child;
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ended = self.child.kill();
        let _ended = self.child.wait();
    }
}

fn spawn(words: &[String]) -> (Child, Value) {
    let python = python().expect("the test asked for it");
    let mut child = Command::new(python).args(words).stdout(Stdio::piped()).spawn().expect("Python starts");
    let mut line = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
    let told = serde_json::from_str(&line).unwrap_or_else(|_| panic!("{words:?} did not start: {line}"));
    (child, told)
}
