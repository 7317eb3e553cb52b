//! Where CPython keeps what a walk needs: one [`Layout`] for each interpreter build.
//!
//! Built in user space (from `_Py_DebugOffsets` or a generated table), validated there, read by the walk.
//! Offsets are in bytes from the start of the named structure; names are CPython's.

/// Offsets and rules of one CPython build. Value of the `LAYOUTS` map.
///
/// An offset of [`Layout::ABSENT`] means that this build has no such field.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Layout {
    /// `PY_VERSION_HEX`: major, minor, micro, level and serial.
    pub version_hex: u32,
    /// Rules of this build, of [`flags`].
    pub flags: u32,

    /// `_PyRuntimeState.interpreters.head`.
    pub runtime_interpreters_head: u32,
    /// `_PyRuntimeState.interpreters.next_id` (a new interpreter raises it).
    pub runtime_next_interp_id: u32,
    /// `_PyRuntimeState.main_thread`: `pthread_self()` of the main thread (up to 3.14).
    pub runtime_main_thread: u32,
    /// `_PyRuntimeState.gilstate.tstate_current` (up to 3.11).
    pub runtime_tstate_current: u32,
    /// `_PyRuntimeState.ceval.gil` (up to 3.11, where the GIL lies in the runtime).
    pub runtime_gil: u32,
    /// `_PyRuntimeState.gc.collecting` (3.8, where the collector lies in the runtime).
    pub runtime_gc_collecting: u32,

    /// `PyInterpreterState.next`.
    pub interp_next: u32,
    /// `PyInterpreterState.threads.head` (`tstate_head` up to 3.10).
    pub interp_threads_head: u32,
    /// `PyInterpreterState.id`.
    pub interp_id: u32,
    /// `PyInterpreterState.ceval.gil`: pointer to the interpreter's GIL (3.12+).
    pub interp_ceval_gil: u32,
    /// `PyInterpreterState.threads.main` (3.13+).
    pub interp_threads_main: u32,
    /// `PyInterpreterState.gc.collecting` (3.9+).
    pub interp_gc_collecting: u32,
    /// `PyInterpreterState.gc.frame` (3.15+): the frame that was innermost when the running collection began.
    pub interp_gc_frame: u32,
    /// `PyInterpreterState._code_object_generation` (3.14+).
    pub interp_code_generation: u32,

    /// `struct _gil_runtime_state.locked`.
    pub gil_locked: u32,
    /// `struct _gil_runtime_state.last_holder`.
    pub gil_last_holder: u32,

    /// `PyThreadState.next`.
    pub tstate_next: u32,
    /// `PyThreadState.interp`.
    pub tstate_interp: u32,
    /// `PyThreadState.thread_id`: `pthread_self()`.
    pub tstate_thread_id: u32,
    /// `PyThreadState.native_thread_id` (3.11+): `gettid()` in the process's own pid namespace.
    pub tstate_native_thread_id: u32,
    /// `PyThreadState.frame` (≤ 3.10), `.cframe` (3.11, 3.12) or `.current_frame` (3.13+).
    pub tstate_frame: u32,
    /// `PyThreadState.cframe` (3.10 to 3.12): an address on the C stack of the thread that runs this state.
    pub tstate_cframe: u32,
    /// `PyThreadState._status` (3.12+), a 32-bit word.
    pub tstate_status: u32,
    /// Bit of `_status` that is `bound_gilstate` (3.12+); 0 when absent.
    pub status_bound_gilstate: u32,
    /// Bit of `_status` that is `active` (3.12+); 0 when absent.
    pub status_active: u32,
    /// Bit of `_status` that is `holds_gil` (3.13+); 0 when absent.
    pub status_holds_gil: u32,
    /// `PyThreadState.holds_gil`-like word of its own (3.15+), or absent.
    pub tstate_holds_gil: u32,
    /// `PyThreadState.gil_requested` (3.15+), or absent.
    pub tstate_gil_requested: u32,
    /// `PyThreadState.current_exception` (3.12+) or `.curexc_type` (before): not NULL while one is raised.
    pub tstate_current_exception: u32,
    /// `PyThreadState.exc_state`: the outermost `_PyErr_StackItem`, embedded.
    pub tstate_exc_state: u32,
    /// `_PyErr_StackItem.exc_value`.
    pub exc_value: u32,
    /// `PyThreadState.base_frame` (3.15+): the root sentinel.
    pub tstate_base_frame: u32,

    /// `_PyCFrame.current_frame` (3.11, 3.12).
    pub cframe_current_frame: u32,
    /// `_PyInterpreterFrame.previous` / `PyFrameObject.f_back`.
    pub frame_previous: u32,
    /// `_PyInterpreterFrame.f_executable` / `f_code`.
    pub frame_code: u32,
    /// `_PyInterpreterFrame.instr_ptr` / `prev_instr` / `PyFrameObject.f_lasti`.
    pub frame_instr: u32,
    /// `_PyInterpreterFrame.owner` (3.11+), one byte.
    pub frame_owner: u32,
    /// `_PyInterpreterFrame.is_entry` (3.11), one byte.
    pub frame_is_entry: u32,
    /// `_PyInterpreterFrame.tlbc_index` (free-threaded 3.14+), a signed 32-bit word.
    pub frame_tlbc_index: u32,

    /// `PyObject.ob_type`.
    pub ob_type: u32,
    /// `PyVarObject.ob_size` (of a bytes object; of a code object its code units, 3.11+).
    pub ob_size: u32,
    /// `PyCodeObject.co_filename`.
    pub code_filename: u32,
    /// `PyCodeObject.co_qualname` (3.11+) or `.co_name` (before).
    pub code_qualname: u32,
    /// `PyCodeObject.co_linetable` (3.10+) or `.co_lnotab` (before).
    pub code_linetable: u32,
    /// `PyCodeObject.co_firstlineno`.
    pub code_firstlineno: u32,
    /// `PyCodeObject.co_version` (3.12+): a number that an interpreter gives to one code object only.
    pub code_version: u32,
    /// `PyCodeObject.co_code_adaptive` (3.11+): where the instructions start.
    pub code_code_adaptive: u32,
    /// `PyCodeObject.co_tlbc` (free-threaded 3.14+).
    pub code_tlbc: u32,

    /// `PyBytesObject.ob_sval`.
    pub bytes_sval: u32,
    /// `PyASCIIObject.state`, a 32-bit word.
    pub unicode_state: u32,
    /// `PyASCIIObject.length`, in code points.
    pub unicode_length: u32,
    /// `sizeof(PyASCIIObject)`: where a compact ASCII string's text starts.
    pub unicode_ascii_size: u32,
    /// `sizeof(PyCompactUnicodeObject)`: where any other compact string's text starts.
    pub unicode_compact_size: u32,
    /// Bits to shift `state` right by to get `kind` (3 bits: 1, 2 or 4 bytes a code point).
    pub unicode_kind_shift: u32,
    /// Bit of `state` that is `compact`.
    pub unicode_compact_bit: u32,
    /// Bit of `state` that is `ascii`.
    pub unicode_ascii_bit: u32,

    /// Value of `owner` from which on a frame is a shim and takes no slot: 3 (3.12+), 255 where there are none (3.11).
    pub owner_shim_min: u32,
    /// Value of `owner` that is `FRAME_OWNED_BY_GENERATOR`.
    pub owner_generator: u32,
    /// Bits to clear in `f_executable` to get a pointer (`_PyStackRef` tags, 3.14+); 0 when untagged.
    pub stackref_tag_mask: u32,
    /// Bytes of one unit of `lasti`: 1 (3.8, 3.9), 2 (3.10+).
    pub instr_unit: u32,
    /// Bytes to read of a thread state: past its last field of interest ([`Layout::complete`]).
    pub tstate_read: u16,
    /// Bytes to read of a frame, likewise.
    pub frame_read: u16,
    /// Bytes to read of a code object's head, likewise.
    pub code_read: u16,
    /// Bytes to read of an interpreter state from [`Layout::interp_at`] on, likewise.
    pub interp_read: u16,
    /// Where in an interpreter state the first of the fields lies that each sample asks for, a multiple of 8.
    pub interp_at: u32,

    /// `_PyInterpreterFrame.stacktop`, a signed 32-bit word (3.11, 3.12): -1 while the evaluator runs the frame.
    pub frame_stacktop: u32,
    /// `_PyInterpreterFrame.return_offset`, 16 bits (3.12): 0 in a call, how far to jump behind a generator that was resumed.
    pub frame_return_offset: u32,
    /// `_PyInterpreterFrame.localsplus` (3.11, 3.12): what follows are locals and stack, a word each.
    pub frame_localsplus: u32,
    /// `PyCodeObject.co_nlocalsplus` (3.11, 3.12).
    pub code_nlocalsplus: u32,
    /// `PyCodeObject.co_stacksize` (3.11, 3.12).
    pub code_stacksize: u32,
    /// `PyThreadState.current_executor` (3.14+): not NULL while the innermost frames run in a trace of the JIT.
    pub tstate_current_executor: u32,
    /// How far `gi_frame_state` lies before the frame in a generator, in bytes (3.11, 3.12).
    pub generator_state_before: u32,
    /// Where in this build's evaluator, from its first instruction on, the innermost frame may not be linked to its caller: see
    /// [`Layout::may_be_unlinked`]. Only with [`flags::LINKS_FIRST`].
    pub unlinked: [u32; UNLINKED],
}

