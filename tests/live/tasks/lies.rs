//! A target that lies about its tasks: lists that lead nowhere, coroutines that await themselves, endless sets and names. The
//! dump ends soon, shows the rest, and says what it could not read.

use super::{by_id, dump, list, stack};
use serde_json::Value;
use std::io::{Seek as _, SeekFrom, Write as _};
use std::time::{Duration, Instant};
use tachyon::inspect::{self, AsyncioOffsets, CoroutineLayout, ElfCache, StackTop, Verdict, asyncio_offsets};
use tachyon::remote::RemoteProcess;
use tachyon::types::{Pid, RemoteAddr};
use tachyon_tests::{Interpreter, Target, on_each_interpreter};

on_each_interpreter!(on [sid_3_14 sid_3_15 built_3_14t wheel_3_15t]: lies_cost_bounded_time);

/// A program that waits for its test and never runs again.
struct Liar {
    target: Target,
    process: RemoteProcess,
    interpreter: Box<inspect::Interpreter>,
    offsets: AsyncioOffsets,
    /// Tasks that wait, and nothing else.
    tasks: Vec<u64>,
}

impl Liar {
    fn start(python: &Interpreter) -> Self {
        let target = Target::start_with(python, "task_tree.py", &["many", "8"]);
        let process = RemoteProcess::at(Pid(target.pid()));
        let mut cache = ElfCache::default();
        let interpreter = match inspect::inspect(&process, &mut cache).expect("readable") {
            Verdict::Python(interpreter) => interpreter,
            other => panic!("{other:?}"),
        };
        let offsets = asyncio_offsets(&process, &interpreter, &mut cache).expect("it has imported asyncio");
        let tasks = by_id(&target.facts["tasks"]).into_keys().collect();
        Self { target, process, interpreter, offsets, tasks }
    }

    fn word(&self, address: u64) -> u64 {
        self.process.read_u64(RemoteAddr(address)).expect("readable")
    }

    fn poke(&self, address: u64, value: &[u8]) {
        let path = format!("/proc/{}/mem", self.target.pid());
        let mut memory = std::fs::OpenOptions::new().write(true).open(path).expect("root may");
        memory.seek(SeekFrom::Start(address)).expect("an address");
        memory.write_all(value).expect("written");
    }

    fn poke_word(&self, address: u64, value: u64) {
        self.poke(address, &value.to_ne_bytes());
    }

    /// What the dump says, in bounded time: its tasks, and its problems.
    fn dumped(&self, what: &str) -> (Value, Vec<String>) {
        let start = Instant::now();
        for json in [false, true] {
            let output = dump(self.target.pid(), json);
            assert!(output.status.success(), "{what}: {}", String::from_utf8_lossy(&output.stderr));
            assert!(start.elapsed() < Duration::from_secs(30), "{what} took {:?}", start.elapsed());
            if json {
                let dump: Value = serde_json::from_slice(&output.stdout).expect("JSON");
                let problems =
                    list(&dump["problems"]).iter().map(|problem| problem.as_str().expect("a text").to_owned());
                return (dump["asyncio"].clone(), problems.collect());
            }
        }
        unreachable!("the second is JSON")
    }
}

fn lies_cost_bounded_time(python: &Interpreter) {
    let liar = Liar::start(python);
    let [first, second, third, fourth, fifth, ..] = liar.tasks[..] else { panic!("eight tasks") };
    let (offsets, awaits) = (liar.offsets, liar.interpreter.awaits.expect("published"));

    // A task that awaits itself, and one that a set of endless size awaits.
    liar.poke_word(first + offsets.task_awaited_by, first);
    liar.poke(first + offsets.task_awaited_by_is_set, &[0]);
    liar.poke_word(second + offsets.task_awaited_by, second);
    liar.poke(second + offsets.task_awaited_by_is_set, &[1]);
    liar.poke_word(second + awaits.set_mask, u64::MAX);
    let (asyncio, _) = liar.dumped("awaiters");
    assert_eq!(by_id(&asyncio["tasks"])[&first]["awaited_by"], serde_json::json!([first]));
    assert_eq!(asyncio["cycles"], serde_json::json!([[first]]));

    // A coroutine that awaits the one that awaits it.
    let coroutine = liar.word(third + offsets.task_coro);
    let CoroutineLayout::Embedded { frame, top: StackTop::Pointer { at, below }, .. } = awaits.coroutine else {
        panic!("{awaits:?}")
    };
    liar.poke_word(liar.word(coroutine + frame + at) - 8 * below, coroutine);
    // A name as long as all memory, and one that is not text.
    let name = liar.word(fourth + offsets.task_name);
    liar.poke_word(name + u64::from(liar.interpreter.layout.unicode_length), u64::MAX / 2);
    liar.poke_word(fifth + offsets.task_name, coroutine);
    let (asyncio, _) = liar.dumped("coroutines and names");
    let tasks = by_id(&asyncio["tasks"]);
    let endless = stack(tasks[&third]);
    assert_eq!((endless.len(), &tasks[&third]["whole"]), (1024, &false.into()));
    assert!(endless.iter().all(|(function, ..)| function == "leaf"));
    assert_eq!((&tasks[&fourth]["name"], &tasks[&fifth]["name"]), (&Value::Null, &Value::Null));

    // A list that leads in a circle, out of its tasks, and nowhere.
    let node = |task: u64| task + offsets.task_node;
    let whole = list(&asyncio["tasks"]).len();
    for (what, next) in
        [("a circle", node(second)), ("what is no node", coroutine), ("nothing", 0), ("nowhere", 1 << 62)]
    {
        liar.poke_word(node(second) + awaits.node_next, next);
        if next == node(second) {
            liar.poke_word(node(second) + awaits.node_prev, next);
        }
        let (asyncio, problems) = liar.dumped(what);
        assert!(list(&asyncio["tasks"]).len() < whole, "{what}");
        let told = "a list of tasks changed each time it was read: some tasks may be missing";
        assert_eq!(problems, [told], "{what}");
    }
}
