use super::*;
use crate::profile::{Frame, Process, Thread, ThreadId};
use base64::Engine as _;
use serde_json::Value;
use std::collections::BTreeMap;
use std::io::Read as _;

/// What a page shows: the document, and samples by thread, bucket, stack (`function:line`, root first) and state.
struct Read {
    document: Value,
    samples: BTreeMap<(u64, u64, String, u64), u64>,
}

fn read(page: &str) -> Read {
    let (_, rest) = page.split_once(r#"id="data">"#).unwrap();
    let (base64, _) = rest.split_once("</script>").unwrap();
    let gzip = STANDARD.decode(base64).unwrap();
    let mut bytes = Vec::new();
    flate2::read::GzDecoder::new(&gzip[..]).read_to_end(&mut bytes).unwrap();
    let mut bytes = &bytes[..];
    let get = |bytes: &mut &[u8]| super::super::streams::get(bytes).unwrap();
    let len = usize::try_from(get(&mut bytes)).unwrap();
    let document: Value = serde_json::from_slice(&bytes[..len]).unwrap();
    bytes = &bytes[len..];
    let mut stacks: Vec<String> = Vec::new();
    for own in 0..get(&mut bytes) {
        let (up, function, line) = (get(&mut bytes), get(&mut bytes), get(&mut bytes));
        let name = document["functions"]["name"][usize::try_from(function).unwrap()].as_u64().unwrap();
        let name = document["strings"][usize::try_from(name).unwrap()].as_str().unwrap();
        let before = match up {
            0 => String::new(),
            up => format!("{};", stacks[usize::try_from(own - up).unwrap()]),
        };
        stacks.push(format!("{before}{name}:{line}"));
    }
    let mut last = 0;
    let ends: Vec<String> = (0..get(&mut bytes))
        .map(|_| {
            last += get(&mut bytes);
            stacks[usize::try_from(last).unwrap()].clone()
        })
        .collect();
    let mut samples = BTreeMap::new();
    loop {
        let group = get(&mut bytes);
        if group == 0 {
            break;
        }
        let (thread, bucket, mut end) = (get(&mut bytes), get(&mut bytes), 0);
        for _ in 0..group {
            end += get(&mut bytes);
            let packed = get(&mut bytes);
            let stack = ends[usize::try_from(end).unwrap()].clone();
            *samples.entry((thread, bucket, stack, packed & 3)).or_default() += (packed >> 2) + 1;
        }
    }
    assert!(bytes.is_empty());
    Read { document, samples }
}

fn profile() -> Profile {
    let mut profile = Profile::default();
    profile.meta.start_us = 1000;
    profile.meta.interval_us = 10;
    profile.processes.push(Process { pid: 9, comm: "</script><b>".into(), ..Process::default() });
    for tid in [9, 10] {
        profile.threads.push(Thread { tid, ns_tid: tid, name: format!("t{tid}\u{1b}"), ..Thread::default() });
    }
    profile
}

fn sample(thread: u32, time_us: u64, status: u8, frames: &[crate::profile::FrameId]) -> Sample<'_> {
    Sample { thread: ThreadId(thread), time_us, status, frames, merge: Merge::Exact, work: None }
}

#[test]
fn all_samples_are_there_with_their_time_thread_and_state() {
    let mut profile = profile();
    let (file, function) = (profile.strings.intern("/lib/python3.12/json/x.py"), profile.strings.intern("f\n\"<"));
    let line = |lineno| Frame { lineno, ..Frame::without_location(file, function) };
    let (f3, f4) = (profile.frames.intern(line(3)), profile.frames.intern(line(4)));
    let native = profile.special_frame("libz.so!deflate");
    let mut sink = PageSink::new(Vec::new());
    sink.sample(&profile, &sample(0, 1010, 3, &[native, f3])).unwrap();
    sink.repeated(&profile, &sample(0, 1020, 3, &[native, f3]), &[1020, 1030, 1060]).unwrap();
    sink.sample(&profile, &sample(0, 1065, 2, &[f4, f3])).unwrap();
    sink.sample(&profile, &sample(1, 1010, 6, &[f3])).unwrap();
    sink.sample(&profile, &sample(1, 1010, 0, &[])).unwrap();
    let report = Report { loss: [("ring_full".to_owned(), 2), ("x".to_owned(), 0)].into(), ..Report::default() };
    sink.finish(&profile, &report).unwrap();
    let page = String::from_utf8(sink.out).unwrap();
    let read = read(&page);
    let (f, bucket) = ("f\\n\"<", read.document["bucket_us"].as_u64().unwrap());
    assert_eq!((bucket, &read.document["buckets"]), (50, &2.into()));
    let expected = [
        ((0, 0, format!("{f}:3;deflate:0"), 1), 3),
        ((0, 1, format!("{f}:3;deflate:0"), 1), 1),
        ((0, 1, format!("{f}:3;{f}:4"), 2), 1),
        ((1, 0, "<no frames>:0".to_owned(), 3), 1),
        ((1, 0, format!("{f}:3"), 0), 1),
    ];
    assert_eq!(read.samples, expected.into());
    assert_eq!(read.document["quality"]["loss"], serde_json::json!({"ring_full": 2}));
    assert_eq!(read.document["quality"]["merges"], serde_json::json!({"exact": 7}));
    assert_eq!(read.document["threads"][1], serde_json::json!({"name": "t10\\x1b (tid 10)", "process": 0}));
    let strings = read.document["strings"].as_array().unwrap();
    assert!(strings.contains(&"stdlib".into()) && strings.contains(&"libz.so".into()), "{strings:?}");
    assert!(!page.contains("<b>") && page.contains("&lt;b&gt; (9)</title>"), "names are text");
    assert!(page.contains("7 samples, 2 lost (22.2 %)"));
}

