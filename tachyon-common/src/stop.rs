//! Why a walk ended: stable numbers shared by kernel side, user side, reports and files.

/// Why the walk of a Python stack ended where it did. `Complete` is the only whole stack.
///
/// The numbers are part of the report's format: they are never reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u8)]
#[non_exhaustive]
pub enum StopReason {
    /// The chain ended at its root.
    Complete = 0,
    /// No thread state belongs to this thread, and nothing shows that it ever entered Python.
    NoThreadState = 1,
    /// `_PyRuntime` has no interpreter yet (or no more), its page has not been touched yet, or the thread has not even a
    /// thread pointer.
    RuntimeNotInitialized = 2,
    /// The thread was just entering the evaluator, where `cframe` is published before it is filled (3.11 and 3.12): the
    /// sample is kept, with its callers' frames where the native stack leads to them, else without frames. Also: a frame
    /// was just being pushed and not linked yet.
    EnteringEval = 3,
    /// Several thread states fit and none is the better one.
    AmbiguousThread = 4,
    /// The thread list is longer than one sample may search.
    ThreadListTooLong = 5,
    /// The thread list could not be read.
    UnreadableThread = 6,
    /// A frame could not be read.
    UnreadableFrame = 7,
    /// A code object could not be read.
    UnreadableCode = 8,
    /// A frame's code object is not of type `PyCode_Type`.
    NotACodeObject = 9,
    /// The stack is deeper than [`crate::limits::MAX_PY_FRAMES`].
    TooDeep = 10,
    /// The kernel refused another tail call.
    TailCallFailed = 11,
    /// The thread has a thread state but runs no Python frame.
    NoFrame = 12,
    /// An instruction pointer lies outside its code object.
    BadInstruction = 13,
    /// Native: the code at an address is not known: nothing that is executable was seen there.
    UnknownCode = 14,
    /// Native: the stack could not be read.
    UnreadableStack = 15,
    /// Native: the file's table has no rule for an address inside of it.
    NoUnwindRule = 16,
    /// Native: the file's rule for an address has no compact form.
    UnsupportedUnwindRule = 17,
    /// Native: code without a table, and `rbp` does not point into the stack.
    NoFramePointer = 18,
    /// Native: a caller's frame would lie below its callee's.
    StackNotRising = 19,
    /// Native: the registers in user mode are not known.
    NoRegisters = 20,
    /// Native: the process's mappings have not been looked at yet, or no room was left for a file's table.
    NoUnwindTables = 21,
    /// The thread runs Python, and no thread state is known to be its; or the only one that it has made runs on another
    /// thread's stack.
    UnknownThread = 22,
}

impl StopReason {
    /// All reasons in the order of their numbers.
    pub const ALL: [Self; 23] = [
        Self::Complete,
        Self::NoThreadState,
        Self::RuntimeNotInitialized,
        Self::EnteringEval,
        Self::AmbiguousThread,
        Self::ThreadListTooLong,
        Self::UnreadableThread,
        Self::UnreadableFrame,
        Self::UnreadableCode,
        Self::NotACodeObject,
        Self::TooDeep,
        Self::TailCallFailed,
        Self::NoFrame,
        Self::BadInstruction,
        Self::UnknownCode,
        Self::UnreadableStack,
        Self::NoUnwindRule,
        Self::UnsupportedUnwindRule,
        Self::NoFramePointer,
        Self::StackNotRising,
        Self::NoRegisters,
        Self::NoUnwindTables,
        Self::UnknownThread,
    ];

    /// The reason with this number, or `None` when this version knows no such reason.
    #[must_use]
    pub fn from_number(number: u8) -> Option<Self> {
        Self::ALL.get(usize::from(number)).copied()
    }

    /// Whether the walk of the Python frames saw all there were, none included.
    #[must_use]
    pub const fn is_whole(self) -> bool {
        matches!(self, Self::Complete | Self::NoFrame | Self::NoThreadState)
    }

    /// Whether only native stacks end for it.
    #[must_use]
    pub const fn is_native(self) -> bool {
        self as u8 >= Self::UnknownCode as u8 && self as u8 <= Self::NoUnwindTables as u8
    }

    /// The reason's name in reports: lower case, words joined by `_`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Complete => "complete",
            Self::NoThreadState => "no_thread_state",
            Self::RuntimeNotInitialized => "runtime_not_initialized",
            Self::EnteringEval => "entering_eval",
            Self::AmbiguousThread => "ambiguous_thread",
            Self::ThreadListTooLong => "thread_list_too_long",
            Self::UnreadableThread => "unreadable_thread",
            Self::UnreadableFrame => "unreadable_frame",
            Self::UnreadableCode => "unreadable_code",
            Self::NotACodeObject => "not_a_code_object",
            Self::TooDeep => "too_deep",
            Self::TailCallFailed => "tail_call_failed",
            Self::NoFrame => "no_frame",
            Self::BadInstruction => "bad_instruction",
            Self::UnknownCode => "unknown_code",
            Self::UnreadableStack => "unreadable_stack",
            Self::NoUnwindRule => "no_unwind_rule",
            Self::UnsupportedUnwindRule => "unsupported_unwind_rule",
            Self::NoFramePointer => "no_frame_pointer",
            Self::StackNotRising => "stack_not_rising",
            Self::NoRegisters => "no_registers",
            Self::NoUnwindTables => "no_unwind_tables",
            Self::UnknownThread => "unknown_thread",
        }
    }
}

/// Why a program run that hit a selected Python process left no sample. Index into
/// [`crate::event::Counters::loss`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u8)]
#[non_exhaustive]
pub enum LossCause {
    /// The ring buffer had no room.
    RingFull = 0,
    /// The process was not in the process table: it started before its start could be seen, or the table is full.
    UnknownProcess = 1,
    /// The process had not been inspected yet (just after `exec`).
    Uninspected = 2,
    /// The process was past its exit hook.
    ProcessGone = 3,
    /// A map that always exists could not be reached, or a tail call failed before a record could be sent.
    Internal = 4,
    /// User space refused the record (unknown kind, bad length).
    BadRecord = 5,
    /// The sample reached user space but could not be written.
    WriteError = 6,
    /// The process, or its program, was over before anybody could look at it: it may have been CPython.
    NeverInspected = 7,
}

impl LossCause {
    /// How many causes there are.
    pub const COUNT: usize = 8;
    /// All causes in the order of their numbers.
    pub const ALL: [Self; Self::COUNT] = [
        Self::RingFull,
        Self::UnknownProcess,
        Self::Uninspected,
        Self::ProcessGone,
        Self::Internal,
        Self::BadRecord,
        Self::WriteError,
        Self::NeverInspected,
    ];

    /// The cause's key in reports.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::RingFull => "ring_full",
            Self::UnknownProcess => "unknown_process",
            Self::Uninspected => "uninspected",
            Self::ProcessGone => "process_gone",
            Self::Internal => "internal",
            Self::BadRecord => "bad_record",
            Self::WriteError => "write_error",
            Self::NeverInspected => "never_inspected",
        }
    }
}
