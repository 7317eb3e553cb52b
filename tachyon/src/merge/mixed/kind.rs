//! What native frames mean to the join, by the names of functions.

/// What a native frame means to the join.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NativeKind {
    /// The evaluator: one activation. `entering`: its first instructions, where its Python frame may not be linked yet.
    Evaluator {
        /// See above.
        entering: bool,
    },
    /// A handler of a tail-calling build: part of the activation of the evaluator frame that called it. If a compiler has
    /// inlined that one into its callers (as profile-guided and link-time optimisation do), the handler stands for it.
    Handler,
    /// Call machinery of the interpreter, or its code without a name: says nothing that Python frames do not.
    Plumbing,
    /// The first function that the interpreter runs in a thread: what called it runs no Python.
    Root,
    /// The garbage collector.
    Collector,
    /// The function that throws an exception into a generator or coroutine. If that one delegates to another (`yield from`, `await`), the
    /// function calls itself and links the outer one's frame without an evaluator (3.9 to 3.11; 3.9 does not link that frame to its
    /// caller, so there the stack lacks the callers, as with `sys._getframe`).
    Throw,
    /// Other code of the interpreter's file: shown as a Python frame's callee, folded between Python frames.
    Interpreter,
    /// Anything else.
    Other,
}

/// Prefixes of functions that call, start or wrap: an interpreter function whose name starts with one is plumbing.
const PLUMBING: &[&str] = &[
    "PyEval_",
    "PyObject_Call",
    "PyObject_Vectorcall",
    "PyRun_",
    "PyVectorcall_",
    "Py_BytesMain",
    "Py_Main",
    "Py_RunMain",
    "_PyEval_",
    "_PyFunction_Vectorcall",
    "_PyObject_Call",
    "_PyObject_MakeTpCall",
    "_PyObject_Vectorcall",
    "_PyRun_",
    "_PyVectorcall_",
    "_start",
    "builtin_exec",
    "builtin_eval",
    "call_function",
    "cfunction_",
    "do_call_core",
    "function_code_fastcall",
    "gen_iternext",
    "gen_send",
    "main",
    "method_vectorcall",
    "object_vacall",
    "pymain_",
    "pyrun_",
    "pythread_wrapper",
    "run_eval_code_obj",
    "run_mod",
    "slot_",
    "thread_run",
    "type_call",
    "vectorcall_",
    "wrap_",
    "wrapper_call",
];

/// First functions of the interpreter in a process or thread (`Modules/main.c`, `Modules/_threadmodule.c`,
/// `Python/thread_pthread.h`).
const ROOTS: &[&str] =
    &["Py_BytesMain", "Py_Main", "Py_RunMain", "pymain_main", "pythread_wrapper", "t_bootstrap", "thread_run"];

/// Functions that collect garbage, clones (`.constprop.0`) too: `collect` up to 3.8, `gc_collect_main` from 3.9 on, and the
/// free-threaded builds' (`Modules/gcmodule.c`, `Python/gc.c`, `Python/gc_free_threading.c`).
const COLLECTOR: &[&str] = &["collect", "gc_collect_main", "gc_collect_internal", "gc_collect_region"];

/// The function that throws into generators and coroutines (`Objects/genobject.c`).
const THROW: &str = "_gen_throw";

impl NativeKind {
    /// The kind of a frame in the interpreter's file that is not part of the evaluator.
    #[must_use]
    pub fn of_interpreter(function: Option<&str>) -> Self {
        let is_one_of =
            |list: &[&str]| function.is_some_and(|name| list.contains(&name.split('.').next().unwrap_or(name)));
        if is_one_of(COLLECTOR) {
            return Self::Collector;
        }
        if is_one_of(ROOTS) {
            return Self::Root;
        }
        if is_one_of(&[THROW]) {
            return Self::Throw;
        }
        let plumbing = |name: &str| PLUMBING.iter().any(|start| name.starts_with(start));
        if function.is_none_or(plumbing) { Self::Plumbing } else { Self::Interpreter }
    }
}
