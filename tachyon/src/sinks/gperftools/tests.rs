use super::*;
use crate::profile::{Frame, FrameId, Merge, NativeMapping, NativePlace, Process, Thread};
use object::{Object, ObjectSymbol};
use std::sync::{Arc, Mutex};
use symbols::BASE;

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
    let mut sink = GperftoolsSink::new(
        Vec::new(),
        Box::new(elf.clone()),
        "/tmp/app.prof.so".into(),
        RootOptions { by_thread, ..RootOptions::default() },
    );
    for frames in samples {
        sink.sample(
            profile,
            &Sample { thread: ThreadId(0), time_us: 0, status: 0, frames, merge: Merge::None, work: None },
        )
        .unwrap();
    }
    sink.finish(profile, &Report::default()).unwrap();
    let elf = elf.0.lock().unwrap().clone();
    let trailer: Vec<u8> = [0_u64, 1, 0].iter().flat_map(|word| word.to_le_bytes()).collect();
    let text_start = 24 + sink.out.windows(24).rposition(|window| window == trailer).unwrap();
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
    assert_eq!(text, "200000000000-200000001000 r-xp 200000000000 00:00 0                          /tmp/app.prof.so\n");
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
fn programs_and_libraries() {
    for (path, program) in [
        ("/usr/bin/python3", true),
        ("/opt/a.so.d/python", true),
        ("/lib/libz.so", false),
        ("/lib/libz.so.1.3 (deleted)", false),
        ("/lib/libz.so_2", false),
        ("[vdso]", false),
        ("", false),
    ] {
        assert_eq!(is_program(path), program, "{path}");
    }
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
    for (function, shown) in [("<unknown>", "[unknown]"), ("<T as U>::f<V>", "<T as U>::f<V>")] {
        let place = super::place(&Label { kind: Kind::Native, function, filename: "libz.so.1", line: None });
        let names = (place.function.as_str(), place.symbol.as_str(), place.file.as_str());
        assert_eq!(names, (shown, shown, "libz.so.1"));
    }
}

/// Where a mapping of another process at the same addresses is moved to.
const MOVED: u64 = 0x3000_0000_0000;

#[test]
fn native_frames_keep_their_addresses() {
    let (mut profile, [module, ..]) = profile();
    let mapping = |process, start, end, path: &str| {
        let (path, build_id) = (path.to_owned(), String::new());
        NativeMapping { process, start, end, offset: 0x3000, path, build_id }
    };
    let z = Some(profile.native_mapping(mapping(0, 0x7f00_0000_0000, 0x7f00_0000_8000, "/lib/libz.so.1")));
    let python = Some(profile.native_mapping(mapping(0, 0x40_0000, 0x80_0000, "/usr/bin/python3")));
    let other = Some(profile.native_mapping(mapping(1, 0x7f00_0000_7000, 0x7f00_0000_f000, "/lib/libm.so.6")));
    let mut frame = |name: &str, mapping, address, inlined| {
        let place = NativePlace { mapping, address, vaddr: address, inlined };
        profile.native_frame(name, (name == "libz.so.1!deflate").then_some("/z.c"), Some(7), place)
    };
    let deflate = [0x7f00_0000_0010, 0x7f00_0000_0014].map(|address| frame("libz.so.1!deflate", z, address, false));
    let next = frame("libz.so.1!next", z, 0x7f00_0000_0015, false);
    let inner = frame("libz.so.1!inner", z, 0x7f00_0000_0010, true);
    let main = frame("python3!main", python, 0x40_1234, false);
    let sin = frame("libm.so.6!sin", other, 0x7f00_0000_7010, false);
    let nonsense = frame("libz.so.1!nonsense", z, 0x10, false);
    let loose = frame("[jit]", None, 0x5000, false);
    let stacks = [
        &[deflate[0], module, main][..],
        &[nonsense, deflate[1], module, main],
        &[nonsense, deflate[1], main],
        &[inner, deflate[0], module, main],
        &[sin, main],
        &[nonsense, loose],
        // `deflate` has just returned to itself.
        &[next, next],
    ];
    let (words, text, elf) = write(&profile, false, &stacks);
    // Sorted by file: x.<module>, libz.so.1's, then under ~.
    let slot = |index: u64| BASE + index * SLOT;
    let (inner, nonsense, module, loose) = (slot(1), slot(2), slot(0), slot(3));
    assert_eq!(
        words,
        [
            &[0, 3, 0, 10_101, 0][..],
            &[1, 3, 0x7f00_0000_0010, module + 2, 0x40_1235],
            // Another function begins where the second turn's address would lead.
            &[1, 4, nonsense, 0x7f00_0000_0015, module + 2, 0x40_1235],
            &[1, 3, nonsense, 0x7f00_0000_0015, 0x40_1235],
            &[1, 4, inner, 0x7f00_0000_0011, module + 2, 0x40_1235],
            &[1, 2, MOVED + 0x10, 0x40_1235],
            &[1, 2, nonsense, loose + 2],
            &[1, 2, 0x7f00_0000_0015, 0x7f00_0000_0016],
            &[0, 1, 0],
        ]
        .concat()
    );
    let lines: Vec<String> = text.lines().map(|line| line.replace(" 00:00 0                          ", " ")).collect();
    assert_eq!(
        lines,
        [
            "000000000000-000000001000 r-xp 00000000 /usr/bin/python3",
            "000000400000-7f0000008000 r-xp 00400000 /tmp/app.prof.so",
            "000000400000-000000800000 r-xp 00400000 /tmp/app.prof.so",
            "000000400000-000000800000 r-xp 00003000 /usr/bin/python3",
            "300000000000-300000008000 r-xp 300000000000 /tmp/app.prof.so",
            "300000000000-300000008000 r-xp 00003000 /lib/libm.so.6",
            "7f0000000000-7f0000008000 r-xp 7f0000000000 /tmp/app.prof.so",
            "7f0000000000-7f0000008000 r-xp 00003000 /lib/libz.so.1",
        ]
    );
    let elf = object::File::parse(&*elf).unwrap();
    let symbols = elf.symbols().filter(|symbol| !(BASE..MOVED).contains(&symbol.address()));
    let mut symbols: Vec<_> =
        symbols.map(|symbol| (symbol.address(), symbol.size(), symbol.name().unwrap().to_owned())).collect();
    symbols.sort_unstable();
    let symbol = |address, size, name: &str| (address, size, name.to_owned());
    assert_eq!(
        symbols,
        [
            symbol(0x40_1234, 2, "main"),
            symbol(MOVED + 0x10, 2, "sin"),
            symbol(0x7f00_0000_0010, 5, "deflate"),
            symbol(0x7f00_0000_0015, 2, "next"),
        ]
    );
}
