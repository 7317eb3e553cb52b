//! Stacks written as text, leaf first: `E` the evaluator (`e` while it is entered), `h` a handler, `p` plumbing, `i` the interpreter, `t`
//! the function that throws into a generator, `r` the interpreter's first function, `n` other native code; Python frames are `f`, `F` with
//! an entry mark, `S` a shim.

use super::*;

fn kinds(text: &str) -> Vec<NativeKind> {
    let kind = |letter| match letter {
        'E' => NativeKind::Evaluator { entering: false },
        'e' => NativeKind::Evaluator { entering: true },
        'h' => NativeKind::Handler,
        'p' => NativeKind::Plumbing,
        'i' => NativeKind::Interpreter,
        'c' => NativeKind::Collector,
        't' => NativeKind::Throw,
        'r' => NativeKind::Root,
        'n' => NativeKind::Other,
        other => panic!("no kind {other}"),
    };
    text.chars().map(kind).collect()
}

fn frames(text: &str) -> (Vec<PythonFrame>, u16) {
    let (mut frames, mut shims) = (Vec::new(), 0);
    for letter in text.chars() {
        if letter == 'S' {
            shims += 1;
            continue;
        }
        frames.push(PythonFrame { entry: letter == 'F', shims });
        shims = 0;
    }
    (frames, shims)
}

struct Case<'a> {
    native: &'a str,
    python: &'a str,
    boundaries: Boundaries,
    native_whole: bool,
    foreign: bool,
    stop: StopReason,
    /// [`Native::entered`].
    entered: Option<usize>,
}

impl Case<'_> {
    /// The joined stack: native frames by their letters, Python frames by their numbers.
    fn run(&self, interpreter: bool) -> (String, Quality) {
        self.keeping(Keep { interpreter, roots: true })
    }

    fn keeping(&self, keep: Keep) -> (String, Quality) {
        let (kinds, (frames, root_shims)) = (kinds(self.native), frames(self.python));
        let mut out = vec![Joined::Native(99)];
        let native = Native {
            frames: &kinds,
            whole: self.native_whole,
            foreign: self.foreign,
            switching: None,
            entered: self.entered,
        };
        let python = Python { frames: &frames, root_shims, stop: self.stop, boundaries: self.boundaries };
        let quality = join(&native, &python, keep, &mut out);
        let letters: Vec<char> = self.native.chars().collect();
        let text = out.iter().map(|frame| match frame {
            Joined::Native(index) => letters[*index],
            Joined::Collector => 'G',
            Joined::Python(index) => char::from_digit(u32::try_from(*index).expect("few"), 10).expect("a digit"),
        });
        (text.collect(), quality)
    }
}

fn whole<'a>(boundaries: Boundaries, native: &'a str, python: &'a str) -> Case<'a> {
    let stop = if python.is_empty() { StopReason::NoFrame } else { StopReason::Complete };
    Case { native, python, boundaries, native_whole: true, foreign: false, stop, entered: None }
}

#[test]
fn while_greenlets_switch_what_called_the_switch_is_left_out() {
    let mut out = Vec::new();
    let frames = [PythonFrame { entry: false, shims: 0 }, PythonFrame { entry: false, shims: 1 }];
    let python = Python { frames: &frames, root_shims: 1, stop: StopReason::Complete, boundaries: Boundaries::Shim };
    let (switch, [first, second]) = (Quality::Repaired(Repair::Switching), [0, 1].map(Joined::Python));
    for (kinds_of, switching, quality, native) in [
        // The greenlet that the stack belongs to already has as many evaluators, more, or fewer.
        ("nnnEpnE", Some(2), switch, 2),
        ("nnnEpnEpE", Some(2), switch, 2),
        ("nnnE", Some(2), switch, 2),
        ("nEpE", None, Quality::Exact, 1),
    ] {
        let native = &(0..native).map(Joined::Native).collect::<Vec<_>>();
        let kinds = kinds(kinds_of);
        let stack = Native { frames: &kinds, whole: true, foreign: true, switching, entered: None };
        assert_eq!(join(&stack, &python, Keep::default(), &mut out), quality, "{kinds_of}");
        assert_eq!(out, [native, &[first, second][..]].concat(), "{kinds_of}");
    }
}

