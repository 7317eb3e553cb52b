//! A profile of a made-up service, whose calls branch as those of a program do. The same numbers give the same bytes. Also
//! compiled into the test `tests/tests/exports/page_large.rs`, which opens a smaller one.

use std::collections::HashSet;
use std::io::{self, Seek, Write};

use tachyon::profile::{Frame, FrameId, Merge, Process, Profile, Sample, Thread, ThreadId};
use tachyon::report::Report;
use tachyon::sinks::tach::TachOptions;
use tachyon::sinks::{Sink, TachSink};

/// Functions of the program, files that they are in, and how many others each calls.
const FUNCTIONS: usize = 3000;
const FILES: usize = 180;
const CALLEES: usize = 7;
/// Native code, and functions of each object.
const OBJECTS: [&str; 8] = [
    "libc.so.6",
    "libz.so.1",
    "libcrypto.so.3",
    "libpq.so.5",
    "libxml2.so.2",
    "_json.cpython-313-x86_64-linux-gnu.so",
    "_multiarray_umath.cpython-313-x86_64-linux-gnu.so",
    "lib.cpython-313-x86_64-linux-gnu.so",
];
const SYMBOLS: usize = 60;
/// Frames of a stack.
const SHALLOWEST: usize = 10;
const DEEPEST: usize = 60;
/// Most frames that a stack has of its own, when it branches off another one.
const BRANCH: usize = 12;
const PROCESSES: u32 = 4;
const THREADS: u32 = 24;
const INTERVAL_US: u64 = 10_000;

/// A number below `most`, the low ones more often.
fn skewed(random: &mut fastrand::Rng, most: usize) -> usize {
    let share = random.f64();
    (share * share * share * most as f64) as usize
}

/// A function, and a line in it.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
enum Place {
    Python(usize, i32),
    Native(usize),
}

/// Whom each function calls, and at which lines.
struct Calls(Vec<Vec<(usize, i32)>>);

impl Calls {
    /// Goes on from the innermost function of a stack until it is so deep. In one of 16 places native code calls Python
    /// again, and four of ten stacks end in it.
    fn extend(&self, random: &mut fastrand::Rng, stack: &mut Vec<Place>, depth: usize) {
        let innermost = stack.iter().rev().find_map(|place| match place {
            Place::Python(function, _) => Some(*function),
            Place::Native(_) => None,
        });
        let mut at = innermost.map_or(0, |function| self.0[function][skewed(random, CALLEES)].0);
        let leaves = if random.u8(..10) < 4 { random.usize(1..6) } else { 0 };
        while stack.len() + leaves + 1 < depth {
            let (next, line) = self.0[at][skewed(random, CALLEES)];
            stack.push(Place::Python(at, line));
            if random.u8(..16) == 0 {
                stack.push(Place::Native(next % (OBJECTS.len() * SYMBOLS)));
            }
            at = next;
        }
        stack.push(Place::Python(at, random.i32(1..60)));
        let mut native = at * 7;
        for _ in 0..leaves {
            native += skewed(random, 9);
            stack.push(Place::Native(native % (OBJECTS.len() * SYMBOLS)));
        }
    }
}

/// Distinct stacks, outermost place first. Most branch off another one near its leaf.
fn stacks(random: &mut fastrand::Rng, distinct: usize) -> Vec<Vec<Place>> {
    let calls = (0..FUNCTIONS)
        .map(|_| (0..CALLEES).map(|_| (random.usize(..FUNCTIONS), random.i32(1..60))).collect())
        .collect();
    let calls = Calls(calls);
    let mut stacks: Vec<Vec<Place>> = Vec::with_capacity(distinct);
    let mut known = HashSet::with_capacity(distinct);
    while stacks.len() < distinct {
        let mut stack = Vec::new();
        let mut depth = random.usize(SHALLOWEST..=DEEPEST);
        if !stacks.is_empty() && random.u8(..5) > 0 {
            let other: &Vec<Place> = &stacks[random.usize(..stacks.len())];
            let shared = other.len() - random.usize(1..=BRANCH.min(other.len()));
            stack.extend_from_slice(&other[..shared]);
            depth = (shared + random.usize(1..=BRANCH)).clamp(SHALLOWEST, DEEPEST);
        }
        calls.extend(random, &mut stack, depth);
        if known.insert(stack.clone()) {
            stacks.push(stack);
        }
    }
    stacks
}

/// Writes a TACH file of `count` samples, which have `distinct` stacks.
///
/// # Errors
/// It cannot be written.
pub fn write(out: impl Write + Seek, count: usize, distinct: usize) -> io::Result<()> {
    let mut random = fastrand::Rng::with_seed(13);
    let mut profile = Profile::default();
    profile.meta.start_us = 1_000_000;
    profile.meta.start_unix = 1_700_000_000.0;
    profile.meta.interval_us = INTERVAL_US;
    profile.meta.native = true;
    for number in 0..PROCESSES {
        profile.processes.push(Process { pid: 100 + number, comm: "service".into(), ..Process::default() });
    }
    for tid in 0..THREADS {
        let name = format!("worker-{tid}");
        let process = tid % PROCESSES;
        profile.threads.push(Thread { tid, ns_tid: tid, unique_tid: tid.into(), name, process, ..Thread::default() });
    }
    let file = |file: usize| format!("/srv/app/part{}/module{file}.py", file % 12);
    let mut frame = |place: &Place| match *place {
        Place::Python(function, line) => {
            let filename = profile.strings.intern(&file(function % FILES));
            let name = profile.strings.intern(&format!("Class{}.method_{function}", function % 400));
            let lineno = 1 + (function as i32 % 50) * 60 + line;
            profile.frames.intern(Frame { lineno, end_lineno: lineno, ..Frame::without_location(filename, name) })
        }
        Place::Native(symbol) => {
            let object = OBJECTS[symbol / SYMBOLS];
            profile.special_frame(&format!("{object}!{}_{}", &object[..4], symbol % SYMBOLS))
        }
    };
    let mut known = std::collections::HashMap::new();
    let stacks: Vec<Vec<FrameId>> = stacks(&mut random, distinct)
        .iter()
        .map(|stack| stack.iter().rev().map(|place| *known.entry(*place).or_insert_with(|| frame(place))).collect())
        .collect();
    let mut sink = TachSink::new(out, &profile.meta, TachOptions::default())?;
    let mut time_us = profile.meta.start_us;
    // Each stack once, and some of them very often.
    let mut order: Vec<usize> =
        (0..count).map(|number| if number < distinct { number } else { skewed(&mut random, distinct) }).collect();
    random.shuffle(&mut order);
    for stack in order {
        let thread = ThreadId(random.u32(..THREADS));
        let frames = &stacks[stack];
        let status = random.u8(2..4);
        sink.sample(&profile, &Sample { thread, time_us, status, frames, merge: Merge::Exact, work: None })?;
        time_us += INTERVAL_US / 8;
    }
    let duration_s = (time_us - profile.meta.start_us) as f64 / 1e6;
    let stops = [("complete".to_owned(), count as u64)].into();
    let report = Report { stored: count as u64, duration_s, rate_hz: 100.0, stops, ..Report::default() };
    sink.finish(&profile, &report)
}
