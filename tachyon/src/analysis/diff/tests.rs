//! Programs whose shares are known, sampled at random.

use super::*;
use crate::analysis::NoDistributions;
use crate::analysis::aggregate::{Entry, Place, Recording, ThreadInfo};
use crate::sinks::label::Kind;

/// Stacks, root first, with their share.
type Program<'a> = &'a [(&'a [&'a str], f64)];

/// How a program is sampled.
#[derive(Clone, Copy)]
struct Sampling {
    samples: f64,
    blocks: u16,
    interval_us: u64,
    seconds: f64,
}

const USUAL: Sampling = Sampling { samples: 20_000.0, blocks: 20, interval_us: 10_000, seconds: 64.0 };

/// A normal deviate (Box and Muller).
fn normal(random: &mut fastrand::Rng) -> f64 {
    (-2.0 * (1.0 - random.f64()).ln()).sqrt() * (std::f64::consts::TAU * random.f64()).cos()
}

/// How many of many rare events happen: Poisson's distribution, by its definition where numbers are small.
fn events(random: &mut fastrand::Rng, mean: f64) -> u64 {
    if mean > 60.0 {
        return (mean + mean.sqrt() * normal(random)).round().max(0.0) as u64;
    }
    let (limit, mut product, mut count) = ((-mean).exp(), random.f64(), 0);
    while product > limit {
        product *= random.f64();
        count += 1;
    }
    count
}

fn sampled(program: Program<'_>, sampling: Sampling, random: &mut fastrand::Rng) -> Aggregate {
    let mut aggregate = Aggregate::default();
    let thread = aggregate.intern_thread(ThreadInfo { pid: 1, process: "app (1)".into(), ..ThreadInfo::default() });
    let block_us = (sampling.seconds * 1e6 / f64::from(sampling.blocks)) as u64;
    let Sampling { interval_us, seconds, .. } = sampling;
    let recording = Recording { seconds, interval_us, block_us, ..Recording::default() };
    let recording = aggregate.push_recording(recording);
    for &(frames, share) in program {
        let stack: Vec<_> = frames
            .iter()
            .rev()
            .map(|name| {
                let (function, line) = name.split_once(':').map_or((*name, None), |(f, l)| (f, l.parse().ok()));
                let (function, file) = (aggregate.text(function), aggregate.text("/srv/app.py"));
                aggregate.intern_place(Place { kind: Kind::Python, function, file, line })
            })
            .collect();
        let stack = aggregate.intern_stack(&stack);
        for block in 0..sampling.blocks {
            let count = events(random, sampling.samples * share / f64::from(sampling.blocks));
            if count > 0 {
                aggregate.push_entry(Entry { recording, thread, stack, block, gil: None, on_cpu: true }, count);
            }
        }
    }
    aggregate
}

fn compare(before: &Aggregate, after: &Aggregate, by: By, rounds: usize) -> Difference {
    diff(before, after, Options { by, rounds, ..Options::default() }, &NoDistributions)
}

fn names(difference: &Difference) -> Vec<&str> {
    let significant = difference.changes.iter().filter(|change| change.measured.significant);
    significant.map(|change| change.name.name.as_str()).collect()
}

/// Twelve functions, from two fifths of the time to one sample in 700.
fn twelve() -> Vec<(Vec<String>, f64)> {
    let weights: Vec<f64> = (0..12).map(|number| 0.6_f64.powi(number)).collect();
    let sum: f64 = weights.iter().sum();
    let stack = |number: usize| vec!["main".to_owned(), format!("f{}", number / 4), format!("g{number}")];
    weights.iter().enumerate().map(|(number, weight)| (stack(number), weight / sum)).collect()
}

