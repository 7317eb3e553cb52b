//! Builds the [`Layout`] of an interpreter: from what it publishes itself, completed by the generated table, or all
//! from the table. Whichever it was, the result passes one validation.

use tachyon_common::layout::{Layout, flags};

use super::builtin::BUILTIN;
use super::debug_offsets::DebugOffsets;
use super::validate::validate;

/// Offsets of one minor version and kind of build, from its headers. Rows are generated.
#[derive(Debug)]
pub(super) struct BuiltinLayout {
    /// Major and minor version.
    pub(super) minor_version: (u8, u8),
    /// Built with `Py_GIL_DISABLED`.
    pub(super) free_threaded: bool,
    /// The versions whose headers gave this row.
    pub(super) headers: &'static [Headers],
    /// `sizeof(_PyInterpreterFrame)`, or of `PyFrameObject` (up to 3.10).
    pub(super) frame_size: u32,
    /// `sizeof(PyCodeObject)`.
    pub(super) code_size: u32,
    /// `sizeof(PyTypeObject)`.
    pub(super) type_size: u32,
    /// The offsets, without version and flags.
    pub(super) layout: Layout,
}

/// What the headers of one version say, besides the offsets.
#[derive(Debug)]
pub(super) struct Headers {
    /// `PY_VERSION_HEX`.
    pub(super) version_hex: u32,
    /// `sizeof(_PyRuntimeState)`.
    pub(super) runtime_size: u32,
    /// `sizeof(PyInterpreterState)`.
    pub(super) interp_size: u32,
    /// `sizeof(PyThreadState)`.
    pub(super) tstate_size: u32,
}

/// Sizes of the structures that a layout's offsets point into.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Sizes {
    /// `sizeof(_PyRuntimeState)`.
    pub(super) runtime: u64,
    /// `sizeof(PyInterpreterState)`.
    pub(super) interp: u64,
    /// `sizeof(PyThreadState)`.
    pub(super) tstate: u64,
    /// `sizeof` of a frame.
    pub(super) frame: u64,
    /// `sizeof(PyCodeObject)`.
    pub(super) code: u64,
}

/// Why no layout can be given for an interpreter.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LayoutError {
    /// A number that the interpreter publishes makes no sense.
    #[error("its debug offsets have an odd {field}: {value:#x}")]
    Odd {
        /// Name of the number.
        field: &'static str,
        /// What was found.
        value: u64,
    },
    /// The version that the interpreter publishes and the one of its `Py_Version` differ.
    #[error("it says it is version {published:#010x} in its debug offsets, {exported:#010x} in Py_Version")]
    TwoVersions {
        /// `_Py_DebugOffsets.version`.
        published: u32,
        /// `Py_Version`.
        exported: u32,
    },
    /// 3.13 and newer must publish their offsets.
    #[error("it has no debug offsets at _PyRuntime")]
    NoDebugOffsets,
    /// There is no table for this minor version and kind of build.
    #[error("no table of its structures is known")]
    NoTable,
    /// What it publishes differs from its version's headers, so the rest of these cannot be trusted either.
    #[error("its {field} is {published}, its version's headers say {table}: a changed build")]
    TableDiffers {
        /// Name of the field.
        field: &'static str,
        /// What it publishes.
        published: u64,
        /// What the table says.
        table: u64,
    },
    /// A structure has another size than in its version's headers.
    #[error("its {structure} has {found} bytes, its version's headers say {expected}: another build configuration")]
    OtherSize {
        /// Name of the structure.
        structure: &'static str,
        /// What the file says.
        found: u64,
        /// What the table says.
        expected: u64,
    },
    /// A field that every walk needs is missing.
    #[error("its layout lacks {0}")]
    Missing(&'static str),
    /// A field is not aligned to its own size.
    #[error("its {field} at {offset} is not aligned to {width}")]
    Unaligned {
        /// Name of the field.
        field: &'static str,
        /// Its offset.
        offset: u64,
        /// Its size.
        width: u64,
    },
    /// A field ends outside its structure or outside what is read of it in one go.
    #[error("its {field} at {offset} ends past {limit}")]
    Outside {
        /// Name of the field.
        field: &'static str,
        /// Its offset.
        offset: u64,
        /// End of the structure or of our read buffer.
        limit: u64,
    },
    /// Two fields of one structure lie over each other.
    #[error("its {0} and {1} lie over each other")]
    Overlap(&'static str, &'static str),
    /// A number that is no offset is out of its range.
    #[error("its {field} is {value:#x}")]
    Range {
        /// Name of the number.
        field: &'static str,
        /// What was found.
        value: u64,
    },
}

/// A layout and how sure it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Built {
    /// The layout.
    pub(super) layout: Layout,
    /// Sizes of the structures that it points into.
    pub(super) sizes: Sizes,
    /// The sizes of the interpreter's structures are those of a version whose headers were seen.
    pub(super) known_build: bool,
}

