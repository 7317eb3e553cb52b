//! Faults, through the same code as everything else: writes that are short, interrupted or refused at any byte, the same
//! for reads, and processes that vanish while they are looked at.

use std::cell::Cell;
use std::io::{self, Cursor, Read, Seek, SeekFrom, Write};
use std::process::{Command, Stdio};
use tachyon::inspect::{ElfCache, Evaluator, examine_file, inspect};
use tachyon::remote::RemoteProcess;
use tachyon::remote::elf::{Elf, ReadAt};
use tachyon::tach::{Compression, Interner, Options, Reader, Sample, WriteError, Writer};
use tachyon::types::Pid;
use tachyon::unwind::{Table, compile};

/// An output that takes a few bytes at a time, is interrupted at every third call, and is full at some point.
struct Faulty {
    inner: Cursor<Vec<u8>>,
    room: usize,
    calls: usize,
}

impl Write for Faulty {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.calls += 1;
        if self.calls.is_multiple_of(3) {
            return Err(io::ErrorKind::Interrupted.into());
        }
        let at = usize::try_from(self.inner.position()).expect("it is small");
        let len = bytes.len().min(1 + self.calls % 7).min(self.room.saturating_sub(at));
        if len == 0 && !bytes.is_empty() {
            return Err(io::Error::from_raw_os_error(libc::ENOSPC));
        }
        self.inner.write(&bytes[..len])
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Seek for Faulty {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        self.inner.seek(to)
    }
}

/// Writes a small file into `room` bytes.
fn written(room: usize, compression: Compression) -> Result<Vec<u8>, WriteError> {
    let mut names = Interner::default();
    let faulty = Faulty { inner: Cursor::new(Vec::new()), room, calls: 0 };
    let mut writer = Writer::new(faulty, Options { compression, ..Options::default() })?;
    writer.keep_checkpoints();
    let frames: Vec<u32> = (0..8).map(|n| names.frame("f.py", &format!("f{n}"), None, None)).collect();
    let mut failed = None;
    for step in 0..30_usize {
        let frames = &frames[step % 8..];
        let sample = Sample { thread_id: 1, interpreter_id: 0, timestamp_us: step as u64 * 1000, status: 2, frames };
        let result = writer.write_sample(&sample);
        let result = result.and_then(|()| if step % 10 == 9 { writer.checkpoint().map(drop) } else { Ok(()) });
        if let Err(error) = result {
            // An output that failed once is not written to again.
            assert!(matches!(writer.write_sample(&sample), Err(WriteError::Broken)), "{error}");
            failed = Some(error);
            break;
        }
    }
    let strings: Vec<String> = names.strings().map(str::to_owned).collect();
    match failed {
        Some(error) => {
            assert!(writer.finish(strings, names.frames(), None).is_err());
            Err(error)
        }
        None => writer.finish(strings, names.frames(), None).map(|(faulty, _)| faulty.inner.into_inner()),
    }
}

#[test]
fn a_full_disk_at_every_byte_is_an_error() {
    for compression in [Compression::None, Compression::Zstd] {
        let whole = written(usize::MAX, compression).expect("short and interrupted writes are gone on with");
        let mut reader = Reader::new(Cursor::new(whole.clone())).expect("it is a good file");
        assert_eq!(reader.header().sample_count, 30);
        let mut samples = reader.samples().expect("it is a good file");
        let read = std::iter::from_fn(|| samples.next_sample().expect("it is a good file").map(|_| ())).count();
        assert_eq!(read, 30);
        for room in 0..whole.len() {
            let error = written(room, compression).expect_err("there is not enough room");
            let text = format!("{error}: {:?}", std::error::Error::source(&error).map(ToString::to_string));
            assert!(text.contains("No space left on device"), "{room} of {}: {text}", whole.len());
        }
    }
}

/// Bytes of the footer.
const FOOTER: u64 = 32;

/// An input that gives one byte at a time, is interrupted, and fails at some point.
struct Stuttering {
    inner: Cursor<Vec<u8>>,
    fails_at: u64,
    calls: usize,
}

impl Read for Stuttering {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        self.calls += 1;
        if self.calls.is_multiple_of(3) {
            return Err(io::ErrorKind::Interrupted.into());
        }
        if self.inner.position() >= self.fails_at {
            return Err(io::Error::from_raw_os_error(libc::EIO));
        }
        let left = usize::try_from(self.fails_at - self.inner.position()).unwrap_or(usize::MAX);
        let len = into.len().min(1 + self.calls % 3).min(left);
        self.inner.read(&mut into[..len])
    }
}

impl Seek for Stuttering {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        self.inner.seek(to)
    }
}