fn with_names<R>(program: &[(Vec<String>, f64)], then: impl FnOnce(Program<'_>) -> R) -> R {
    let frames: Vec<(Vec<&str>, f64)> =
        program.iter().map(|(stack, share)| (stack.iter().map(String::as_str).collect(), *share)).collect();
    let program: Vec<(&[&str], f64)> = frames.iter().map(|(stack, share)| (&stack[..], *share)).collect();
    then(&program)
}

/// Pairs of the same program with any significant row.
fn false_alarms(pairs: u64, sampling: Sampling) -> u64 {
    with_names(&twelve(), |program| {
        let alarm = |seed: &u64| {
            let mut random = fastrand::Rng::with_seed(1_000 + seed);
            let sides = [0, 1].map(|_| sampled(program, sampling, &mut random));
            !names(&compare(&sides[0], &sides[1], By::Function, 100)).is_empty()
        };
        (0..pairs).filter(alarm).count() as u64
    })
}

/// Of 1,000 pairs 10 are expected to raise a false alarm, and 20 are the upper end of the binomial 99.9 % interval.
#[test]
fn a_program_does_not_differ_from_itself() {
    let alarms = false_alarms(1000, USUAL);
    println!("{alarms} of 1000 pairs");
    assert!(alarms <= 20, "{alarms}");
}

/// Few replicates, few samples: the normal approximation at its worst.
#[test]
fn nor_where_little_is_known() {
    let alarms = false_alarms(1000, Sampling { samples: 600.0, blocks: 8, ..USUAL });
    println!("{alarms} of 1000 pairs");
    assert!(alarms <= 20, "{alarms}");
}

/// A program that works in phases of random length, independent of anything else.
#[test]
fn phases_are_noise() {
    let mut alarms = 0;
    for seed in 0..200 {
        let mut random = fastrand::Rng::with_seed(seed);
        let sides = [0, 1].map(|_| {
            let mut whole = Aggregate::default();
            let thread = whole.intern_thread(ThreadInfo { process: "app (1)".into(), ..ThreadInfo::default() });
            let recording =
                Recording { seconds: 128.0, interval_us: 10_000, block_us: 1_000_000, ..Recording::default() };
            let recording = whole.push_recording(recording);
            let stacks = ["load", "work"].map(|name| {
                let (function, file) = (whole.text(name), whole.text("/srv/app.py"));
                let place = whole.intern_place(Place { kind: Kind::Python, function, file, line: None });
                whole.intern_stack(&[place])
            });
            let mut share = 0.5;
            for block in 0..128 {
                // A phase lasts eight seconds on average.
                if random.f64() < 0.125 {
                    share = random.f64();
                }
                for (stack, part) in stacks.into_iter().zip([share, 1.0 - share]) {
                    let count = events(&mut random, 100.0 * part);
                    whole.push_entry(Entry { recording, thread, stack, block, gil: None, on_cpu: true }, count);
                }
            }
            whole
        });
        alarms += usize::from(!names(&compare(&sides[0], &sides[1], By::Function, 100)).is_empty());
    }
    println!("{alarms} of 200 pairs");
    // 2 are expected, 8 are the upper end.
    assert!(alarms <= 8, "{alarms}");
}

/// An increase of five percent in a function with one percent is found in four of five cases if that was promised.
#[test]
fn what_was_promised_to_be_visible_is_found() {
    let rest = 0.99 / 11.0;
    let stacks: Vec<String> = (0..11).map(|number| format!("f{number}")).collect();
    let program = |share: f64| {
        let mut program: Vec<(Vec<String>, f64)> =
            stacks.iter().map(|name| (vec!["main".to_owned(), name.clone()], rest)).collect();
        program.push((vec!["main".to_owned(), "small".to_owned()], share));
        program
    };
    let mut random = fastrand::Rng::with_seed(5);
    let mut sides = |sampling, share| {
        [0.01, share].map(|share| with_names(&program(share), |program| sampled(program, sampling, &mut random)))
    };
    // From what 100,000 samples can show follows how many it takes to show 0.05 % of the whole.
    let pilot = Sampling { samples: 1e5, blocks: 64, ..USUAL };
    let [before, after] = sides(pilot, 0.01);
    let visible = compare(&before, &after, By::Function, 100).smallest_visible_share.unwrap();
    let samples = 1e5 * (visible / 0.0005).powi(2);
    println!("{samples:.0} samples a side");
    assert!((1e6..3e6).contains(&samples), "{samples}");
    let mut found = 0;
    for _ in 0..200 {
        let [before, after] = sides(Sampling { samples, ..pilot }, 0.0105);
        let difference = compare(&before, &after, By::Function, 100);
        found += usize::from(names(&difference).contains(&"small"));
    }
    println!("{found} of 200");
    assert!(found >= 160, "{found}");
}

const BEFORE: Program<'static> = &[
    (&["main", "serve", "parse"], 0.3),
    (&["main", "serve", "parse", "token"], 0.1),
    (&["main", "serve", "render"], 0.2),
    (&["main", "serve"], 0.1),
    (&["main", "idle"], 0.3),
];