/// What the ELF file says of the sizes of its objects; 0 where it does not.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct ObjectSizes {
    /// Of `_PyRuntime`: `sizeof(_PyRuntimeState)`.
    pub(super) runtime: u64,
    /// Of `PyCode_Type`: `sizeof(PyTypeObject)`, which tells builds with another object header.
    pub(super) code_type: u64,
}

/// Builds and validates the layout of a version.
///
/// # Errors
/// When there is no table, or anything does not fit.
pub(super) fn build(
    version_hex: u32,
    published: Option<&DebugOffsets>,
    objects: ObjectSizes,
) -> Result<Built, LayoutError> {
    let [major, minor, ..] = version_hex.to_be_bytes();
    let free_threaded = published.is_some_and(|published| published.free_threaded);
    let row = select(BUILTIN, version_hex, free_threaded, objects.runtime).ok_or(LayoutError::NoTable)?;
    if objects.code_type != 0 && objects.code_type != u64::from(row.type_size) {
        let expected = u64::from(row.type_size);
        return Err(LayoutError::OtherSize { structure: "PyTypeObject", found: objects.code_type, expected });
    }
    let mut layout = row.layout;
    layout.version_hex = version_hex;
    layout.flags = rules(minor) | if free_threaded { flags::FREE_THREADED } else { 0 };
    let mut sizes = row.sizes(objects.runtime);
    if (major, minor) >= (3, 13) {
        let published = published.ok_or(LayoutError::NoDebugOffsets)?;
        take_published(&mut layout, published)?;
        sizes = published_sizes(published, &row.sizes(objects.runtime))?;
        if objects.runtime != 0 && objects.runtime != sizes.runtime {
            let (found, expected) = (objects.runtime, sizes.runtime);
            return Err(LayoutError::OtherSize { structure: "_PyRuntimeState", found, expected });
        }
    }
    validate(&layout, &sizes)?;
    let known_build = row.headers.iter().any(|headers| u64::from(headers.runtime_size) == sizes.runtime);
    Ok(Built { layout, sizes, known_build })
}

/// The row for a version: of its minor version's the one with this size of `_PyRuntime`, else the last.
fn select(
    rows: &'static [BuiltinLayout],
    version_hex: u32,
    free_threaded: bool,
    runtime_size: u64,
) -> Option<&'static BuiltinLayout> {
    let [major, minor, ..] = version_hex.to_be_bytes();
    let fits = |row: &&BuiltinLayout| row.minor_version == (major, minor) && row.free_threaded == free_threaded;
    let known =
        |row: &&BuiltinLayout| row.headers.iter().any(|headers| u64::from(headers.runtime_size) == runtime_size);
    let before = |row: &&BuiltinLayout| row.headers.iter().any(|headers| headers.version_hex <= version_hex);
    let rows = || rows.iter().filter(fits);
    rows().find(known).or_else(|| rows().rfind(before)).or_else(|| rows().next_back())
}

impl BuiltinLayout {
    /// The sizes of this row's structures in the version with this size of `_PyRuntime`, else in the largest.
    fn sizes(&self, runtime_size: u64) -> Sizes {
        let known = self.headers.iter().find(|headers| u64::from(headers.runtime_size) == runtime_size);
        let headers = known.or_else(|| self.headers.iter().max_by_key(|headers| headers.runtime_size));
        let size = |of: fn(&Headers) -> u32| headers.map_or(0, |headers| u64::from(of(headers)));
        Sizes {
            // A newer patch release has a larger structure; a smaller one is checked against its own end.
            runtime: if runtime_size == 0 { size(|headers| headers.runtime_size) } else { runtime_size },
            interp: size(|headers| headers.interp_size),
            tstate: size(|headers| headers.tstate_size),
            frame: u64::from(self.frame_size),
            code: u64::from(self.code_size),
        }
    }
}

/// What follows from the minor version alone: bits of [`flags`].
fn rules(minor: u8) -> u32 {
    match minor {
        ..=10 => flags::FRAME_OBJECTS | flags::LASTI_IS_OFFSET,
        11 | 12 => flags::CFRAME | flags::PREV_INSTR | flags::ENTERING_EVAL | flags::QUALNAME,
        _ => flags::QUALNAME,
    }
}

