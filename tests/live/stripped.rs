//! A library without a symbol table: each function has its own name, the same in the next run, and gets its real one later.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};
use tachyon_tests::{Interpreter, Profiler, Recorded, SharedLibrary, Target, binary, live};

/// The two innermost functions of each sample, with their counts.
fn pairs(recorded: &Recorded) -> BTreeMap<[String; 2], usize> {
    let mut found = BTreeMap::new();
    for sample in &recorded.samples {
        let names: Vec<_> = recorded.frames_of(sample).map(|frame| frame.function.clone()).collect();
        let Some(known) = names.iter().position(|name| name == "stripped.so!known").filter(|at| *at >= 2) else {
            continue;
        };
        *found.entry([names[known - 2].clone(), names[known - 1].clone()]).or_default() += 1;
    }
    found
}

fn run(command: &mut Command) {
    let output = command.output().expect("it is installed");
    assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn functions_without_symbols_have_names_that_can_be_looked_up() {
    let Some(_live) = live() else { return };
    let python = Interpreter::named("pyenv_3_11");
    let library = SharedLibrary::compile("stripped", &python);
    let folder = tempfile::tempdir().expect("a folder");
    let debug = folder.path().join("stripped.so.debug");
    run(Command::new("objcopy").arg("--only-keep-debug").arg(&library.path).arg(&debug));
    run(Command::new("strip").arg("--strip-all").arg(&library.path));
    let record = || {
        let target = Target::start_with(&python, "stripped.py", &[library.text()]);
        Profiler::of(target.pid()).native().rate(499).cpu_milliseconds(target.pid(), 700).record()
    };
    let (first, second) = (record(), record());
    let [one, two] = [&first, &second].map(|recording| pairs(&recording.recorded));
    println!("{one:?}");
    let (most, count) = one.iter().max_by_key(|(_, count)| **count).expect("it works there");
    assert!(
        *count > 100 && most.iter().all(|name| name.starts_with("stripped.so!0x")) && most[0] != most[1],
        "{one:?}"
    );
    assert!(two.contains_key(most), "another run has the same names: {two:?}");

    // Neither at its name nor by its path: in debuginfod's cache.
    let elf = tachyon::remote::elf::Elf::parse(std::fs::File::open(&debug).expect("made")).expect("an ELF file");
    let id: String = elf.build_id().expect("the linker gave it one").iter().map(|byte| format!("{byte:02x}")).collect();
    let cache = folder.path().join("cache");
    std::fs::create_dir_all(cache.join(&id)).expect("made");
    std::fs::rename(&debug, cache.join(&id).join("debuginfo")).expect("moved");
    let profile = folder.path().join("profile.tach");
    std::fs::copy(&first.path, &profile).expect("copied");
    let symbolize = |folder: &Path| {
        let mut command = Command::new(binary());
        command.arg("symbolize").arg(&profile).arg("--debug-dir").arg(folder).output().expect("it runs")
    };
    let elsewhere = symbolize(folder.path().join("none").as_path());
    assert_eq!(elsewhere.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&elsewhere.stderr).contains(&id), "{elsewhere:?}");
    let done = symbolize(&cache);
    assert!(done.status.success(), "{done:?}");
    let named = Recorded::read(&profile);
    let names = ["hidden_inner", "hidden_outer"].map(|name| format!("stripped.so!{name}"));
    assert_eq!(pairs(&named).get(&names), Some(count));
    assert_eq!(named.samples.len(), first.recorded.samples.len());
    let again = symbolize(&cache);
    assert!(!String::from_utf8_lossy(&again.stderr).contains("stripped.so"), "nothing is left to do there: {again:?}");
}

/// The build ids are known only to the recording: a file that was recovered, or made from others, had lost them.
#[test]
fn build_ids_outlive_a_crash_and_an_export() {
    let Some(_live) = live() else { return };
    let python = Interpreter::named("pyenv_3_11");
    let library = SharedLibrary::compile("stripped", &python);
    let folder = tempfile::tempdir().expect("a folder");
    let debug = folder.path().join("stripped.so.debug");
    run(Command::new("objcopy").arg("--only-keep-debug").arg(&library.path).arg(&debug));
    run(Command::new("strip").arg("--strip-all").arg(&library.path));
    let target = Target::start_with(&python, "stripped.py", &[library.text()]);
    let profiler = Profiler::of(target.pid()).native().rate(499);
    let journal = profiler.output().with_extension("tach.part.journal");
    let running = profiler.start();
    // Names come once a second, samples twice.
    let deadline = Instant::now() + Duration::from_secs(60);
    while !std::fs::read_to_string(&journal).is_ok_and(|text| text.contains("stripped.so!0x")) {
        assert!(Instant::now() < deadline, "no sample in the library");
        std::thread::sleep(Duration::from_millis(50));
    }
    std::thread::sleep(Duration::from_secs(2));
    let profiler = running.kill();
    let [good, part, merged] = ["good", "part", "merged"].map(|name| folder.path().join(name).with_extension("tach"));
    let tachyon = || Command::new(binary());
    run(tachyon().arg("recover").arg(profiler.output().with_extension("tach.part")).arg("-o").arg(&good));
    let pid = target.pid().to_string();
    run(tachyon().arg("export").arg(&good).args(["--pid", &pid]).arg("-o").arg(&part));
    run(tachyon().arg("merge").args([&good, &part]).arg("-o").arg(&merged));
    let names = ["hidden_inner", "hidden_outer"].map(|name| format!("stripped.so!{name}"));
    for profile in [&merged, &part, &good] {
        run(tachyon().arg("symbolize").arg(profile).arg("--debug-dir").arg(folder.path()));
        let found = pairs(&Recorded::read(profile));
        assert!(found.get(&names).is_some_and(|&count| count > 5), "{}: {found:?}", profile.display());
    }
}
