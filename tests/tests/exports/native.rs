//! Native frames with real addresses, read by both `pprof`s.

use std::path::{Path, PathBuf};
use std::process::Command;
use tachyon::profile::{
    Frame, FrameId, MappingId, Merge, NativeMapping, NativePlace, Process, Profile, Sample, Thread, ThreadId,
};
use tachyon::report::Report;
use tachyon::sinks::Format;
use tachyon::sinks::export::{self, Companion, ExportOptions};
use tachyon::sinks::gperftools::companion_path;
use tachyon_tests::viewers::{Costs, go_pprof, perl_pprof, run, tools};

/// A library that is there, with symbols for both readers, though none at these addresses.
const THERE: &str = "/lib/x86_64-linux-gnu/libc.so.6";

struct Code {
    profile: Profile,
    module: FrameId,
    /// Functions of the existing library, of a missing one, of the program, and of a library that another process has
    /// at the same addresses.
    read: FrameId,
    deflate: [FrameId; 2],
    inner: FrameId,
    main: FrameId,
    sin: FrameId,
    vdso: FrameId,
}

fn code() -> Code {
    let mut profile = Profile::default();
    profile.meta.interval_us = 10_000;
    for pid in [77, 78] {
        profile.processes.push(Process { pid, comm: "app".into(), ..Process::default() });
        profile.threads.push(Thread { process: pid - 77, tid: pid, ns_tid: pid, ..Thread::default() });
    }
    let (file, function) = (profile.strings.intern("/srv/app.py"), profile.strings.intern("<module>"));
    let module = profile.frames.intern(Frame { lineno: 30, ..Frame::without_location(file, function) });
    let mut mapping = |process, start: u64, len, path: &str| {
        let (path, build_id) = (path.to_owned(), String::new());
        Some(profile.native_mapping(NativeMapping { process, start, end: start + len, offset: 0x1000, path, build_id }))
    };
    let libc = mapping(0, 0x7f12_3400_0000, 0x10_0000, THERE);
    let libz = mapping(0, 0x7f12_3500_0000, 0x2_0000, "/gone/libz.so.1");
    let python = mapping(0, 0x40_0000, 0x40_0000, "/usr/bin/python3");
    let libm = mapping(1, 0x7f12_3500_8000, 0x2_0000, "/gone/libm.so.6");
    let special = mapping(0, 0x7fff_1230_0000, 0x2000, "[vdso]");
    let mut frame = |name: &str, line: Option<u32>, mapping: Option<MappingId>, address: u64, inlined| {
        let place = NativePlace { mapping, address, vaddr: address, inlined };
        profile.native_frame(name, line.map(|_| "/src/z.c"), line, place)
    };
    Code {
        read: frame("libc.so.6!read", None, libc, 0x7f12_3400_0123, false),
        deflate: [(7, 0x7f12_3500_0100), (9, 0x7f12_3500_0110)]
            .map(|(line, address)| frame("libz.so.1!deflate", Some(line), libz, address, false)),
        inner: frame("libz.so.1!fill_window", Some(88), libz, 0x7f12_3500_0110, true),
        main: frame("python3!main", None, python, 0x40_1234, false),
        sin: frame("libm.so.6!sin", None, libm, 0x7f12_3500_8010, false),
        vdso: frame("[vdso]!clock_gettime", None, special, 0x7fff_1230_0100, false),
        profile,
        module,
    }
}

fn write(code: &Code, samples: &[(u32, &[FrameId], u64)], path: &Path) -> PathBuf {
    let format = Format::from_extension(path).unwrap();
    let companion = companion_path(path);
    let companion = Companion { file: Box::new(std::fs::File::create(&companion).unwrap()), path: companion };
    let options = ExportOptions { companion: Some(companion), ..ExportOptions::default() };
    let mut sink = export::open(format, std::fs::File::create(path).unwrap(), options).unwrap();
    for &(thread, frames, count) in samples {
        for _ in 0..count {
            let sample =
                Sample { thread: ThreadId(thread), time_us: 5, status: 3, frames, merge: Merge::None, work: None };
            sink.sample(&code.profile, &sample).unwrap();
        }
    }
    sink.finish(&code.profile, &Report::default()).unwrap();
    path.to_owned()
}

