//! Whose work a thread does: the asyncio task that it runs, and the span of OpenTelemetry that it is in.
//!
//! User space finds out where both are kept and puts that into maps ([`Asyncio`], [`ThreadLocal`]); a
//! [`ProcessEntry`](crate::process::ProcessEntry) has the index of each. What was read with a sample follows its frames as a
//! [`Whose`].

/// Where the words lie that tell the running task: of `_asyncio`'s own description of itself (`Py_AsyncioModuleDebugOffsets`,
/// 3.14+) and of `_Py_DebugOffsets`. Value of the `ASYNCIO` map. Offsets in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Asyncio {
    /// `_PyThreadStateImpl.asyncio_running_task`; 0: this index of the map is not used.
    pub thread_running_task: u32,
    /// `sizeof(TaskObj)`: an object of a type with a smaller `tp_basicsize` is no task of C's.
    pub task_size: u32,
    /// `TaskObj.task_name`.
    pub task_name: u32,
    /// `TaskObj.task_coro`.
    pub task_coro: u32,
    /// `PyGenObject.gi_iframe`.
    pub coro_frame: u32,
    /// `PyTypeObject.tp_flags`.
    pub type_flags: u32,
    /// `PyTypeObject.tp_basicsize`.
    pub type_basicsize: u32,
    /// `PyLongObject.long_value.lv_tag`.
    pub long_tag: u32,
    /// `PyLongObject.long_value.ob_digit`.
    pub long_digits: u32,
    /// Explicit padding.
    pub _pad: u32,
}

/// Where a thread-local variable lies, for each thread of a process. Value of the `SPANS` map.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct ThreadLocal {
    /// From the thread pointer (a variable of the initial TLS block), or from the start of its module's block: in bytes.
    pub offset: i64,
    /// Number of the module in the thread's vector (`dtv`); 0: the variable lies at [`ThreadLocal::offset`] from the thread pointer.
    pub module: u32,
    /// Bytes of an entry of the vector: 16 (glibc), 8 (musl); 0: this index of the map is not used.
    pub entry_size: u32,
    /// Where the vector's address lies, from the thread pointer on.
    pub vector_at: i64,
}

/// Most bytes of a task's name that are taken with a sample.
pub const NAME_BYTES: usize = 64;

/// Whose work it was: follows the frames of a record whose [`SampleRecord::whose`](crate::event::SampleRecord::whose) is 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct Whose {
    /// Address of the running task; 0: none, or none that could be read.
    pub task: u64,
    /// The number N of a task that is called `Task-N` because nobody gave it a name.
    pub task_number: u64,
    /// Trace id as OpenTelemetry writes it; zeros: the thread was in no span.
    pub trace_id: [u8; 16],
    /// Span id, likewise.
    pub span_id: [u8; 8],
    /// How many of the record's Python frames, leaf first, are the task's: the last one is that of its coroutine. 0: it was not met.
    pub task_frames: u16,
    /// Bytes of the name that follow.
    pub name_bytes: u8,
    /// Bytes that a code point of the name has: 1, 2 or 4.
    pub name_kind: u8,
    /// Bits of [`flags`].
    pub flags: u32,
    /// The task's name, in the string's own kind.
    pub name: [u8; NAME_BYTES],
}

impl Whose {
    /// Nobody's.
    pub const NOBODY: Self = Self {
        task: 0,
        task_number: 0,
        trace_id: [0; 16],
        span_id: [0; 8],
        task_frames: 0,
        name_bytes: 0,
        name_kind: 1,
        flags: 0,
        name: [0; NAME_BYTES],
    };
}

/// Bits of [`Whose::flags`].
pub mod flags {
    /// There is a task.
    pub const TASK: u32 = 1;
    /// There is a span.
    pub const SPAN: u32 = 1 << 1;
    /// The task's name is a number.
    pub const NUMBERED: u32 = 1 << 2;
    /// The task's name is longer than what is here.
    pub const NAME_CUT: u32 = 1 << 3;
    /// The task's name could not be read.
    pub const NAME_UNREADABLE: u32 = 1 << 4;
}

const _: () = assert!(core::mem::size_of::<Asyncio>() == 40);
const _: () = assert!(core::mem::size_of::<ThreadLocal>() == 24);
const _: () = assert!(core::mem::size_of::<Whose>() == 112);