#[test]
fn whole_stacks_are_joined_exactly() {
    use Boundaries::{EntryFrame, EveryFrame, Shim};
    for (boundaries, native, python, folded, kept) in [
        // sorted(key=f): f's activation above the sort, which is the interpreter's own.
        (EveryFrame, "EpiipEpn", "ff", "01n", "0Epiip1Epn"),
        (EntryFrame, "EpiipEpn", "fFffF", "01234n", "01Epiip234Epn"),
        (Shim, "EpiipEpn", "ffSfS", "012n", "01Epiip2Epn"),
        // qsort through ctypes: the callback's C frames are kept.
        (Shim, "EpnnnnpEpn", "fSfS", "0nnnn1n", "0Epnnnnp1Epn"),
        // An exception is thrown into a generator that delegates to another one: its frame is linked without an evaluator,
        // once per delegation, or is not linked (3.8).
        (EntryFrame, "EppttpEp", "FFfF", "0123", "0Eppt1tp23Ep"),
        (EveryFrame, "EpptttpEp", "ffff", "0123", "0Eppt1t2tp3Ep"),
        (EveryFrame, "EppttpEp", "ff", "01", "0Eppttp1Ep"),
        // A callee in C, and one in the interpreter.
        (Shim, "nnpEp", "fS", "nn0", "nnp0Ep"),
        (EntryFrame, "ipEp", "F", "i0", "ip0Ep"),
        // A thread that has left Python.
        (Shim, "nnn", "", "nnn", "nnn"),
        // Tail-calling builds: the handler has no activation of its own.
        (Shim, "nhEphE", "fSfS", "n01", "nh0Eph1E"),
        // The evaluator is inlined into some of its callers: their handlers stand for it.
        (Shim, "nhphEphp", "fSfSfS", "n012", "n0hph1Ep2hp"),
        (Shim, "hhE", "ffSfS", "012", "01hh2E"),
        // Two activations next to each other: the call between was a tail call.
        (EntryFrame, "EEp", "FF", "01", "0E1Ep"),
        // The activation in the middle has popped its only frame, and runs a finalizer.
        (Shim, "EpiEpEn", "fSSfS", "01n", "0EpiEp1En"),
        // The leaf's activation has popped its frame.
        (Shim, "EpEn", "SfS", "0n", "Ep0En"),
    ] {
        let case = whole(boundaries, native, python);
        assert_eq!(case.run(false), (folded.to_owned(), Quality::Exact), "{native} {python}");
        assert_eq!(case.run(true), (kept.to_owned(), Quality::Exact), "{native} {python}");
    }
}

#[test]
fn only_what_throws_through_explains_frames_without_evaluators() {
    use Boundaries::{EntryFrame, Shim};
    // One frame too many for that; a throw only; from 3.12 on shims show it.
    for (boundaries, native, python) in
        [(EntryFrame, "EppttpEp", "FFFF"), (EntryFrame, "EpptpEp", "FFF"), (Shim, "EppttpEp", "fSfSfS")]
    {
        assert_eq!(whole(boundaries, native, python).run(false).1, Quality::Failed, "{native} {python}");
    }
}

#[test]
fn what_called_the_first_python_frame_is_folded() {
    use Boundaries::{EveryFrame, Shim};
    for (case, folded) in [
        (whole(Shim, "nnnEpnnn", "fS"), "nnn0"),
        (whole(EveryFrame, "EpnnnEpn", "ff"), "0nnn1"),
        // A thread without Python is a stack of its own.
        (whole(Shim, "nnn", ""), "nnn"),
        // No other frame shows that the collector ran a finalizer.
        (whole(Shim, "Epcnn", "fS"), "0G"),
        // What the outer evaluator runs is unknown.
        (Case { foreign: true, ..whole(Shim, "nEpnEnn", "fS") }, "n0nE"),
        (Case { stop: StopReason::EnteringEval, ..whole(Shim, "EpnEn", "") }, "EnE"),
        (Case { native_whole: false, ..whole(Shim, "nEpn", "fSfS") }, "n0n1"),
    ] {
        assert_eq!(case.keeping(Keep::default()).0, folded, "{}", case.native);
    }
}