fn expected(rows: &[(&str, (u64, u64))]) -> Costs {
    rows.iter().map(|&(name, costs)| (name.to_owned(), costs)).collect()
}

#[test]
fn native_addresses_have_names_in_both_pprofs() {
    if tools().is_none() {
        return;
    }
    let code = code();
    let Code { module, read, deflate: [d7, d9], inner, main, sin, vdso, .. } = code;
    let samples: &[(u32, &[FrameId], u64)] = &[
        (0, &[d7, module, main], 40),
        (0, &[inner, d9, module, main], 20),
        (0, &[read, d9, module, main], 3),
        (0, &[vdso, module, main], 4),
        (0, &[module, main], 5),
        (1, &[sin, main], 6),
    ];
    let dir = tempfile::tempdir().unwrap();
    let functions = |module: &'static str| {
        expected(&[
            ("deflate", (40, 63)),
            ("fill_window", (20, 20)),
            ("read", (3, 3)),
            ("clock_gettime", (4, 4)),
            (module, (5, 72)),
            ("main", (0, 78)),
            ("sin", (6, 6)),
        ])
    };
    let file = write(&code, samples, &dir.path().join("app.prof"));
    let (found, head) = go_pprof(&file, &[]);
    assert_eq!(found, functions("app.<module>"), "{head}");
    let (found, _) = go_pprof(&file, &["-lines"]);
    assert_eq!(found["deflate /src/z.c:7"], (40, 40));
    assert_eq!(found["deflate /src/z.c:9"], (0, 23));
    assert_eq!(found["app.<module> /srv/app.py:30"], (5, 72));
    let (found, head) = perl_pprof(&file, &[]);
    assert_eq!(found, functions("app.{module}"), "{head}");
    let (found, _) = perl_pprof(&file, &["--lines"]);
    assert_eq!((found["deflate /src/z.c:7"], found["deflate /src/z.c:9"]), ((40, 40), (0, 23)));
    let objects = String::from_utf8_lossy(&std::fs::read(&file).unwrap()).into_owned();
    for line in [
        format!("7f1234000000-7f1234100000 r-xp 00001000 00:00 0                          {THERE}\n"),
        "7f1235000000-7f1235020000 r-xp 00001000 00:00 0                          /gone/libz.so.1\n".into(),
        "300000000000-300000020000 r-xp 00001000 00:00 0                          /gone/libm.so.6\n".into(),
    ] {
        assert!(objects.contains(&line), "{line}");
    }

    let file = write(&code, samples, &dir.path().join("app.pb.gz"));
    let (mut found, head) = go_pprof(&file, &[]);
    let inlined = found.remove("fill_window (inline)").unwrap();
    found.insert("fill_window".to_owned(), inlined);
    assert_eq!(found, functions("<module>"), "{head}");
    let text = run(Command::new("go").args(["tool", "pprof", "-raw"]).arg(&file).env("PPROF_TMPDIR", dir.path()));
    for part in ["0x7f1234000000/0x7f1234100000/0x1000 /lib/x86_64-linux-gnu/libc.so.6", "0x7f1235000100 M="] {
        assert!(text.contains(part), "{part}: {text}");
    }
}

/// Go's pprof reads a path up to the first white space: the companion is then passed to it by name.
#[test]
fn companions_with_white_space_in_their_path() {
    if tools().is_none() {
        return;
    }
    let code = code();
    let Code { module, read, main, .. } = code;
    let outer = tempfile::tempdir().unwrap();
    let dir = outer.path().join("my app");
    std::fs::create_dir(&dir).unwrap();
    let file = write(&code, &[(0, &[read, module, main], 7), (0, &[module, main], 5)], &dir.join("a b.prof"));
    let companion = companion_path(&file);
    let (found, head) = go_pprof(&file, &[companion.to_str().unwrap()]);
    assert_eq!(found, expected(&[("read", (7, 7)), ("app.<module>", (5, 12)), ("main", (0, 12))]), "{head}");
    let (found, head) = perl_pprof(&file, &[]);
    assert_eq!(found, expected(&[("read", (7, 7)), ("app.{module}", (5, 12)), ("main", (0, 12))]), "{head}");
}
