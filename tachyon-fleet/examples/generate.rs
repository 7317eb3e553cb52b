//! Tables of a fleet that does not exist, made from segments that do: which stacks a program has, and how often, is a real recording's; when a host has how
//! many samples is drawn at random. Some services are deployed in the middle, with changes that `regressions` has to find, or must not.
//!
//! `generate SEGMENTS OUT [--hosts 1000] [--days 7] [--seed 1] [--load 1.0]`; what was planted is written to OUT/planted.json.

use serde_json::json;
use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::time::{Duration, Instant};
use tachyon_fleet::hash::{FrameHash, StackId, stack_id};
use tachyon_fleet::rows::{FrameRow, Labels, LossRow, SampleRow};
use tachyon_fleet::segment::{self, Options, Segment};
use tachyon_fleet::tables;

/// Monday, 2026-11-16 00:00 UTC.
const START_MS: i64 = 1_794_787_200_000;
const MINUTE_MS: i64 = 60_000;
const HOUR_MS: i64 = 60 * MINUTE_MS;
/// Samples of a busy core in a minute.
const PER_MINUTE: f64 = 19.0 * 60.0;
const INTERVAL_NS: i64 = 52_631_579;
const SERVICES: usize = 20;
/// Services that have a new version in the middle.
const DEPLOYED: usize = 15;
/// Seconds that a rollout takes.
const ROLLOUT_MS: i64 = 2 * HOUR_MS;

/// Frames by id, and a program's stacks with their weights.
#[derive(Clone, Default)]
struct Program {
    stacks: Vec<(Vec<i64>, f64)>,
}

/// What a version of a service runs: stacks by id with their weights, and to which part of its work each belongs.
struct Release {
    version: &'static str,
    stacks: Vec<(StackId, f64, usize)>,
    /// CPU time of a request, as a factor.
    cost: f64,
}

struct Service {
    name: Arc<str>,
    releases: Vec<Release>,
    /// Share of a core that a host uses on the mean.
    load: f64,
    hosts: Vec<usize>,
}

struct Host {
    name: Arc<str>,
    /// How much more CPU time the same work takes.
    slow: f64,
    load: f64,
    loses: bool,
}

#[derive(Default)]
struct Dictionary {
    frames: HashMap<i64, FrameRow>,
    hashes: HashMap<i64, FrameHash>,
    stacks: HashMap<StackId, Arc<[i64]>>,
}

impl Dictionary {
    fn frame(&mut self, function: &str, file: &str) -> i64 {
        let hash = FrameHash::new("python", function, file, Some(1), None);
        let frame_id = hash.frame_id();
        self.hashes.insert(frame_id, hash);
        self.frames.entry(frame_id).or_insert_with(|| FrameRow {
            frame_id,
            function: function.into(),
            file: file.into(),
            line: Some(1),
            kind: "python".into(),
            build_id: None,
        });
        frame_id
    }

    fn add(&mut self, row: &FrameRow) {
        let hash = FrameHash::new(&row.kind, &row.function, &row.file, row.line, row.build_id.as_deref());
        self.hashes.insert(row.frame_id, hash);
        self.frames.insert(row.frame_id, row.clone());
    }

    fn stack(&mut self, frames: &[i64]) -> StackId {
        let hashes: Vec<FrameHash> = frames.iter().map(|frame| self.hashes[frame]).collect();
        let id = stack_id(&hashes);
        self.stacks.insert(id, frames.into());
        id
    }
}

/// Programs of real segments, one for each service in them.
fn programs(directory: &Path, dictionary: &mut Dictionary) -> Vec<Program> {
    let mut counts: BTreeMap<String, BTreeMap<Vec<i64>, f64>> = BTreeMap::new();
    let mut paths: Vec<PathBuf> = fs::read_dir(directory).expect("segments").map(|it| it.unwrap().path()).collect();
    paths.retain(|path| path.extension().is_some_and(|extension| extension == "tach"));
    paths.sort();
    for path in paths {
        let segment = segment::read(&path, Options { slice: Duration::from_secs(60), start: None }).expect("a segment");
        segment.frames.values().for_each(|frame| dictionary.add(frame));
        for row in segment.samples.iter().filter(|row| row.on_cpu_ns > 0) {
            let stack = segment.stacks[&row.stack_id].to_vec();
            // Programs of one script are told apart by their pid.
            let program = format!("{} {:?}", row.service, row.labels.pid);
            *counts.entry(program).or_default().entry(stack).or_default() += row.samples as f64;
        }
    }
    let mut programs: Vec<Program> =
        counts.into_values().map(|stacks| Program { stacks: stacks.into_iter().collect() }).collect();
    programs.retain(|program| program.stacks.iter().map(|(_, weight)| weight).sum::<f64>() >= 200.0);
    assert!(!programs.is_empty(), "no program with 200 samples in {}", directory.display());
    programs
}