fn changes(after: Program<'_>, by: By) -> (Difference, Vec<String>) {
    let mut random = fastrand::Rng::with_seed(11);
    let sides = [BEFORE, after].map(|program| sampled(program, USUAL, &mut random));
    let difference = compare(&sides[0], &sides[1], by, 1000);
    let significant = names(&difference).into_iter().map(str::to_owned).collect();
    (difference, significant)
}

fn moved_to(difference: &Difference, name: &str) -> Option<String> {
    let change = difference.changes.iter().find(|change| change.name.name == name).unwrap();
    change.moved_to.as_ref().map(|name| name.name.clone())
}

#[test]
fn a_rename_is_no_change() {
    let (difference, significant) = changes(
        &[
            (&["main", "serve", "parse_fast"], 0.3),
            (&["main", "serve", "parse_fast", "token"], 0.1),
            (&["main", "serve", "render"], 0.2),
            (&["main", "serve"], 0.1),
            (&["main", "idle"], 0.3),
        ],
        By::Function,
    );
    assert!(significant.is_empty(), "{significant:?}");
    assert_eq!(moved_to(&difference, "parse").as_deref(), Some("parse_fast"));
    let parse = difference.changes.iter().find(|change| change.name.name == "parse").unwrap();
    assert!((parse.measured.change + 0.3).abs() < 0.02 && parse.samples.1 == 0);
}

#[test]
fn a_split_is_no_change() {
    let (difference, significant) = changes(
        &[
            (&["main", "serve", "parse"], 0.02),
            (&["main", "serve", "parse", "head"], 0.08),
            (&["main", "serve", "parse", "body"], 0.2),
            (&["main", "serve", "parse", "body", "token"], 0.1),
            (&["main", "serve", "render"], 0.2),
            (&["main", "serve"], 0.1),
            (&["main", "idle"], 0.3),
        ],
        By::Function,
    );
    assert!(significant.is_empty(), "{significant:?}");
    assert_eq!(moved_to(&difference, "parse").as_deref(), Some("body"));
}

#[test]
fn what_was_put_into_its_caller_is_no_change() {
    let (difference, significant) = changes(
        &[
            (&["main", "serve", "parse"], 0.4),
            (&["main", "serve", "render"], 0.2),
            (&["main", "serve"], 0.1),
            (&["main", "idle"], 0.3),
        ],
        By::Function,
    );
    assert!(significant.is_empty(), "{significant:?}");
    assert_eq!(moved_to(&difference, "token").as_deref(), Some("parse"));
}

#[test]
fn lines_that_shift_are_no_change() {
    let program = |shift: u32| {
        let line = |name: &str, line: u32| format!("{name}:{}", line + shift);
        vec![
            (vec!["main:1".to_owned(), line("work", 10)], 0.5),
            (vec!["main:1".to_owned(), line("work", 11)], 0.2),
            (vec!["main:1".to_owned(), "idle:2".to_owned()], 0.3),
        ]
    };
    let mut random = fastrand::Rng::with_seed(3);
    let sides = [0, 1].map(|shift| with_names(&program(shift), |program| sampled(program, USUAL, &mut random)));
    let difference = compare(&sides[0], &sides[1], By::Line, 1000);
    assert!(names(&difference).is_empty(), "{:?}", names(&difference));
}