/// How many such places of an evaluator there may be (3.12.1 has 12).
pub const UNLINKED: usize = 24;

/// Bits of [`Layout::flags`].
pub mod flags {
    /// `Py_GIL_DISABLED`: no GIL.
    pub const FREE_THREADED: u32 = 1;
    /// `tstate->frame` is a list of `PyFrameObject`s (3.8 to 3.10).
    pub const FRAME_OBJECTS: u32 = 1 << 1;
    /// `tstate->cframe->current_frame` (3.11, 3.12).
    pub const CFRAME: u32 = 1 << 2;
    /// The instruction field is an offset (`f_lasti`), not a pointer.
    pub const LASTI_IS_OFFSET: u32 = 1 << 3;
    /// A new frame's instruction field lies one unit before the first instruction (3.11, 3.12: `prev_instr`).
    pub const PREV_INSTR: u32 = 1 << 4;
    /// Code objects have `co_qualname` (3.11+); without it the name is `co_name`.
    pub const QUALNAME: u32 = 1 << 5;
    /// `struct _PyCFrame` outlives nothing: an unfilled one may be met while the evaluator is entered.
    pub const ENTERING_EVAL: u32 = 1 << 6;
    /// The evaluator links a frame that C calls before it fills its `cframe`, and [`super::Layout::unlinked`] has all places where
    /// it links one later (3.11, 3.12).
    pub const LINKS_FIRST: u32 = 1 << 7;
}