/// It has no thread state, which is a different reason from having no Python frames.
#[test]
fn a_thread_that_never_entered_python_is_exact() {
    let case = Case { stop: StopReason::NoThreadState, ..whole(Boundaries::Shim, "nnn", "") };
    assert_eq!(case.run(false), ("nnn".to_owned(), Quality::Exact));
    assert_eq!(Case { native_whole: false, ..case }.run(false).1, Quality::Repaired(Repair::Cut));
}

#[test]
fn what_differs_is_repaired_and_labelled() {
    use Boundaries::{EntryFrame, Shim};
    use StopReason::{Complete, EnteringEval, NoFrame, TooDeep};
    for (native, python, native_whole, stop, folded, repair) in [
        ("epnEn", "F", true, Complete, "n0n", Repair::Entering),
        ("en", "", true, NoFrame, "en", Repair::Entering),
        // Nothing shows which frames the evaluators run, so the evaluators stand for them.
        ("EpnEn", "", true, EnteringEval, "EnEn", Repair::NoPython),
        // A greenlet on another's native stack: the innermost belong together.
        ("nEpnEn", "fF", true, Complete, "n01nEn", Repair::OuterNative),
        ("nEpnEpE", "fF", true, Complete, "n01nEE", Repair::OuterNative),
        ("nEpnEpE", "fF", false, Complete, "n01nEE", Repair::OuterNative),
        ("nEpnE", "fFf", false, TooDeep, "n01n2", Repair::Cut),
        ("nEpn", "fFfF", false, Complete, "n01n23", Repair::OuterPython),
        ("nn", "fF", false, Complete, "nn01", Repair::OuterPython),
        ("nEp", "F", false, Complete, "n0", Repair::Cut),
        // The evaluator being entered runs nothing yet, and the one that called C was cut off.
        ("en", "F", false, Complete, "n0", Repair::OuterPython),
        ("enEn", "FF", false, Complete, "n0n1", Repair::OuterPython),
        // One that is about to return looks like one that runs: the C frames that follow may belong to an inner call.
        ("En", "F", false, Complete, "0", Repair::Cut),
        ("nEnEn", "FF", false, Complete, "n0n1", Repair::Cut),
    ] {
        let case = Case { native, python, boundaries: EntryFrame, native_whole, foreign: true, stop, entered: None };
        assert_eq!(case.run(false), (folded.to_owned(), Quality::Repaired(repair)), "{native} {python}");
    }
    // Without a greenlet or another interpreter, the surplus one is the innermost: it is leaving the evaluator.
    let leaving = whole(EntryFrame, "nEpnEn", "fF");
    assert_eq!(leaving.run(false), ("nn01n".to_owned(), Quality::Repaired(Repair::Entering)));
    // Only the interpreter lies between the outer two, so there is no other thread state: its frames are all there. Where
    // every call enters the evaluator (3.8 to 3.10), this kept 3 to 4 % of the samples from being called exact.
    for (native, folded) in [("nEpEn", "n01n"), ("epiEn", "01n")] {
        assert_eq!(whole(EntryFrame, native, "fF").run(false), (folded.to_owned(), Quality::Exact), "{native}");
    }
    // A thread or greenlet that enters Python for the first time.
    assert_eq!(whole(Shim, "en", "").run(false), ("en".to_owned(), Quality::Exact));
    assert_eq!(whole(Shim, "En", "").run(false), ("En".to_owned(), Quality::Repaired(Repair::NoPython)));
    let failed = whole(Shim, "nEpn", "fSfS");
    assert_eq!(failed.run(false), ("n01".to_owned(), Quality::Failed));
    assert_eq!(failed.run(true), ("n01".to_owned(), Quality::Failed));
}