#[test]
fn a_read_that_fails_at_every_byte_is_an_error() {
    let read = |bytes: Vec<u8>, fails_at: u64| {
        let mut reader = Reader::new(Stuttering { inner: Cursor::new(bytes), fails_at, calls: 0 }).ok()?;
        let mut samples = reader.samples().ok()?;
        let mut count = 0;
        while samples.next_sample().ok()?.is_some() {
            count += 1;
        }
        Some(count)
    };
    for compression in [Compression::None, Compression::Zstd] {
        let whole = written(usize::MAX, compression).expect("there is room");
        assert_eq!(read(whole.clone(), u64::MAX), Some(30), "short and interrupted reads are gone on with");
        for fails_at in 0..whole.len() as u64 {
            let count = read(whole.clone(), fails_at);
            // No reader needs the file's last bytes (its size, and a checksum that is always 0).
            let needed = fails_at + FOOTER < whole.len() as u64;
            let right = count.is_none() || (count == Some(30) && !needed);
            assert!(right, "a read at {fails_at} of {} failed, and {count:?} samples came", whole.len());
        }
    }
}

/// A file that is cut short, or can no longer be read, from a certain read on.
struct Vanishing {
    bytes: &'static [u8],
    fails_at: usize,
    reads: Cell<usize>,
    error: Option<i32>,
}

impl ReadAt for Vanishing {
    fn read_exact_at(&self, offset: u64, into: &mut [u8]) -> io::Result<()> {
        if self.reads.replace(self.reads.get() + 1) < self.fails_at {
            return self.bytes.read_exact_at(offset, into);
        }
        Err(self.error.map_or_else(|| io::ErrorKind::UnexpectedEof.into(), io::Error::from_raw_os_error))
    }

    fn len_bytes(&self) -> io::Result<u64> {
        self.bytes.len_bytes()
    }
}

/// Everything that reads a target's file, with each of its reads failing in turn: a named error, or what the file says.
#[test]
fn files_that_vanish_while_they_are_read() {
    const LIBRARY: &[u8] = include_bytes!("../../fuzz/seeds/extension-x86_64.so");
    const PYTHON: &[u8] = include_bytes!("../../fuzz/seeds/libpython-3.13.so");
    let file = |bytes, fails_at, error| Vanishing { bytes, fails_at, reads: Cell::new(0), error };
    let table = |file: &Vanishing| -> Result<Table, String> {
        let elf = Elf::parse(file).map_err(|error| error.to_string())?;
        compile(&elf).map_err(|error| error.to_string())
    };
    let never = file(LIBRARY, usize::MAX, None);
    let whole = table(&never).expect("a good file");
    let reads = never.reads.get();
    assert!(reads > 4, "{reads}");
    let never = file(PYTHON, usize::MAX, None);
    // It has too little of CPython to be profiled, and no failing read changes that.
    assert!(matches!(examine_file(&never, false), Ok(Some(Err(_)))));
    let python_reads = never.reads.get();
    for error in [None, Some(libc::EIO), Some(libc::ESTALE)] {
        for fails_at in 0..reads {
            match table(&file(LIBRARY, fails_at, error)) {
                // Section headers are not needed.
                Ok(found) => assert_eq!(found, whole, "read {fails_at}"),
                Err(said) => assert!(!said.is_empty()),
            }
        }
        for fails_at in 0..python_reads {
            let found = examine_file(file(PYTHON, fails_at, error), false);
            assert!(!matches!(found, Ok(Some(Ok(_)))), "read {fails_at}: {found:?}");
            if let Ok(found) = Evaluator::of_file(file(PYTHON, fails_at, error)) {
                assert!(!found.parts().is_empty(), "read {fails_at}");
            }
        }
    }
    assert!(table(&file(LIBRARY, 0, None)).is_err());
}

/// Processes that exec and end while they are inspected: each is recognised, not recognised, or gone.
#[test]
fn processes_vanish_while_they_are_inspected() {
    let mut cache = ElfCache::default();
    let (mut gone, mut seen) = (0, 0);
    for _ in 0..60 {
        let mut command = Command::new("sh");
        let mut child = command.args(["-c", "exec true"]).stdin(Stdio::null()).spawn().expect("sh runs");
        // Until it has no memory any more; a zombie has none.
        for _ in 0..50 {
            let Ok(process) = RemoteProcess::open(Pid(child.id())) else { break };
            match inspect(&process, &mut cache) {
                Ok(_) => seen += 1,
                Err(error) if error.is_gone() => gone += 1,
                Err(error) => {
                    // A zombie's files show it in their own ways; the process must really be one.
                    let state = std::fs::read_to_string(format!("/proc/{}/stat", child.id())).unwrap_or_default();
                    let ended = state.rsplit(')').next().is_some_and(|rest| rest.starts_with(" Z"));
                    assert!(ended || state.is_empty(), "{error}: {state}");
                    gone += 1;
                    break;
                }
            }
        }
        child.wait().expect("a child can be waited for");
        let process = RemoteProcess::at(Pid(child.id()));
        assert!(inspect(&process, &mut cache).is_err_and(|error| error.is_gone()), "after its end");
    }
    assert!(seen + gone >= 60, "{seen} seen, {gone} gone");
}