/// Puts what the interpreter publishes into the layout. Where the table says something else, neither is believed:
/// what is completed from the table lies in the same structures.
fn take_published(layout: &mut Layout, published: &DebugOffsets) -> Result<(), LayoutError> {
    let fields: [(&mut u32, &'static str); 32] = [
        (&mut layout.runtime_interpreters_head, "runtime_state.interpreters_head"),
        (&mut layout.interp_next, "interpreter_state.next"),
        (&mut layout.interp_threads_head, "interpreter_state.threads_head"),
        (&mut layout.interp_threads_main, "interpreter_state.threads_main"),
        (&mut layout.interp_id, "interpreter_state.id"),
        (&mut layout.interp_ceval_gil, "interpreter_state.ceval_gil"),
        (&mut layout.interp_code_generation, "interpreter_state.code_object_generation"),
        (&mut layout.tstate_next, "thread_state.next"),
        (&mut layout.tstate_interp, "thread_state.interp"),
        (&mut layout.tstate_thread_id, "thread_state.thread_id"),
        (&mut layout.tstate_native_thread_id, "thread_state.native_thread_id"),
        (&mut layout.tstate_frame, "thread_state.current_frame"),
        (&mut layout.tstate_base_frame, "thread_state.base_frame"),
        (&mut layout.tstate_status, "thread_state.status"),
        (&mut layout.tstate_holds_gil, "thread_state.holds_gil"),
        (&mut layout.tstate_gil_requested, "thread_state.gil_requested"),
        (&mut layout.tstate_current_exception, "thread_state.current_exception"),
        (&mut layout.tstate_exc_state, "thread_state.exc_state"),
        (&mut layout.exc_value, "err_stackitem.exc_value"),
        (&mut layout.frame_previous, "interpreter_frame.previous"),
        (&mut layout.frame_code, "interpreter_frame.executable"),
        (&mut layout.frame_instr, "interpreter_frame.instr_ptr"),
        (&mut layout.frame_owner, "interpreter_frame.owner"),
        (&mut layout.ob_type, "pyobject.ob_type"),
        (&mut layout.ob_size, "bytes_object.ob_size"),
        (&mut layout.code_filename, "code_object.filename"),
        (&mut layout.code_qualname, "code_object.qualname"),
        (&mut layout.code_linetable, "code_object.linetable"),
        (&mut layout.code_firstlineno, "code_object.firstlineno"),
        (&mut layout.code_code_adaptive, "code_object.co_code_adaptive"),
        (&mut layout.bytes_sval, "bytes_object.ob_sval"),
        (&mut layout.unicode_compact_size, "unicode_object.compactunicodeobject_size"),
    ];
    for (place, field) in fields {
        take(place, field, published.get(field))?;
    }
    take(&mut layout.unicode_state, "unicode_object.state", published.get("unicode_object.state"))?;
    take(&mut layout.unicode_length, "unicode_object.length", published.get("unicode_object.length"))?;
    let ascii = published.get("unicode_object.asciiobject_size");
    take(&mut layout.unicode_ascii_size, "unicode_object.asciiobject_size", ascii)?;
    // Published as 0 where a build has a GIL and no per-thread bytecode.
    if published.free_threaded {
        let index = published.get("interpreter_frame.tlbc_index");
        take(&mut layout.frame_tlbc_index, "interpreter_frame.tlbc_index", index)?;
        take(&mut layout.code_tlbc, "code_object.co_tlbc", published.get("code_object.co_tlbc"))?;
    }
    // Published in two steps: a structure's place in the interpreter, and a field's place in it.
    let gc = published.get("interpreter_state.gc");
    for (place, field) in
        [(&mut layout.interp_gc_collecting, "gc.collecting"), (&mut layout.interp_gc_frame, "gc.frame")]
    {
        take(place, field, published.get(field).zip(gc).map(|(field, gc)| gc.saturating_add(field)))?;
    }
    // And these the other way round.
    let gil = published.get("interpreter_state.gil_runtime_state");
    for (place, field) in [
        (&mut layout.gil_locked, "interpreter_state.gil_runtime_state_locked"),
        (&mut layout.gil_last_holder, "interpreter_state.gil_runtime_state_holder"),
    ] {
        take(place, field, published.get(field).zip(gil).map(|(field, gil)| field.wrapping_sub(gil)))?;
    }
    Ok(())
}

/// Takes one published number.
fn take(place: &mut u32, field: &'static str, published: Option<u64>) -> Result<(), LayoutError> {
    let Some(published) = published else { return Ok(()) };
    if Layout::present(*place) && u64::from(*place) != published {
        return Err(LayoutError::TableDiffers { field, published, table: u64::from(*place) });
    }
    *place = u32::try_from(published).map_err(|_| LayoutError::Odd { field, value: published })?;
    Ok(())
}

/// The sizes that the interpreter publishes. Frames and code objects must have those of the headers, the larger
/// structures may have grown since.
fn published_sizes(published: &DebugOffsets, table: &Sizes) -> Result<Sizes, LayoutError> {
    let get = |field: &'static str| published.get(field).ok_or(LayoutError::Missing(field));
    let sizes = Sizes {
        runtime: get("runtime_state.size")?,
        interp: get("interpreter_state.size")?,
        tstate: get("thread_state.size")?,
        frame: get("interpreter_frame.size")?,
        code: get("code_object.size")?,
    };
    for (structure, found, expected) in [("frame", sizes.frame, table.frame), ("PyCodeObject", sizes.code, table.code)]
    {
        if found != expected {
            return Err(LayoutError::OtherSize { structure, found, expected });
        }
    }
    Ok(sizes)
}