/// Where on the stack the evaluator was entered for the innermost Python frames tells which of the evaluators is theirs.
#[test]
fn the_place_where_the_evaluator_was_entered_tells_which_one_it_was() {
    use Boundaries::EntryFrame;
    for (native, entered, native_whole, folded, quality) in [
        // C code lies in between: without this place the surplus one could be the outermost.
        ("EnEnEn", Some(2), true, "n0n1n", Quality::Exact),
        ("nEnEnEn", Some(3), true, "nn0n1n", Quality::Exact),
        ("EnEnEn", Some(0), true, "0n1nEn", Quality::Repaired(Repair::OuterNative)),
        ("EnEnEn", Some(4), true, "01", Quality::Failed),
        ("EnEnEn", None, true, "n0n1n", Quality::Repaired(Repair::Entering)),
        // As many evaluators as activations, and yet they do not match.
        ("EnEn", Some(2), true, "01", Quality::Failed),
        ("EnEn", Some(2), false, "n0n1", Quality::Repaired(Repair::OuterPython)),
        ("EnEn", Some(0), true, "0n1n", Quality::Exact),
        // Being entered, and yet with its Python frames: they were linked at this very moment.
        ("enEn", Some(0), false, "0n1", Quality::Repaired(Repair::Cut)),
        ("enEnEn", Some(2), false, "n0n1n", Quality::Repaired(Repair::Cut)),
        // A frame that is not an evaluator says nothing.
        ("EnEn", Some(1), true, "0n1n", Quality::Exact),
        // Nor does one that does not exist.
        ("EnEn", Some(4), true, "0n1n", Quality::Exact),
    ] {
        let case = Case { entered, native_whole, ..whole(EntryFrame, native, "FF") };
        let expected = (folded.to_owned(), quality);
        assert_eq!(case.run(false), expected, "{native} {entered:?}");
    }
    // Parts of greenlets' stacks take turns at the same place.
    let case = Case { entered: Some(2), foreign: true, ..whole(EntryFrame, "EnEn", "FF") };
    assert_eq!(case.run(false), ("0n1n".to_owned(), Quality::Exact));
}

/// What a program does before it has an interpreter, and what its libraries do after that has ended.
#[test]
fn without_an_interpreter_native_frames_are_all_there_is() {
    let case = Case { stop: StopReason::RuntimeNotInitialized, ..whole(Boundaries::Shim, "nnn", "") };
    assert_eq!(case.run(false), ("nnn".to_owned(), Quality::Exact));
    assert_eq!(Case { native_whole: false, ..case }.run(false).1, Quality::Repaired(Repair::Cut));
    // It has an interpreter, which could not be read.
    let case = Case { stop: StopReason::RuntimeNotInitialized, ..whole(Boundaries::Shim, "nEn", "") };
    assert_eq!(case.run(false).1, Quality::Repaired(Repair::NoPython));
}

/// musl has no unwind tables for the callers of the interpreter's first function; Python's part of the stack is whole.
#[test]
fn a_stack_that_is_cut_below_the_interpreters_first_function_is_exact() {
    use Boundaries::EntryFrame;
    for (native, folded, quality) in [
        ("nEpEprn", "n01n", Quality::Exact),
        ("nEprEpn", "n01", Quality::Repaired(Repair::Cut)),
        ("nEpEpn", "n01", Quality::Repaired(Repair::Cut)),
    ] {
        let case = Case { native_whole: false, ..whole(EntryFrame, native, "FF") };
        assert_eq!(case.run(false), (folded.to_owned(), quality), "{native}");
    }
}

/// The collector stands above what asked for it, and below the finalizers that it calls.
#[test]
fn the_collector_is_marked_once_and_in_order() {
    for (native, python, folded, kept) in
        [("iccpEn", "F", "iccG0n", "iccGp0En"), ("npEpicpEn", "FF", "n0G1n", "np0EpicGp1En")]
    {
        let case = whole(Boundaries::EntryFrame, native, python);
        assert_eq!(case.run(false), (folded.to_owned(), Quality::Exact), "{native}");
        assert_eq!(case.run(true), (kept.to_owned(), Quality::Exact), "{native}");
    }
}