fn normal(random: &mut fastrand::Rng) -> f64 {
    (-2.0 * (1.0 - random.f64()).ln()).sqrt() * (std::f64::consts::TAU * random.f64()).cos()
}

fn poisson(random: &mut fastrand::Rng, mean: f64) -> u64 {
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

/// Vose's alias method: draws from weights in constant time.
struct Alias {
    share: Vec<f64>,
    other: Vec<u32>,
}

impl Alias {
    fn new(weights: &[f64]) -> Self {
        let (count, sum) = (weights.len(), weights.iter().sum::<f64>());
        let mut share: Vec<f64> = weights.iter().map(|weight| weight * count as f64 / sum).collect();
        let mut other: Vec<u32> = (0..count as u32).collect();
        let (mut small, mut large): (Vec<usize>, Vec<usize>) = (0..count).partition(|&place| share[place] < 1.0);
        while let (Some(&a), Some(&b)) = (small.last(), large.last()) {
            small.pop();
            other[a] = b as u32;
            share[b] -= 1.0 - share[a];
            if share[b] < 1.0 {
                large.pop();
                small.push(b);
            }
        }
        Self { share, other }
    }

    fn draw(&self, random: &mut fastrand::Rng) -> usize {
        let place = random.usize(..self.share.len());
        if random.f64() < self.share[place] { place } else { self.other[place] as usize }
    }
}

/// Weighted stacks of a version before they have ids.
type Stacks = Vec<(Vec<i64>, f64)>;

/// The share of stacks whose innermost frame is this.
fn own(stacks: &Stacks, frame: i64) -> f64 {
    let sum: f64 = stacks.iter().map(|(_, weight)| weight).sum();
    stacks.iter().filter(|(frames, _)| frames.first() == Some(&frame)).map(|(_, weight)| weight).sum::<f64>() / sum
}

/// Puts a function above the heaviest stack, with this share of all.
fn with_function(stacks: &mut Stacks, frame: i64, share: f64) {
    let sum: f64 = stacks.iter().map(|(_, weight)| weight).sum();
    let heaviest = stacks.iter().max_by(|a, b| a.1.total_cmp(&b.1)).expect("a program has stacks").0.clone();
    let mut frames = vec![frame];
    // Called by Python, not by what native code runs there.
    frames.extend(&heaviest[heaviest.len().saturating_sub(4)..]);
    stacks.push((frames, sum * share / (1.0 - share)));
}

/// Which part of its work a stack belongs to: its fourth frame from the outside.
fn part(frames: &[i64]) -> i64 {
    frames.iter().rev().nth(3).or(frames.first()).copied().unwrap_or(0)
}

fn release(dictionary: &mut Dictionary, version: &'static str, stacks: &Stacks, cost: f64) -> Release {
    let mut parts: Vec<i64> = stacks.iter().map(|(frames, _)| part(frames)).collect();
    parts.sort_unstable();
    parts.dedup();
    let number = |frames: &[i64]| parts.binary_search(&part(frames)).expect("it is one of them");
    let stacks = stacks.iter().map(|(frames, weight)| (dictionary.stack(frames), *weight, number(frames))).collect();
    Release { version, stacks, cost }
}

/// The versions of a service, and what the second one changes.
fn releases(dictionary: &mut Dictionary, number: usize, stacks: Stacks) -> (Vec<Release>, serde_json::Value) {
    let file = format!("/srv/service{number}/app.py");
    let planted = dictionary.frame("planted", &file);
    let mut old = stacks;
    let share = match number {
        0 | 1 => 0.001,
        5 => 0.005,
        6 => 0.03,
        2 | 3 | 8 => 0.02,
        _ => 0.01,
    };
    if number != 4 {
        with_function(&mut old, planted, share);
    }
    let mut new = old.clone();
    let scaled = |new: &mut Stacks, factor: f64| {
        new.iter_mut().filter(|(frames, _)| frames[0] == planted).for_each(|(_, weight)| *weight *= factor);
    };
    let (what, real, cost) = match number {
        0 | 1 => {
            scaled(&mut new, 1.05);
            ("+5 % in a function with 0.1 %", true, 1.0)
        }
        2 => {
            let renamed = dictionary.frame("planted_renamed", &file);
            new.iter_mut()
                .flat_map(|(frames, _)| frames)
                .filter(|frame| **frame == planted)
                .for_each(|frame| *frame = renamed);
            ("a rename", false, 1.0)
        }
        3 => {
            let parts = ["planted_head", "planted_body"].map(|name| dictionary.frame(name, &file));
            let split: Stacks = new.iter().filter(|(frames, _)| frames[0] == planted).cloned().collect();
            new.retain(|(frames, _)| frames[0] != planted);
            for (frames, weight) in split {
                for (part, share) in parts.into_iter().zip([0.3, 0.7]) {
                    let mut frames = frames.clone();
                    frames.insert(0, part);
                    new.push((frames, weight * share));
                }
            }
            ("a split", false, 1.0)
        }
        4 => {
            with_function(&mut new, planted, 0.01);
            ("a new function with 1 %", true, 1.0)
        }
        5 => {
            scaled(&mut new, 2.0);
            ("twice a function with 0.5 %", true, 1.0)
        }
        6 => {
            scaled(&mut new, 0.7);
            ("-30 % of a function with 3 %", true, 1.0)
        }
        7 => ("+10 % CPU time of everything", true, 1.1),
        8 => {
            for (frames, _) in &mut new {
                if frames[0] == planted {
                    frames.remove(0);
                }
            }
            ("inlined into its caller", false, 1.0)
        }
        9 => ("a host with a slow CPU", false, 1.0),
        _ => ("a deploy that changes nothing", false, 1.0),
    };
    let told = json!({"service": format!("service{number}"), "what": what, "real": real,
        "before": own(&old, planted), "after": own(&new, planted)});
    let mut found = vec![release(dictionary, "1", &old, 1.0)];
    if number < DEPLOYED {
        // What is new takes CPU time of its own.
        let more: f64 =
            new.iter().map(|(_, weight)| weight).sum::<f64>() / old.iter().map(|(_, weight)| weight).sum::<f64>();
        found.push(release(dictionary, "2", &new, cost * more));
    }
    (found, told)
}

fn word(words: &[String], name: &str, default: f64) -> f64 {
    let place = words.iter().position(|word| word == name);
    place.and_then(|place| words.get(place + 1)?.parse().ok()).unwrap_or(default)
}

fn main() {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let [segments, out, ..] = &words[..] else {
        panic!("generate SEGMENTS OUT [--hosts N] [--days N] [--seed N] [--load N]")
    };
    let (hosts, days) = (word(&words, "--hosts", 1000.0) as usize, word(&words, "--days", 7.0) as i64);
    let (seed, load) = (word(&words, "--seed", 1.0) as u64, word(&words, "--load", 1.0));
    let began = Instant::now();
    let mut dictionary = Dictionary::default();
    let programs = programs(Path::new(segments), &mut dictionary);
    let mut random = fastrand::Rng::with_seed(seed);
    let host = |number: usize| Host {
        name: format!("host{number:04}").into(),
        slow: if number == 9 { 1.4 } else { 1.0 },
        load: (0.15 * normal(&mut fastrand::Rng::with_seed(seed ^ (number as u64) << 20))).exp(),
        loses: number % 20 == 3,
    };
    let all: Vec<Host> = (0..hosts).map(host).collect();
    let mut planted = Vec::new();
    let mut services = Vec::new();
    for number in 0..SERVICES {
        let program = &programs[number % programs.len()];
        // The same program at another work.
        let mut factors: HashMap<i64, f64> = HashMap::new();
        let stacks: Stacks = program
            .stacks
            .iter()
            .map(|(frames, weight)| {
                let factor = *factors.entry(part(frames)).or_insert_with(|| (0.7 * normal(&mut random)).exp());
                (frames.clone(), weight * factor)
            })
            .collect();
        let (releases, told) = releases(&mut dictionary, number, stacks);
        if number < DEPLOYED {
            planted.push(told);
        }
        services.push(Service {
            name: format!("service{number}").into(),
            releases,
            // Twice the 14 million samples a side that 5 % of a function with 0.1 % take, in three whole days of each version.
            load: load * if number < 2 { 0.055 } else { 0.005 },
            // Each host runs two.
            hosts: (0..hosts).filter(|host| host % SERVICES == number || (host * 7 + 3) % SERVICES == number).collect(),
        });
    }
    fs::create_dir_all(out).unwrap();
    fs::write(Path::new(out).join("planted.json"), json!({ "planted": planted }).to_string()).unwrap();
    let next = AtomicI64::new(0);
    let (samples, rows, bytes, files) = (AtomicU64::new(0), AtomicU64::new(0), AtomicU64::new(0), AtomicU64::new(0));
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                loop {
                    let hour = next.fetch_add(1, Ordering::Relaxed);
                    if hour >= days * 24 {
                        return;
                    }
                    let segment = hour_of(hour, days, seed, &services, &all, &dictionary);
                    samples.fetch_add(
                        segment.samples.iter().map(|row| row.samples.unsigned_abs()).sum(),
                        Ordering::Relaxed,
                    );
                    rows.fetch_add(segment.samples.len() as u64, Ordering::Relaxed);
                    for file in tables::files(&segment).expect("tables") {
                        bytes.fetch_add(file.bytes.len() as u64, Ordering::Relaxed);
                        files.fetch_add(1, Ordering::Relaxed);
                        let path = Path::new(out).join(&file.path);
                        fs::create_dir_all(path.parent().unwrap()).unwrap();
                        fs::write(path, file.bytes).unwrap();
                    }
                }
            });
        }
    });
    let (samples, rows, bytes) = (samples.into_inner(), rows.into_inner(), bytes.into_inner());
    println!(
        "{}",
        json!({
            "hosts": hosts, "days": days, "services": SERVICES, "stacks": dictionary.stacks.len(), "samples": samples, "rows": rows,
            "bytes": bytes, "files": files.into_inner(), "bytes_a_sample": bytes as f64 / samples as f64,
            "bytes_a_host_day": bytes as f64 / hosts as f64 / days as f64, "seconds": began.elapsed().as_secs_f64(),
        })
    );
}

