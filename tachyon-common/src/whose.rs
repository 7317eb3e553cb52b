//! Whose work a thread does: the asyncio task that it runs, those that await it, its greenlet, and the span of OpenTelemetry that it is
//! in.
//!
//! User space finds out where all of it is kept and puts that into maps ([`Asyncio`], [`Greenlets`], [`ThreadLocal`]); a
//! [`ProcessEntry`](crate::process::ProcessEntry) has the index of each. What was read with a sample follows its frames as a
//! [`Whose`].

/// Where asyncio keeps its tasks: of `_asyncio`'s own description of itself (`Py_AsyncioModuleDebugOffsets`, 3.14+) and of
/// `_Py_DebugOffsets`. Value of the `ASYNCIO` map. Offsets in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Asyncio {
    /// `_PyThreadStateImpl.asyncio_running_task`; 0: this index of the map is not used, or a thread does not say (up to 3.13).
    pub thread_running_task: u32,
    /// `sizeof(TaskObj)`, or a little less: an object of a type with a smaller `tp_basicsize` is no task of C's.
    pub task_size: u32,
    /// The same of `FutureObj`, as far as its fields are read here.
    pub future_size: u32,
    /// `TaskObj.task_name`.
    pub task_name: u32,
    /// `TaskObj.task_coro`.
    pub task_coro: u32,
    /// `TaskObj.task_is_task`, one byte; futures have it too.
    pub task_is_task: u32,
    /// `TaskObj.task_awaited_by`, likewise: one of those that await it, or a set of them.
    pub task_awaited_by: u32,
    /// `TaskObj.task_awaited_by_is_set`, one byte, likewise.
    pub task_awaited_by_is_set: u32,
    /// `PyGenObject.gi_iframe`.
    pub coro_frame: u32,
    /// `PyGenObject.gi_frame_state`, one byte.
    pub coro_state: u32,
    /// The values of that byte that say that a coroutine awaits another object.
    pub coro_awaits: [i8; 2],
    /// The value from which on it runs, or has ended.
    pub coro_executing: i8,
    /// How far below the stack pointer of its frame what it awaits lies, in bytes.
    pub awaited_below: u8,
    /// `_PyInterpreterFrame.stackpointer`.
    pub frame_stackpointer: u32,
    /// `PySetObject.table`: pairs of key and hash.
    pub set_table: u32,
    /// `PySetObject.mask`: one less than the pairs.
    pub set_mask: u32,
    /// `PyTypeObject.tp_flags`.
    pub type_flags: u32,
    /// `PyTypeObject.tp_basicsize`.
    pub type_basicsize: u32,
    /// `PyLongObject.long_value.lv_tag`.
    pub long_tag: u32,
    /// `PyLongObject.long_value.ob_digit`.
    pub long_digits: u32,
    /// `PyDictObject.ma_used`, which the version tag and the keys follow: only where the running tasks are in a dictionary
    /// ([`ProcessEntry::current_tasks`](crate::process::ProcessEntry::current_tasks), up to 3.13).
    pub dict_used: u32,
    /// `PyDictKeysObject.dk_nentries`, likewise: 32 (up to 3.10), or 24.
    pub keys_nentries: u32,
    /// `PyDictKeysObject.dk_indices`, which the entries follow, likewise.
    pub keys_indices: u32,
    /// 1: what lies at [`Asyncio::coro_frame`] points to the frame (up to 3.10); 0: it is the frame.
    pub coro_points: u32,
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

/// Where the package greenlet keeps a thread's greenlets, and CPython what they are named by. Value of the `GREENLETS` map. Offsets in
/// bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Greenlets {
    /// The thread's pointer to its `greenlet::ThreadState` (`g_thread_state_global`), whose first words are its main and its current
    /// greenlet. Its [`ThreadLocal::entry_size`] is 0: this index of the map is not used.
    pub state: ThreadLocal,
    /// `PyGreenlet.dict`.
    pub dict: u32,
    /// `PyGreenlet.pimpl`: the `Greenlet`.
    pub implementation: u32,
    /// `Greenlet.stack_state` where `_self` precedes it; one word less without.
    pub stack_state: u32,
    /// `PyFrameObject.f_frame` (3.11+); 0: the frame object is the frame.
    pub frame_interp: u32,
    /// `PyTypeObject.tp_name`.
    pub type_name: u32,
    /// `PyDictObject.ma_used`, which the version tag, the keys and the values follow; 0: names in dictionaries are not read.
    pub dict_used: u32,
    /// `PyDictKeysObject.dk_nentries`: 32 (up to 3.10), or 24.
    pub keys_nentries: u32,
    /// `PyDictKeysObject.dk_indices`, which the entries follow.
    pub keys_indices: u32,
    /// `PyDictValues.values`.
    pub values_start: u32,
    /// Explicit padding.
    pub _pad: u32,
}

