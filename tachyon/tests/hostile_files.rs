//! Small files that would cost a lot: each command and each format ends within the bounds of `docs/limits.md`, or with an error
//! that says what it cost. With `TACHYON_HOSTILE_FILES=all` the files are ten times as large, and all formats are tried.

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::LazyLock;
use std::time::Duration;
use tempfile::TempDir;

/// A file may cost this for each 16 MiB begun.
const MOST_CPU: Duration = Duration::from_secs(10);
const MOST_BYTES: u64 = 512 << 20;
/// What is checked 100 times a second may have grown in between.
const SLACK: u64 = 96 << 20;

/// Whether the files are as large, and the commands as many, as when they were found to hurt. Each run of the tests has time for a
/// tenth of that.
fn all() -> bool {
    std::env::var_os("TACHYON_HOSTILE_FILES").is_some_and(|value| value == "all")
}

fn some(count: u64) -> u64 {
    if all() { count } else { count / 10 }
}

fn varint(out: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        out.push(value as u8 | 0x80);
        value >>= 7;
    }
    out.push(value as u8);
}

/// A file as its parts say, however absurd.
struct File {
    samples: zstd::Encoder<'static, Vec<u8>>,
    count: u64,
    threads: u32,
    strings: Vec<Vec<u8>>,
    frames: Vec<(u64, u64, u64)>,
}

impl File {
    fn put(&mut self, bytes: &[u8]) {
        self.samples.write_all(bytes).expect("memory takes all");
    }

    fn varint(&mut self, value: u64) {
        let mut bytes = Vec::new();
        varint(&mut bytes, value);
        self.put(&bytes);
    }

    fn record(&mut self, thread: u64, encoding: u8) {
        self.put(&thread.to_le_bytes());
        self.put(&0_u32.to_le_bytes());
        self.put(&[encoding]);
    }

    fn full(&mut self, thread: u64, frames: impl ExactSizeIterator<Item = u64>) {
        self.record(thread, 1);
        self.put(&[1, 3]);
        self.varint(frames.len() as u64);
        frames.for_each(|frame| self.varint(frame));
        self.count += 1;
    }

    fn repeat(&mut self, thread: u64, pairs: &[u8], times: u64) {
        self.record(thread, 0);
        let count = times * (pairs.len() as u64 / 2);
        self.varint(count);
        (0..times).for_each(|_| self.put(pairs));
        self.count += count;
    }

    fn named(count: u64, name: impl Fn(u64) -> String) -> Self {
        let strings = (0..count).map(|number| name(number).into_bytes()).collect();
        let samples = zstd::Encoder::new(Vec::new(), 3).expect("memory is packed");
        let frames = (0..count).map(|number| (number, number, number)).collect();
        Self { samples, count: 0, threads: 1, strings, frames }
    }

    fn bytes(self) -> Vec<u8> {
        let packed = self.samples.finish().expect("memory is packed");
        let (mut strings, mut frames) = (Vec::new(), Vec::new());
        for string in &self.strings {
            varint(&mut strings, string.len() as u64);
            strings.extend_from_slice(string);
        }
        for &(file, function, line) in &self.frames {
            varint(&mut frames, file);
            varint(&mut frames, function);
            varint(&mut frames, line << 1);
            frames.extend_from_slice(&[0, 0, 0, 255]);
        }
        let strings_at = 64 + packed.len() as u64;
        let frames_at = strings_at + strings.len() as u64;
        let mut file = Vec::new();
        file.extend_from_slice(&0x5441_4348_u32.to_le_bytes());
        file.extend_from_slice(&1_u32.to_le_bytes());
        file.extend_from_slice(&[3, 15, 0, 0]);
        for number in [1_000_000_u64, 1000, self.count] {
            file.extend_from_slice(&number.to_le_bytes());
        }
        file.extend_from_slice(&self.threads.to_le_bytes());
        file.extend_from_slice(&strings_at.to_le_bytes());
        file.extend_from_slice(&frames_at.to_le_bytes());
        file.extend_from_slice(&1_u32.to_le_bytes());
        file.extend_from_slice(&0_u32.to_le_bytes());
        assert_eq!(file.len(), 64);
        file.extend([packed, strings, frames].concat());
        file.extend_from_slice(&(self.strings.len() as u32).to_le_bytes());
        file.extend_from_slice(&(self.frames.len() as u32).to_le_bytes());
        let size = file.len() as u64 + 24;
        file.extend_from_slice(&size.to_le_bytes());
        file.extend_from_slice(&[0; 16]);
        file
    }
}