/// All texts of these letters up to a length.
fn texts(letters: &str, longest: usize) -> Vec<String> {
    let mut all = vec![String::new()];
    let mut last = all.clone();
    for _ in 0..longest {
        last = last.iter().flat_map(|text| letters.chars().map(move |letter| format!("{text}{letter}"))).collect();
        all.extend(last.iter().cloned());
    }
    all
}

#[test]
fn no_frame_is_lost_doubled_or_out_of_order() {
    let natives = texts("Eepin", 4);
    for boundaries in [Boundaries::EveryFrame, Boundaries::EntryFrame, Boundaries::Shim] {
        for python in texts("fFS", 4) {
            let count = python.chars().filter(|&letter| letter != 'S').count();
            for native in &natives {
                let [complete, cut] = [StopReason::Complete, StopReason::TooDeep];
                for (native_whole, foreign, stop, entered) in [
                    (true, true, complete, None),
                    (true, false, complete, None),
                    (true, false, complete, Some(0)),
                    (true, false, complete, Some(2)),
                    (false, true, cut, None),
                    (false, false, cut, Some(2)),
                ] {
                    let case = Case { native, python: &python, boundaries, native_whole, foreign, stop, entered };
                    let (folded, _) = case.run(false);
                    let (kept, quality) = case.run(true);
                    let only = |text: &str, digits: bool| -> String {
                        text.chars().filter(|letter| letter.is_ascii_digit() == digits).collect()
                    };
                    let wanted: String = (0..count).map(|digit| digit.to_string()).collect();
                    assert_eq!(only(&folded, true), wanted, "{native} {python} {boundaries:?}");
                    assert_eq!(only(&kept, true), wanted, "{native} {python} {boundaries:?}");
                    if quality != Quality::Failed {
                        assert_eq!(&only(&kept, false), native, "{python} {boundaries:?}");
                    }
                }
            }
        }
    }
}

#[test]
fn a_stack_taken_apart_comes_together_again() {
    // What truly ran: each activation with Python frames, C functions between them.
    for truth in texts("ab", 6) {
        let mut native = String::new();
        let (mut python, mut wanted) = (String::new(), String::new());
        let mut number = 0;
        for letter in truth.chars() {
            let frames = if letter == 'a' { 1 } else { 2 };
            let c_frames = if letter == 'a' { "n" } else { "nn" };
            native.push_str(c_frames);
            native.push_str("pE");
            wanted.push_str(c_frames);
            for _ in 0..frames {
                python.push('f');
                wanted.push_str(&number.to_string());
                number += 1;
            }
            python.push('S');
        }
        if number > 9 {
            continue;
        }
        let (joined, quality) = whole(Boundaries::Shim, &native, &python).run(false);
        assert_eq!((joined, quality), (wanted, Quality::Exact), "{truth}");
    }
}

#[test]
fn call_machinery_and_nameless_code_is_plumbing() {
    let kind = NativeKind::of_interpreter;
    for name in
        ["_PyFunction_Vectorcall", "PyObject_CallOneArg", "slot_tp_call", "_PyEval_Vector", "cfunction_vectorcall_O"]
    {
        assert_eq!(kind(Some(name)), NativeKind::Plumbing, "{name}");
    }
    assert_eq!(kind(None), NativeKind::Plumbing);
    for name in ["list_sort_impl", "PyDict_SetItem", "gc_collect_impl", "_PyObject_GC_New"] {
        assert_eq!(kind(Some(name)), NativeKind::Interpreter, "{name}");
    }
    for name in ["collect.constprop.0", "gc_collect_main", "gc_collect_internal"] {
        assert_eq!(kind(Some(name)), NativeKind::Collector, "{name}");
    }
}