#[test]
fn too_many_nodes_are_pruned_and_no_sample_is_lost() {
    let mut profile = profile();
    let frames: Vec<_> = (0..200).map(|number| profile.special_frame(&format!("f{number}"))).collect();
    let mut sink = PageSink::new(Vec::new());
    for (number, &leaf) in frames[2..].iter().enumerate() {
        for time_us in 0..if number < 5 { 40 } else { 1 } {
            sink.sample(&profile, &sample(0, 2000 + time_us, 3, &[leaf, frames[1], frames[0]])).unwrap();
        }
    }
    let counts = Usage::of(&profile, &sink.spool).unwrap().counts;
    let mut tree = Tree::new(&profile, &sink.spool.stacks, false);
    assert_eq!(tree.len(), 200);
    tree.prune(&counts, 20);
    assert_eq!(tree.len(), 2 + 5 + 1);
    let mut by_node = BTreeMap::new();
    for (stack, count) in (0..).map(stacks::StackId).zip(counts) {
        *by_node.entry(tree.leaf(stack)).or_insert(0) += count;
    }
    assert_eq!(by_node.values().copied().collect::<Vec<_>>(), [40, 40, 40, 40, 40, 193]);
    assert_eq!(tree.nodes.iter().filter(|node| node.parent == 1).count(), 6 + usize::from(tree.nodes[1].parent == 1));
}

#[test]
fn nodes_are_in_preorder_and_stacks_keep_their_frames() {
    let mut profile = profile();
    let frames: Vec<_> = (0..20).map(|number| profile.special_frame(&format!("f{number}"))).collect();
    let mut sink = PageSink::new(Vec::new());
    let mut expected = BTreeMap::new();
    for number in 0..200_usize {
        // Leaf first; the stacks are in no particular order.
        let stack: Vec<_> = (0..1 + number % 5).map(|depth| frames[(number * 7 + depth * number) % 20]).collect();
        sink.sample(&profile, &sample(0, 1000, 3, &stack)).unwrap();
        let names =
            stack.iter().rev().map(|frame| format!("f{}", frames.iter().position(|known| known == frame).unwrap()));
        *expected.entry(names.collect::<Vec<_>>().join(":0;") + ":0").or_default() += 1;
    }
    let mut tree = Tree::new(&profile, &sink.spool.stacks, false);
    let before = tree.len();
    tree.sort();
    assert_eq!(tree.len(), before);
    let mut path: Vec<(u32, u32)> = Vec::new();
    for (own, node) in (0..).zip(&tree.nodes) {
        let open = if node.parent == own { 0 } else { path.iter().position(|(at, _)| *at == node.parent).unwrap() + 1 };
        // The sibling before it has a lower function.
        assert!(path.get(open).is_none_or(|(_, function)| *function < node.function));
        path.truncate(open);
        path.push((own, node.function));
    }
    sink.finish(&profile, &Report::default()).unwrap();
    let samples = read(&String::from_utf8(sink.out).unwrap()).samples;
    let by_stack: BTreeMap<String, u64> = samples.into_iter().map(|((_, _, stack, _), count)| (stack, count)).collect();
    assert_eq!(by_stack, expected);
}

#[test]
fn an_empty_profile_and_odd_times_make_a_page() {
    let mut sink = PageSink::new(Vec::new());
    sink.finish(&Profile::default(), &Report::default()).unwrap();
    assert_eq!(read(&String::from_utf8(sink.out).unwrap()).samples.len(), 0);
    let profile = profile();
    let mut sink = PageSink::new(Vec::new());
    for time_us in [u64::MAX, 0, 5] {
        sink.sample(&profile, &sample(0, time_us, 3, &[])).unwrap();
    }
    sink.finish(&profile, &Report::default()).unwrap();
    let read = read(&String::from_utf8(sink.out).unwrap());
    assert_eq!(read.samples.values().sum::<u64>(), 3);
    assert!(read.document["buckets"].as_u64().unwrap() <= 600);
}