/// Most bytes of a task's name that are taken with a sample.
pub const NAME_BYTES: usize = 64;
/// Most event loops of one process that run a task at one moment and of which this is known, before 3.14; a power of two.
pub const MAX_LOOPS: usize = 4;
/// Most greenlets of a sample: the running one, its parent, and so on; a power of two.
pub const MAX_GREENLETS: usize = 8;
/// Most tasks that are followed from the running one to those that await it.
pub const MAX_AWAITING: usize = 8;
/// Most coroutines of one of those that are walked, outermost first.
pub const MAX_COROUTINES: usize = 16;
/// Most entries that are looked at of a set of those that await a task.
pub const MAX_AWAITING_SET: u32 = 64;

/// A task, or a greenlet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct Task {
    /// Its address.
    pub address: u64,
    /// The number N of one that is called `Task-N` because nobody gave it a name.
    pub number: u64,
    /// How many Python frames are its own. Of the running task: of the record's first ones, the last of which is that of its coroutine;
    /// 0: that was not met. Of one that awaits, and of a greenlet's parent: of those that follow, innermost first. Of the running
    /// greenlet: 0.
    pub frames: u16,
    /// Bytes of the name.
    pub name_bytes: u8,
    /// Bytes that a code point of the name has: 1, 2 or 4.
    pub name_kind: u8,
    /// Bits of [`flags`].
    pub flags: u16,
    /// How many tasks and futures await it, of the first [`MAX_AWAITING_SET`] places of a set; 0: that was not looked for.
    pub awaited_by: u16,
    /// The name, in the string's own kind.
    pub name: [u8; NAME_BYTES],
}

/// Whose work it was: follows the frames of a record whose [`SampleRecord::whose`](crate::event::SampleRecord::whose) is 1, without the
/// task where there is none ([`Whose::bytes`]). Then come as many [`Task`]s as [`Whose::greenlets`] says: the running greenlet, then its
/// parent, and so on. Then as many as [`Whose::awaiting`] says, each of which awaits the one before. The last of the record's Python
/// frames are those of the parents, then of these tasks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct Whose {
    /// Trace id as OpenTelemetry writes it.
    pub trace_id: [u8; 16],
    /// Span id, likewise.
    pub span_id: [u8; 8],
    /// Greenlets that follow.
    pub greenlets: u16,
    /// Tasks that follow them.
    pub awaiting: u16,
    /// Bits of [`flags`]: what there is.
    pub flags: u32,
    /// The running task.
    pub task: Task,
}

impl Task {
    /// None.
    pub const NONE: Self = Self {
        address: 0,
        number: 0,
        frames: 0,
        name_bytes: 0,
        name_kind: 1,
        flags: 0,
        awaited_by: 0,
        name: [0; NAME_BYTES],
    };
}

impl Whose {
    /// Nobody's.
    pub const NOBODY: Self =
        Self { trace_id: [0; 16], span_id: [0; 8], greenlets: 0, awaiting: 0, flags: 0, task: Task::NONE };

    /// Bytes before the task.
    pub const HEAD: usize = core::mem::offset_of!(Self, task);

    /// Makes it nobody's; what it says of a task means nothing then.
    #[inline(always)]
    pub fn clear(&mut self) {
        (self.trace_id, self.span_id) = ([0; 16], [0; 8]);
        (self.greenlets, self.awaiting, self.flags) = (0, 0, 0);
    }

    /// How many bytes of it a record has, by its flags.
    #[inline(always)]
    #[must_use]
    pub const fn bytes(flags: u32) -> usize {
        if flags & flags::TASK == 0 { Self::HEAD } else { core::mem::size_of::<Self>() }
    }
}

/// Bits of [`Whose::flags`] and of [`Task::flags`].
pub mod flags {
    /// There is a task.
    pub const TASK: u32 = 1;
    /// There is a span.
    pub const SPAN: u32 = 1 << 1;
    /// There may be more tasks that await the last one, or who does could not be read.
    pub const MORE_AWAITING: u32 = 1 << 2;
    /// A greenlet runs that is not the thread's main one.
    pub const GREENLET: u32 = 1 << 3;
    /// The last greenlet may have a parent, which is not here.
    pub const MORE_GREENLETS: u32 = 1 << 4;

    /// The task's name is a number.
    pub const NUMBERED: u16 = 1;
    /// The task's name is longer than what is here.
    pub const NAME_CUT: u16 = 1 << 1;
    /// The task's name could not be read.
    pub const NAME_UNREADABLE: u16 = 1 << 2;
    /// Frames are missing further in than those that are here: there are more, or they could not be read.
    pub const INNER_CUT: u16 = 1 << 3;
    /// The same further out.
    pub const OUTER_CUT: u16 = 1 << 4;
    /// The name is that of a greenlet's type, as C has it: up to the first byte that is 0, with what modules it is in.
    pub const TYPE_NAME: u16 = 1 << 5;
    /// A thread's main greenlet, which has no name.
    pub const MAIN: u16 = 1 << 6;
}

const _: () = assert!(core::mem::size_of::<Asyncio>() == 88);
const _: () = assert!(core::mem::size_of::<ThreadLocal>() == 24);
const _: () = assert!(core::mem::size_of::<Greenlets>() == 64);
const _: () = assert!(MAX_GREENLETS.is_power_of_two());
const _: () = assert!(core::mem::size_of::<Task>() == 88);
const _: () = assert!(core::mem::size_of::<Whose>() == 120 && Whose::HEAD == 32);