/// 500 million samples in 500 kilobytes: evenly spaced, and not.
fn repeats(pairs: &[u8]) -> File {
    let mut file = File::named(1, |_| "f".to_owned());
    file.full(1, [0].into_iter());
    // Uneven ones take all the time there is, with each command; a run of the tests has time for a fifth of them.
    let uneven = if pairs.len() > 2 && !all() { 5 } else { 1 };
    file.repeat(1, pairs, some(500_000_000) / (pairs.len() as u64 / 2) / uneven);
    file
}

/// Three million threads with one sample each.
fn threads() -> File {
    let mut file = File { threads: 3_000_000, ..File::named(1, |_| "f".to_owned()) };
    (0..some(3_000_000)).for_each(|thread| file.full(thread, [0].into_iter()));
    file
}

/// Stacks of 256 frames with long names, each stack different.
fn long_names() -> File {
    let mut file = File::named(256, |number| format!("{number}{}", "n".repeat(60_000)));
    for first in 0..some(60_000) {
        file.full(1, (0..256).map(|at| (at * 7 + first / 256 * at + first) % 256).collect::<Vec<_>>().into_iter());
    }
    file
}

/// A metadata document with many entries of one kind.
fn metadata(document: String) -> File {
    let mut file = File::named(1, |_| "f".to_owned());
    file.full(1, [0].into_iter());
    file.strings.push(format!("tachyon-bpf:metadata:1:{document}").into_bytes());
    file
}

fn many(key: &str, entry: impl Fn(u32) -> String, count: u32) -> String {
    format!("{{\"{key}\":[{}]}}", (0..count).map(entry).collect::<Vec<_>>().join(","))
}

/// 30,000 processes listed in the order of their pids, and their accounts in another order; all as this version writes them.
fn processes() -> String {
    use tachyon::report::{ProcessReport, Report};
    use tachyon::sinks::metadata::{Metadata, ProcessMetadata};
    const COUNT: u32 = 30_000;
    let comm = "python3".to_owned();
    let processes =
        (0..COUNT).map(|pid| ProcessMetadata { pid, comm: comm.clone(), ..ProcessMetadata::default() }).collect();
    let account = |at: u32| ProcessReport { pid: COUNT - 1 - at, samples: at.into(), ..ProcessReport::default() };
    let report = Report { processes: (0..COUNT).map(account).collect(), ..Report::default() };
    Metadata { processes, report, ..Metadata::default() }.to_entry()
}

