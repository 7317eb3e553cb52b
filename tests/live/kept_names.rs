//! Names and unwind rules that are kept between recordings are those that a recording without them finds.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;
use tachyon::recording::{Request, SymbolCache, Targets};
use tachyon::symbolize::native::tables_read;
use tachyon::types::Pid;
use tachyon::unwind::tables_made;
use tachyon_tests::{Interpreter, Target, live};

/// Function, file and line of the frames at each address of each file.
type Names = BTreeMap<(String, u64), BTreeSet<(String, Option<String>, Option<u32>)>>;

/// Records half a second. Returns what its native frames are called, how many tables of names were read for that, and how many of rules
/// were made.
fn record(pid: u32, symbol_cache: Option<SymbolCache>) -> (Names, u64, u64) {
    let before = (tables_read(), tables_made());
    let mut request = Request::new(Targets::Pids(vec![Pid(pid)]), Duration::from_millis(1));
    request.symbol_cache = symbol_cache;
    if let Some(native) = &mut request.native {
        native.keep.interpreter = true;
    }
    let running = request.open().expect("the object is accepted").start().expect("the event attaches");
    std::thread::sleep(Duration::from_millis(500));
    let segment = running.finish().expect("it ends well");
    let (profile, mut names) = (&segment.profile, Names::new());
    for &frame in segment.stacks.iter().flat_map(|stack| &stack.frames) {
        let Some(place) = profile.native_place(frame) else { continue };
        let Some(mapping) = place.mapping else { continue };
        let file = profile.native.mapping(mapping).path.clone();
        let function = profile.strings.get(profile.frames.get(frame).function).to_owned();
        let source = profile.native_source(frame);
        let name = (function, source.map(|(file, _)| file.to_owned()), source.and_then(|(_, line)| line));
        names.entry((file, place.vaddr)).or_default().insert(name);
    }
    let stacks = segment.report.native.as_ref().expect("native stacks were recorded");
    let missing = stacks.failed + stacks.missing;
    assert!(stacks.exact > 20 * missing && stacks.exact > 100, "{stacks:?}");
    (names, tables_read() - before.0, tables_made() - before.1)
}

#[test]
fn a_recording_that_reads_no_tables_tells_the_same() {
    let Some(_live) = live() else { return };
    let target = Target::start(&Interpreter::named("pyenv_3_12"), "busy_in_c.py");
    let (plain, read, made) = record(target.pid(), None);
    assert!(read > 0 && made > 0, "without what is kept tables are read and made");
    let folder = tempfile::tempdir().expect("a temporary directory can be made");
    let cache = SymbolCache::at(folder.path().join("symbols"));
    // Each meets some functions that those before it have not met, fewer and fewer.
    let (mut compared, mut with_lines) = (0, 0);
    for number in 0..40 {
        let (names, read, made) = record(target.pid(), Some(cache.clone()));
        println!("recording {number}: {} addresses, {read} tables read, {made} made", names.len());
        for (place, names) in &names {
            if let Some(plain) = plain.get(place) {
                assert_eq!(names, plain, "{place:x?}");
                compared += 1;
                with_lines += usize::from(names.iter().any(|(_, file, line)| file.is_some() && line.is_some()));
            }
        }
        if number > 0 && read == 0 && made == 0 {
            assert!(compared > 20 && with_lines > 20, "{compared} addresses, {with_lines} with lines");
            return;
        }
    }
    panic!("all recordings have read or made tables");
}
