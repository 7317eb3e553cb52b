//! Where asyncio keeps its tasks: `.AsyncioDebug` leads to the very objects that the program names.

use serde_json::Value;
use std::collections::BTreeSet;
use tachyon::inspect::{self, AsyncioOffsets, ElfCache, Verdict, asyncio_offsets};
use tachyon::remote::RemoteProcess;
use tachyon::types::{Pid, RemoteAddr};
use tachyon_tests::{Interpreter, Target, on_each_interpreter};

on_each_interpreter!(on [sid_3_14 sid_3_15 built_3_14t wheel_3_15t]: sections_lead_to_the_tasks);
on_each_interpreter!(on [pyenv_3_8 pyenv_3_13 sid_3_14 sid_3_15]: a_program_without_asyncio_has_no_tasks);

struct Looked {
    process: RemoteProcess,
    interpreter: Box<inspect::Interpreter>,
    offsets: Option<AsyncioOffsets>,
}

impl Looked {
    fn at(target: &Target) -> Self {
        let process = RemoteProcess::at(Pid(target.pid()));
        let mut cache = ElfCache::default();
        let interpreter = match inspect::inspect(&process, &mut cache).expect("readable") {
            Verdict::Python(interpreter) => interpreter,
            other => panic!("{other:?}"),
        };
        let offsets = asyncio_offsets(&process, &interpreter, &mut cache);
        // What was read of the files is remembered.
        let parsed = cache.files_parsed();
        assert_eq!(asyncio_offsets(&process, &interpreter, &mut cache), offsets);
        assert_eq!(cache.files_parsed(), parsed);
        Self { process, interpreter, offsets }
    }

    fn word(&self, base: u64, offset: u64) -> u64 {
        self.process.read_u64(RemoteAddr(base + offset)).expect("readable")
    }

    fn byte(&self, base: u64, offset: u64) -> u8 {
        self.process.read_array::<1>(RemoteAddr(base + offset)).expect("readable")[0]
    }

    /// Tasks of a list, by the list's head.
    fn list(&self, head: u64, task_node: u64) -> BTreeSet<u64> {
        let nodes = std::iter::successors(Some(self.word(head, 0)), |&node| Some(self.word(node, 0)));
        nodes.take_while(|&node| node != head).take(1000).map(|node| node - task_node).collect()
    }
}

fn number(value: &Value) -> u64 {
    value.as_u64().unwrap_or_else(|| panic!("{value} is no number"))
}

fn sections_lead_to_the_tasks(python: &Interpreter) {
    let target = Target::start(python, "asyncio_facts.py");
    let (looked, told) = (Looked::at(&target), &target.facts);
    let offsets = looked.offsets.expect("it has imported asyncio");
    let at = |name: &str| number(&told["tasks"][name]["at"]);
    let names = ["shared", "first", "second", "alone", "waiter", "lonely", "main"];
    for name in names {
        let task = &told["tasks"][name];
        assert_eq!(looked.word(at(name), offsets.task_coro), number(&task["coro"]), "{name}");
        assert_eq!(looked.word(at(name), offsets.task_name), number(&task["name"]), "{name}");
        assert_eq!(looked.byte(at(name), offsets.task_is_task), 1, "{name}");
    }
    let awaited_by =
        |task: u64| (looked.word(task, offsets.task_awaited_by), looked.byte(task, offsets.task_awaited_by_is_set));
    assert_eq!(awaited_by(at("alone")), (at("waiter"), 0));
    assert_eq!(awaited_by(at("main")), (0, 0));
    let future = number(&told["future"]);
    assert_eq!(looked.byte(future, offsets.task_is_task), 0);
    assert_eq!(awaited_by(future), (at("lonely"), 0));
    // A set: neither of the two tasks, and no NULL.
    let (set, is_set) = awaited_by(at("shared"));
    assert!(is_set == 1 && ![0, at("first"), at("second")].contains(&set), "{set:#x} {is_set}");

    let layout = &looked.interpreter.layout;
    let interp = looked.word(looked.interpreter.runtime, layout.runtime_interpreters_head.into());
    let first = looked.word(interp, layout.interp_threads_head.into());
    let next = |&state: &u64| Some(looked.word(state, layout.tstate_next.into())).filter(|&next| next != 0);
    let mut states = std::iter::successors(Some(first), next);
    let ident = number(&told["ident"]);
    let state = states.find(|&state| looked.word(state, layout.tstate_thread_id.into()) == ident).expect("listed");
    assert_eq!(looked.word(state, offsets.thread_running_loop), number(&told["loop"]));
    assert_eq!(looked.word(state, offsets.thread_running_task), number(&told["running"]));
    let listed = looked.list(state + offsets.thread_tasks_head, offsets.task_node);
    let wanted = names.into_iter().map(at).chain([number(&told["unnamed"])]).collect();
    assert_eq!(listed, wanted);
    let of_ended_threads = looked.list(interp + offsets.interp_tasks_head, offsets.task_node);
    assert_eq!(of_ended_threads, BTreeSet::from([number(&told["orphan"])]));
}

fn a_program_without_asyncio_has_no_tasks(python: &Interpreter) {
    let target = Target::start(python, "spin.py");
    let looked = Looked::at(&target);
    // Where the module is built in, it is there without being imported.
    assert_eq!(looked.offsets.is_some(), python.minor >= 15, "{:?}", looked.offsets);
}