/// An hour of all hosts.
fn hour_of(hour: i64, days: i64, seed: u64, services: &[Service], hosts: &[Host], dictionary: &Dictionary) -> Segment {
    let start_ms = START_MS + hour * HOUR_MS;
    let deploy_ms = START_MS + days * 12 * HOUR_MS;
    let mut segment = Segment {
        name: format!(
            "fleet-{}-{hour:06}",
            humantime::format_rfc3339_seconds(std::time::UNIX_EPOCH + Duration::from_millis(start_ms as u64))
                .to_string()
                .replace(['-', ':'], "")
        ),
        start_ms,
        slice_ms: MINUTE_MS,
        interval_ns: INTERVAL_NS,
        host: "fleet".into(),
        frames: dictionary.frames.clone(),
        stacks: dictionary.stacks.clone(),
        ..Segment::default()
    };
    // More by day than by night.
    let day = 1.0 + 0.6 * (std::f64::consts::TAU * ((hour % 24) as f64 - 8.0) / 24.0).sin();
    for (number, service) in services.iter().enumerate() {
        for (place, &host_number) in service.hosts.iter().enumerate() {
            let host = &hosts[host_number];
            let mut random =
                fastrand::Rng::with_seed(seed ^ ((hour as u64) << 32) ^ ((number as u64) << 16) ^ host_number as u64);
            let rolled_ms = deploy_ms + ROLLOUT_MS * place as i64 / service.hosts.len().max(1) as i64;
            // What hosts are asked for differs from hour to hour.
            let mixes: Vec<f64> = (0..256).map(|_| (0.05 * normal(&mut random)).exp()).collect();
            let table = |release: &Release| {
                Alias::new(
                    &release.stacks.iter().map(|(_, weight, part)| weight * mixes[part % 256]).collect::<Vec<_>>(),
                )
            };
            let tables: Vec<Alias> = service.releases.iter().map(table).collect();
            let labels: Vec<Arc<Labels>> = service
                .releases
                .iter()
                .enumerate()
                .map(|(number, release)| {
                    let pid = i32::try_from(1000 + 10 * place + number).unwrap();
                    Arc::new(Labels {
                        version: Some(release.version.to_owned()),
                        python: Some("3.12.1".into()),
                        pid: Some(pid),
                        ..Labels::default()
                    })
                })
                .collect();
            for minute in 0..60 {
                let slice_start_ms = start_ms + minute * MINUTE_MS;
                let of = usize::from(service.releases.len() > 1 && slice_start_ms >= rolled_ms);
                let release = &service.releases[of];
                let noise = (0.3 * normal(&mut random)).exp();
                let mean = PER_MINUTE * service.load * day * host.load * host.slow * release.cost * noise;
                let mut counts: Vec<(StackId, i64)> = Vec::new();
                for _ in 0..poisson(&mut random, mean) {
                    let stack = release.stacks[tables[of].draw(&mut random)].0;
                    match counts.iter_mut().find(|(known, _)| *known == stack) {
                        Some((_, count)) => *count += 1,
                        None => counts.push((stack, 1)),
                    }
                }
                segment.samples.extend(counts.into_iter().map(|(stack_id, samples)| SampleRow {
                    service: Arc::clone(&service.name),
                    slice_start_ms,
                    stack_id,
                    labels: Arc::clone(&labels[of]),
                    host: Arc::clone(&host.name),
                    on_cpu_ns: samples * INTERVAL_NS,
                    waiting_ns: 0,
                    samples,
                }));
            }
        }
    }
    for host in hosts.iter().filter(|host| host.loses) {
        segment.loss.push(LossRow {
            slice_start_ms: start_ms,
            host: Arc::clone(&host.name),
            cause: "ring_full".into(),
            runs: 1 + hour % 7,
        });
    }
    segment.samples.sort();
    segment.loss.sort();
    segment
}