impl Layout {
    /// `_PyRuntimeState.interpreters.main` stands behind `interpreters.head`, in every version (`cargo xtask layouts` fails to
    /// compile its C program where it does not).
    pub const MAIN_AFTER_HEAD: u32 = 8;

    /// Marks a field that this build does not have.
    pub const ABSENT: u32 = u32::MAX;

    /// Major and minor version, e.g. `(3, 12)`.
    #[must_use]
    pub const fn minor_version(&self) -> (u8, u8) {
        ((self.version_hex >> 24) as u8, (self.version_hex >> 16) as u8)
    }

    /// Fills [`Layout::tstate_read`] and those that follow it: a read must not go past a structure's last field, for the
    /// next page may not be mapped.
    #[must_use]
    pub fn complete(mut self) -> Self {
        let end = |fields: &[(u32, u32)]| {
            let present = fields.iter().filter(|(offset, _)| Self::present(*offset));
            present.map(|(offset, size)| offset.saturating_add(*size)).max().unwrap_or(0)
        };
        let bytes = |end: u32| u16::try_from(end).unwrap_or(u16::MAX);
        self.tstate_read = bytes(end(&[
            (self.tstate_interp, 8),
            (self.tstate_thread_id, 8),
            (self.tstate_frame, 8),
            (self.tstate_cframe, 8),
            (self.tstate_status, 4),
            (self.tstate_holds_gil, 4),
            (self.tstate_gil_requested, 4),
            (self.tstate_current_exception, 8),
            (self.tstate_exc_state, self.exc_value.saturating_add(8)),
            (self.tstate_base_frame, 8),
            (self.tstate_current_executor, 8),
        ]));
        self.frame_read = bytes(end(&[
            (self.frame_previous, 8),
            (self.frame_code, 8),
            (self.frame_instr, if self.has(flags::LASTI_IS_OFFSET) { 4 } else { 8 }),
            (self.frame_owner, 1),
            (self.frame_is_entry, 1),
            (self.frame_tlbc_index, 4),
            (self.frame_stacktop, 4),
            (self.frame_return_offset, 2),
        ]));
        self.code_read = bytes(end(&[
            (self.ob_type, 8),
            (if self.has(flags::FRAME_OBJECTS) { Self::ABSENT } else { self.ob_size }, 8),
            (self.code_filename, 8),
            (self.code_qualname, 8),
            (self.code_linetable, 8),
            (self.code_firstlineno, 4),
            (self.code_version, 4),
            (self.code_tlbc, 8),
        ]));
        // Asked for where a thread state has no mark of its own.
        let own_mark = Self::present(self.tstate_holds_gil) || self.status_holds_gil != 0;
        let interp = [
            (self.interp_id, 8),
            (self.interp_threads_main, 8),
            (if own_mark { Self::ABSENT } else { self.interp_ceval_gil }, 8),
            (self.interp_gc_collecting, 4),
            (self.interp_gc_frame, 8),
            (self.interp_code_generation, 8),
        ];
        self.interp_at = interp.iter().map(|(offset, _)| *offset).min().unwrap_or(0) & !7;
        self.interp_read = bytes(end(&interp).saturating_sub(self.interp_at));
        self
    }

