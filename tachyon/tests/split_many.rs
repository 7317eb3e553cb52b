//! `--split process` with thousands of processes: no more open files than with one, and little memory for each.

use std::fs::File;
use std::io::{self, BufReader, BufWriter};
use std::path::PathBuf;
use tachyon::profile::{Frame, FrameId, Merge, Process, Profile, Sample, Thread, ThreadId};
use tachyon::report::{ProcessReport, Report};
use tachyon::sinks::split::{ProcessFiles, SplitSink};
use tachyon::sinks::tach::TachOptions;
use tachyon::sinks::{Sink, TachSink};
use tachyon::tach::Reader;

const PROCESSES: u32 = 2000;
const SAMPLES: u64 = 40;

/// A TACH file for each process.
struct Files {
    directory: PathBuf,
}

impl ProcessFiles for Files {
    fn open(&mut self, process: &Profile, lost: Option<f64>) -> io::Result<Box<dyn Sink + Send>> {
        let path = self.directory.join(process.processes[0].pid.to_string());
        let file = BufWriter::new(File::create(path)?);
        Ok(Box::new(TachSink::new(file, &process.meta, TachOptions::default())?.with_lost_percent(lost)))
    }

    fn close(&mut self) -> io::Result<()> {
        Ok(())
    }

    fn are_gone(&self) -> bool {
        false
    }
}

fn peak_kib() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    line.split_whitespace().next().unwrap().parse().unwrap()
}

#[test]
fn thousands_of_processes_take_few_files_and_little_memory() {
    // This is for the whole program: it is the only test in this file.
    nix::sys::resource::setrlimit(nix::sys::resource::Resource::RLIMIT_NOFILE, 24, 24).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let mut profile = Profile::default();
    profile.meta.many_processes = true;
    profile.meta.interval_us = 10_000;
    for pid in 1..=PROCESSES {
        profile.processes.push(Process { pid, comm: "worker".into(), ..Process::default() });
        let thread = Thread { process: pid - 1, tid: pid, ns_tid: pid, unique_tid: pid.into(), ..Thread::default() };
        profile.threads.push(thread);
    }
    let filename = profile.strings.intern("/srv/app.py");
    let frames: Vec<FrameId> = (0..500)
        .map(|lineno| {
            let function = profile.strings.intern(&format!("f{}", lineno / 5));
            profile.frames.intern(Frame { lineno, ..Frame::without_location(filename, function) })
        })
        .collect();
    let before = peak_kib();
    let whole = TachSink::new(tempfile::tempfile().unwrap(), &profile.meta, TachOptions::default()).unwrap();
    let files = Files { directory: dir.path().to_owned() };
    let mut sink = SplitSink::new(Box::new(whole), tempfile::tempfile().unwrap(), files);
    for number in 0..SAMPLES * u64::from(PROCESSES) {
        let start = (number * 31 % 460) as usize;
        let thread = ThreadId(u32::try_from(number % u64::from(PROCESSES)).unwrap());
        let sample = Sample {
            thread,
            time_us: number,
            status: 3,
            frames: &frames[start..start + 40],
            merge: Merge::None,
            work: None,
        };
        sink.sample(&profile, &sample).unwrap();
    }
    let report = Report {
        stored: SAMPLES * u64::from(PROCESSES),
        processes: (1..=PROCESSES).map(|pid| ProcessReport { pid, ..ProcessReport::default() }).collect(),
        ..Report::default()
    };
    sink.finish(&profile, &report).unwrap();
    let grown_kib = peak_kib() - before;
    assert!(grown_kib < 64 << 10, "{grown_kib} KiB");
    drop(sink);
    for pid in 1..=PROCESSES {
        let mut reader = Reader::new(BufReader::new(File::open(dir.path().join(pid.to_string())).unwrap())).unwrap();
        assert_eq!(reader.header().sample_count, SAMPLES, "{pid}");
        let mut samples = reader.samples().unwrap();
        let sample = samples.next_sample().unwrap().unwrap();
        assert_eq!((sample.thread_id, sample.frames.len()), (pid.into(), 40));
    }
}
