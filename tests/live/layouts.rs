//! `--tach-layout` and `--compression`: the whole program writes each, and every reader that can read it does.

use serde_json::Value;
use std::path::Path;
use std::process::Command;
use tachyon::report::Report;
use tachyon::tach::{Compression, Layout};
use tachyon_tests::viewers::run;
use tachyon_tests::{Interpreter, Profiler, Recorded, Target, binary, judge, live};

fn info(file: &Path) -> (Value, String) {
    let json = run(Command::new(binary()).args(["info", "--json"]).arg(file));
    (serde_json::from_str(&json).expect("it is JSON"), run(Command::new(binary()).arg("info").arg(file)))
}

#[test]
fn both_layouts_with_both_compressions() {
    let Some(_live) = live() else { return };
    let target = Target::start(&Interpreter::named("pyenv_3_12"), "eight_threads.py");
    for (layout, compression) in [("early", "zstd"), ("early", "none"), ("released", "none")] {
        let profiler = Profiler::of(target.pid()).rate(499).milliseconds(600);
        let profiler = profiler.arg("--tach-layout").arg(layout).arg("--compression").arg(compression);
        let ended = profiler.run();
        assert!(ended.status.success(), "{}", String::from_utf8_lossy(&ended.stderr));
        let report: Report =
            serde_json::from_slice(&std::fs::read(profiler.report()).expect("it is there")).expect("it is a report");
        let file = profiler.output();

        // The project's own reader reads all.
        let read = Recorded::read(file);
        assert_eq!(read.samples.len() as u64, report.stored, "{layout}, {compression}");
        assert!(report.stored > 20, "{report:#?}");
        let early = layout == "early";
        assert_eq!(read.header.layout, if early { Layout::Early } else { Layout::Released });
        assert_eq!(read.header.compression, if compression == "none" { Compression::None } else { Compression::Zstd });
        let (json, text) = info(file);
        assert_eq!((&json["layout"], &json["compression"]), (&layout.into(), &compression.into()), "{json:#}");
        assert_eq!(json["samples"], report.stored);
        assert_eq!(json["metadata"]["report"]["stored"], report.stored, "the account is in the file");
        assert_eq!(json["mode"], if early { Value::Null } else { "cpu".into() }, "{json:#}");
        assert!(text.contains(&format!("{layout} layout, little-endian")), "{text}");

        // CPython as released reads what it writes; of the early one it takes half of an offset for a whole one.
        let released = if early {
            let told = judge::refusal(file);
            assert!(told.contains("Error: ") && told.contains("offset"), "{told}");
            let released = file.with_extension("released.tach");
            run(Command::new(binary()).arg("export").arg(file).arg("-o").arg(&released));
            let (json, _) = info(&released);
            assert_eq!((&json["layout"], &json["samples"]), (&"released".into(), &report.stored.into()), "{json:#}");
            released
        } else {
            file.to_owned()
        };
        judge::agrees(&released, &read);
        for (form, total) in &judge::totals(&[&released])[0] {
            assert_eq!(*total, report.stored, "{layout}, {compression}: replay --{form}");
        }
    }
}
