//! A C++ program that throws and catches: while libgcc installs the catching frame's context, its own frame's saved
//! registers are already those of its future caller. Such a stack continues where the throw leads.

use std::collections::BTreeMap;
use tachyon_tests::{Interpreter, Line, Profiler, SharedLibrary, Target, live};

/// Before the rows covered it, 44 of 3,000 exact stacks were wrong: frames twice, and callers of the thrower missing. When they
/// were cut instead, they were up to 12 % of this program's, depending on the CPU.
#[test]
fn a_throw_leads_to_the_frame_that_it_is_installed_for() {
    let Some(_live) = live() else { return };
    let python = Interpreter::named("pyenv_3_11");
    let library = SharedLibrary::compile("throwing", &python);
    let target = Target::start_with(&python, "throwing.py", &[library.text()]);
    let profiler = Profiler::of(target.pid()).native().rate(1999).arg("--format").arg("jsonl").milliseconds(4_000);
    let output = profiler.run();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = std::fs::read_to_string(profiler.output()).expect("the recording was written");
    let told: Vec<&str> =
        target.facts["functions"].as_array().expect("told").iter().filter_map(|name| name.as_str()).collect();
    let (mut labels, mut wrong) = (BTreeMap::<String, usize>::new(), BTreeMap::<String, usize>::new());
    let (mut thrown, mut installed) = (0, 0);
    for line in Line::all(&text) {
        let names: Vec<&str> = line.frames.iter().map(|frame| frame.function.as_str()).collect();
        let Some(root) = names.iter().position(|name| *name == "thrower") else { continue };
        let native = &names[..root];
        *labels.entry(line.merge.clone()).or_default() += 1;
        let own: Vec<&str> = native.iter().rev().filter(|name| told.contains(name)).copied().collect();
        // `third` throws to what `second` cleans up, and that goes on to `catching`.
        let raises = native.iter().find_map(|name| match *name {
            "_Unwind_RaiseException" => Some([5, 4]),
            "_Unwind_Resume" => Some([4, 2]),
            _ => None,
        });
        let is_right = told.starts_with(&own) && raises.is_none_or(|depths| depths.contains(&own.len()));
        thrown += usize::from(raises.is_some());
        installed += usize::from(raises.is_some_and(|depths| depths[1] == own.len()));
        if line.merge == "exact" && !is_right {
            *wrong.entry(names.join(" > ")).or_default() += 1;
        }
    }
    let report: serde_json::Value =
        serde_json::from_str(&std::fs::read_to_string(profiler.report()).expect("written")).expect("JSON");
    let stops = &report["native"];
    let exact = labels.get("exact").copied().unwrap_or_default();
    println!("{labels:?} {stops:?}, {thrown} in libgcc, {installed} of them leave, wrong and called exact: {wrong:#?}");
    assert!(thrown > 1_000, "{thrown} samples in a throw: {labels:?}");
    assert!(wrong.is_empty(), "{wrong:#?}");
    assert!((10..thrown / 4).contains(&installed), "the end of a throw alone: {installed} of {thrown}");
    // The ones that are cut are at the last instructions, which move the stack pointer.
    assert!(exact * 100 >= labels.values().sum::<usize>() * 97, "{labels:?}");
}
