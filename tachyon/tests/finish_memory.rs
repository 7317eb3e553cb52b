//! A sink takes no more memory to finish its file than it says beforehand: a recording with `--max-memory` ends while there is
//! room for it.

use peak_alloc::PeakAlloc;
use tachyon::profile::{Frame, FrameId, Merge, Process, Profile, Sample, Thread, ThreadId};
use tachyon::report::Report;
use tachyon::sinks::export::{Companion, ExportOptions, open};
use tachyon::sinks::tach::{TachOptions, TachSink};
use tachyon::sinks::{Format, Sink};

#[global_allocator]
static ALLOCATOR: PeakAlloc = PeakAlloc;

/// How a profile is made: distinct stacks, frames of each, distinct frames, bytes of a name, threads.
#[derive(Clone, Copy, Debug)]
struct Shape {
    stacks: usize,
    depth: usize,
    frames: usize,
    name: usize,
    threads: u32,
}

const SHAPES: [Shape; 5] = [
    Shape { stacks: 4_000, depth: 40, frames: 500, name: 20, threads: 4 },
    Shape { stacks: 300, depth: 250, frames: 600, name: 4_000, threads: 1 },
    Shape { stacks: 6_000, depth: 2, frames: 6_000, name: 60, threads: 1 },
    Shape { stacks: 200, depth: 10, frames: 100, name: 30, threads: 2_000 },
    Shape { stacks: 10_000, depth: 12, frames: 500, name: 200, threads: 30 },
];

const FORMATS: [Format; 9] = [
    Format::Tach,
    Format::Collapsed,
    Format::Gperftools,
    Format::Pprof,
    Format::Speedscope,
    Format::Flamegraph,
    Format::Firefox,
    Format::Jsonl,
    Format::Report,
];

fn fill(shape: Shape, profile: &mut Profile, sink: &mut dyn Sink) {
    for number in 0..shape.threads {
        let comm = format!("python{number}");
        profile.processes.push(Process {
            pid: number + 1,
            comm,
            cmdline: vec!["a".to_owned(); 3],
            ..Process::default()
        });
        profile.threads.push(Thread {
            tid: number + 1,
            process: number,
            name: "worker".to_owned(),
            ..Thread::default()
        });
    }
    let text = "n".repeat(shape.name);
    let frames: Vec<FrameId> = (0..shape.frames)
        .map(|number| {
            let file = profile.strings.intern(&format!("/srv/{}{}.py", text, number / 10));
            let function = profile.strings.intern(&format!("{text}{number}"));
            let lineno = i32::try_from(number).expect("they are few");
            profile.frames.intern(Frame { lineno, ..Frame::without_location(file, function) })
        })
        .collect();
    let mut stack = Vec::new();
    for number in 0..shape.stacks {
        stack.clear();
        // Stacks that differ everywhere, so that no tree can join them.
        let place =
            |at: usize| (number.wrapping_mul(7919) + at.wrapping_mul(104_729) + number / (at + 1)) % shape.frames;
        stack.extend((0..shape.depth).map(|at| frames[place(at)]));
        let thread = ThreadId(u32::try_from(number).expect("they are few") % shape.threads);
        let sample =
            Sample { thread, time_us: number as u64 * 100, status: 1, frames: &stack, merge: Merge::None, work: None };
        sink.sample(profile, &sample).expect("memory takes all");
    }
}

#[test]
fn what_the_end_takes_is_known_before() {
    let mut wrong = Vec::new();
    for shape in SHAPES {
        for format in FORMATS {
            let mut profile = Profile::default();
            profile.meta.many_processes = true;
            profile.meta.interval_us = 100;
            let mut sink: Box<dyn Sink + Send> = match format {
                Format::Tach => {
                    let file = tempfile::tempfile().expect("a temporary file");
                    Box::new(TachSink::new(file, &profile.meta, TachOptions::default()).expect("a file takes it"))
                }
                format => {
                    let companion = Companion { file: Box::new(std::io::sink()), path: "/a.so".into() };
                    let options = ExportOptions { companion: Some(companion), ..ExportOptions::default() };
                    open(format, std::io::sink(), options).expect("it can be opened")
                }
            };
            fill(shape, &mut profile, &mut *sink);
            let told = sink.finish_bytes(&profile);
            ALLOCATOR.reset_peak_usage();
            let before = ALLOCATOR.current_usage();
            sink.finish(&profile, &Report::default()).expect("it ends");
            let took = (ALLOCATOR.peak_usage() - before) as u64;
            println!("{format} {shape:?}: {} of {} KiB", took >> 10, told >> 10);
            if took > told + (2 << 20) {
                wrong.push(format!("{format} {shape:?}: {took} of {told} bytes"));
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}