    /// A place of [`Layout::unlinked`]: `bytes` (below 256) from `start` (below 2^24) on. `None`: it does not fit.
    #[must_use]
    pub const fn unlinked_place(start: u64, bytes: u64) -> Option<u32> {
        if start >> 24 == 0 && bytes >> 8 == 0 { Some((start | bytes << 24) as u32) } else { None }
    }

    /// Whether an instruction, told by its distance from the evaluator's first one, lies where the innermost frame may not
    /// be linked.
    #[inline(always)]
    #[must_use]
    pub fn may_be_unlinked(&self, distance: u64) -> bool {
        let mut at = 0;
        let mut may = 0;
        while at < UNLINKED {
            let place = self.unlinked[at];
            let within = distance.wrapping_sub(u64::from(place & 0xff_ffff));
            // 1 where it is less than the length, else 0: no branch, for the verifier would follow each.
            let less = (within.wrapping_sub(u64::from(place >> 24)) & !within) >> 63;
            may = crate::opaque::word(may | less);
            at += 1;
        }
        may != 0
    }

    /// Whether all bits of `flag` are set.
    #[must_use]
    pub const fn has(&self, flag: u32) -> bool {
        self.flags & flag == flag
    }

    /// Whether `offset` names a field that this build has.
    #[must_use]
    pub const fn present(offset: u32) -> bool {
        offset != Self::ABSENT
    }
}

const _: () = assert!(core::mem::size_of::<Layout>() == (72 + UNLINKED) * 4);