/// A new cost is reported under its own name, not its caller's.
#[test]
fn new_cost_is_a_change() {
    let (difference, significant) = changes(
        &[
            (&["main", "serve", "parse"], 0.27),
            (&["main", "serve", "parse", "token"], 0.09),
            (&["main", "serve", "render"], 0.18),
            (&["main", "serve", "render", "log"], 0.1),
            (&["main", "serve"], 0.09),
            (&["main", "idle"], 0.27),
        ],
        By::Function,
    );
    assert!(significant.contains(&"log".to_owned()), "{significant:?}");
    let log = difference.changes.iter().find(|change| change.name.name == "log").unwrap();
    let (low, high) = log.measured.interval.unwrap();
    assert!(low < 0.1 && 0.1 < high && log.measured.q.unwrap() < 1e-4 && log.moved_to.is_none());
}

#[test]
fn the_rate_of_sampling_is_no_change() {
    let mut random = fastrand::Rng::with_seed(17);
    let slow = Sampling { samples: 6_336.0, interval_us: 10_101, ..USUAL };
    let fast = Sampling { samples: 64_000.0, interval_us: 1_000, ..USUAL };
    let (before, after) = (sampled(BEFORE, slow, &mut random), sampled(BEFORE, fast, &mut random));
    let difference = compare(&before, &after, By::Function, 1000);
    assert!(names(&difference).is_empty());
    assert!(difference.changes.iter().all(|change| !change.other.significant), "nor CPU seconds a second");
    let parse = difference.changes.iter().find(|change| change.name.name == "parse").unwrap();
    assert!((parse.measured.change).abs() < 0.03 && (parse.other.before - parse.other.after).abs() < 0.03);
}

/// Half of the load, the same work for each request.
#[test]
fn load_is_told_apart_from_cost() {
    let mut random = fastrand::Rng::with_seed(23);
    let busy = Sampling { samples: 40_000.0, ..USUAL };
    let sides = [busy, USUAL].map(|sampling| sampled(BEFORE, sampling, &mut random));
    let options = Options { per_unit: Some((2_000.0, 1_000.0)), ..Options::default() };
    let difference = diff(&sides[0], &sides[1], options, &NoDistributions);
    assert!(names(&difference).is_empty());
    let parse = difference.changes.iter().find(|change| change.name.name == "parse").unwrap();
    // 400 s of CPU time for 2,000 requests, and 30 % of that.
    assert!((parse.measured.before - 0.06).abs() < 0.003, "{parse:?}");
    let each = diff(&sides[0], &sides[1], Options::default(), &NoDistributions);
    assert!(names(&each).is_empty() && each.changes.iter().any(|change| change.other.significant));
}

/// Each request takes half as much again, in a program that is one function.
#[test]
fn more_of_everything_is_a_change_though_no_share_is() {
    const ALL: Program<'_> = &[(&["main"], 1.0)];
    let mut random = fastrand::Rng::with_seed(31);
    let more = Sampling { samples: 30_000.0, ..USUAL };
    let sides = [USUAL, more].map(|sampling| sampled(ALL, sampling, &mut random));
    let difference = compare(&sides[0], &sides[1], By::Function, 1000);
    let [main] = &difference.changes[..] else { panic!("{difference:?}") };
    assert!(!main.measured.significant && main.other.significant, "{main:?}");
    let again = sampled(ALL, USUAL, &mut random);
    let [main] = &compare(&sides[0], &again, By::Function, 1000).changes[..] else { panic!("one function") };
    assert!(!main.other.significant, "{main:?}");
}

#[test]
fn too_little_to_tell() {
    let mut random = fastrand::Rng::with_seed(29);
    let sides = [0, 1].map(|_| sampled(BEFORE, Sampling { blocks: 2, ..USUAL }, &mut random));
    let difference = compare(&sides[0], &sides[1], By::Function, 100);
    assert_eq!(difference.smallest_visible_share, None);
    assert!(difference.changes.iter().all(|change| change.measured.interval.is_none() && change.measured.q.is_none()));
    let empty = Aggregate::default();
    assert!(names(&compare(&empty, &sides[0], By::Function, 100)).is_empty());
    assert!(compare(&empty, &empty, By::Function, 100).changes.is_empty());
}
