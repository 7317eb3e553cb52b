use super::*;
use crate::profile::{Frame, FrameId, Process, Thread};
use std::sync::{Arc, Mutex};

/// A file that the test keeps.
#[derive(Clone, Default)]
struct Shared(Arc<Mutex<Vec<u8>>>);

impl Write for Shared {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn profile() -> (Profile, [FrameId; 3]) {
    let mut profile = Profile::default();
    profile.meta.interval_us = 10_101;
    profile.processes.push(Process { pid: 9, comm: "app".into(), ..Process::default() });
    profile.threads.push(Thread { ns_tid: 5, ..Thread::default() });
    let mut frame = |function: &str, lineno| {
        let (file, function) = (profile.strings.intern("/srv/x.py"), profile.strings.intern(function));
        profile.frames.intern(Frame { lineno, ..Frame::without_location(file, function) })
    };
    let frames = [frame("<module>", 3), frame("f.<locals>.g", 4), frame("f.<locals>.g", 5)];
    (profile, frames)
}

fn write(profile: &Profile, by_thread: bool, samples: &[&[FrameId]]) -> (Vec<u64>, String, Vec<u8>) {
    let elf = Shared::default();
    let mut sink = GperftoolsSink::new(Vec::new(), Box::new(elf.clone()), "/tmp/a b.prof.so".into(), by_thread);
    for frames in samples {
        sink.sample(profile, &Sample { thread: ThreadId(0), time_us: 0, status: 0, frames }).unwrap();
    }
    sink.finish(profile, &Report::default()).unwrap();
    let elf = elf.0.lock().unwrap().clone();
    let text_start = sink.out.windows(3).position(|window| window == b"200").unwrap();
    let words = sink.out[..text_start].chunks(8).map(|word| u64::from_le_bytes(word.try_into().unwrap())).collect();
    (words, String::from_utf8(sink.out[text_start..].to_vec()).unwrap(), elf)
}

#[test]
fn to_the_letter() {
    let (profile, [module, g4, g5]) = profile();
    let (words, text, elf) = write(&profile, false, &[&[g4, module], &[g5, module], &[g4, module], &[], &[module]]);
    // Sorted: f.<locals>.g:4, :5, x.<module>:3, [no frames].
    let slot = |index: u64| BASE + index * SLOT;
    assert_eq!(
        words,
        [
            &[0, 3, 0, 10_101, 0][..],
            &[2, 2, slot(0), slot(2) + 2],
            &[1, 2, slot(1), slot(2) + 4],
            &[1, 1, slot(3)],
            &[1, 1, slot(2)],
            &[0, 1, 0],
        ]
        .concat()
    );
    assert_eq!(text, "200000000000-200000001000 r-xp 00001000 00:00 0                          /tmp/a b.prof.so\n");
    assert_eq!(&elf[..4], b"\x7fELF");
}

#[test]
fn one_stack_is_two_records() {
    let (mut profile, [module, g4, _]) = profile();
    let (words, ..) = write(&profile, false, &[&[g4, module][..]; 5]);
    assert_eq!(words[5..], [3, 2, BASE, BASE + SLOT + 2, 2, 2, BASE, BASE + SLOT + 4, 0, 1, 0]);
    let (words, ..) = write(&profile, false, &[&[module][..]; 5]);
    assert_eq!(words[5..], [5, 1, BASE, 0, 1, 0]);
    profile.meta.many_processes = true;
    let (words, ..) = write(&profile, true, &[&[module]]);
    // Sorted: x.<module>:3, then under ~: [no frames], app (9), thread 5.
    assert_eq!(words[5..], [1, 3, BASE, BASE + 3 * SLOT + 2, BASE + 2 * SLOT + 2, 0, 1, 0]);
}

#[test]
fn names_survive_readers() {
    for (function, filename, shown, symbol) in [
        ("<module>", "/a/b.py", "b.<module>", "b.{module}"),
        ("f.<locals>.g", "/a/b.py", "f.<locals>.g", "f.{locals}.g"),
        ("<lambda>", "<stdin>", "<stdin>.<lambda>", "{stdin}.{lambda}"),
        ("", "", "?", "?"),
        ("a\n(b)", "x", "a\\n(b)", "a\\n{b}"),
    ] {
        let place = place(&Label { kind: Kind::Python, function, filename, line: None });
        assert_eq!((place.function.as_str(), place.symbol.as_str()), (shown, symbol));
    }
    let place = place(&Label { kind: Kind::Special, function: "<stack cut: depth>", filename: "", line: None });
    assert_eq!((place.function.as_str(), place.file.as_str()), ("[stack cut: depth]", "~"));
}