/// How a file is made, with its name.
type Named = (&'static str, fn() -> File);

/// All of them.
fn files() -> [Named; 9] {
    [
        ("one repeat", || repeats(&[1, 3])),
        ("uneven repeats", || repeats(&[1, 3, 2, 3, 1, 2, 5, 3])),
        ("threads", threads),
        ("long names", long_names),
        ("empty threads", || metadata(many("threads", |_| "{}".to_owned(), 3_000_000))),
        ("empty processes", || metadata(many("processes", |_| "{}".to_owned(), 3_000_000))),
        ("notes", || {
            let notes = many("notes", |number| format!("\"{number}\""), 1_000_000);
            metadata(format!("{{\"report\":{notes}}}"))
        }),
        ("arguments", || {
            let process = format!("{{\"cmdline\":[{}\"\"]}}", "\"\",".repeat(1000));
            metadata(many("processes", |_| process.clone(), 3_000))
        }),
        ("processes", || {
            let entry = processes();
            metadata(entry.strip_prefix("tachyon-bpf:metadata:1:").expect("so it begins").to_owned())
        }),
    ]
}

static DIRECTORY: LazyLock<TempDir> = LazyLock::new(|| tempfile::tempdir().expect("a temporary directory"));

/// What a command used and said: CPU time, peak resident memory, and its output.
fn run(words: &[&str]) -> (Duration, u64, Option<i32>, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tachyon-bpf"));
    command
        .args(words)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .env("TMPDIR", DIRECTORY.path());
    #[expect(clippy::zombie_processes, reason = "it is waited for by another call, which tells what it has used")]
    let mut child = command.spawn().expect("it runs");
    let mut said = String::new();
    let mut stderr = child.stderr.take().expect("it is a pipe");
    std::io::Read::read_to_string(&mut stderr, &mut said).expect("it is text");
    let pid = i32::try_from(child.id()).expect("pids are positive");
    let (mut status, mut usage) = (0, std::mem::MaybeUninit::<libc::rusage>::zeroed());
    // SAFETY: the child is ours and has not been waited for; both pointers are to memory of these types.
    let waited = unsafe { libc::wait4(pid, &raw mut status, 0, usage.as_mut_ptr()) };
    assert_eq!(waited, pid);
    // SAFETY: all zeros are a value, and the kernel has filled it in.
    let usage = unsafe { usage.assume_init() };
    let time = |time: libc::timeval| Duration::new(time.tv_sec as u64, time.tv_usec as u32 * 1000);
    let code = libc::WIFEXITED(status).then(|| libc::WEXITSTATUS(status));
    (time(usage.ru_utime) + time(usage.ru_stime), usage.ru_maxrss as u64 * 1024, code, said)
}

fn is_bounded(file: &Path, words: &[&str]) {
    let (cpu, peak, code, said) = run(words);
    let units = std::fs::metadata(file).expect("it is there").len().div_ceil(16 << 20) as u32;
    println!("{words:?}: {cpu:.1?}, {} MiB, {code:?} {}", peak >> 20, said.lines().next().unwrap_or_default());
    // Between two checks of the clock, and until work in progress is done, a second may pass in an unoptimised build.
    assert!(cpu < MOST_CPU * units + Duration::from_secs(3), "{words:?}: {cpu:?}");
    assert!(peak < MOST_BYTES * u64::from(units) + SLACK, "{words:?}: {peak} bytes");
    let told = said.contains("it takes more than files of its size should: stopped after ")
        && said.contains(" s of CPU time with ")
        && said.contains("hint: if the file is to be trusted, --force-large goes on");
    assert!(code == Some(0) || (code == Some(1) && told), "{words:?}: {code:?} {said}");
}

/// Writes a file. Making it must take little memory: a child's peak is its parent's until it executes another program.
fn written(name: &str) -> PathBuf {
    let make = files().into_iter().find(|(known, _)| *known == name).expect("it is one of them").1;
    let file = make();
    let (count, bytes) = (file.count, file.bytes());
    println!("{name}: {} KiB, {count} samples", bytes.len() >> 10);
    assert!(bytes.len() <= 16 << 20, "{name}");
    let path = DIRECTORY.path().join(name.replace(' ', "_") + ".tach");
    std::fs::write(&path, bytes).expect("it is written");
    path
}

fn all_commands(name: &str) {
    let file = written(name);
    let text = file.to_str().expect("temporary paths are text").to_owned();
    let out = DIRECTORY.path().join(format!("{}.out", name.replace(' ', "_")));
    let out = out.to_str().expect("as above");
    is_bounded(&file, &["info", "--json", &text]);
    is_bounded(&file, &["report", &text]);
    is_bounded(&file, &["recover", &text, "-o", &format!("{out}.tach"), "--force"]);
    let (few, more) =
        (["collapsed", "html", "speedscope.json"], ["tach", "prof", "pb.gz", "svg", "firefox.json", "jsonl"]);
    if all() {
        is_bounded(&file, &["info", &text]);
        is_bounded(&file, &["diff", &text, "--", &text]);
        is_bounded(&file, &["merge", &text, &text, "-o", &format!("{out}.merged.tach"), "--force"]);
    }
    for ending in few.iter().chain(more.iter().filter(|_| all())) {
        is_bounded(&file, &["export", &text, "-o", &format!("{out}.{ending}"), "--force"]);
        let part = format!("{out}.{ending}.part");
        assert!(!Path::new(&part).exists(), "{part} is left");
        let _large = std::fs::remove_file(format!("{out}.{ending}"));
    }
}

macro_rules! each {
    ($($test:ident: $name:literal),+ $(,)?) => {$(
        #[test]
        fn $test() {
            all_commands($name);
        }
    )+};
}

each!(
    one_repeat: "one repeat",
    uneven_repeats: "uneven repeats",
    threads_without_end: "threads",
    names_without_end: "long names",
    empty_threads: "empty threads",
    empty_processes: "empty processes",
    notes: "notes",
    arguments: "arguments",
    many_processes: "processes",
);
