//! Where the package greenlet (2.0 and later) keeps the state of a greenlet that is switched away.
//!
//! It publishes nothing. `PyGreenlet` is in its public header; what it points to is C++: `class Greenlet` and its members
//! (`src/greenlet/TGreenlet.hpp`, greenlet 2.0.2, 3.1.1, 3.2.4, 3.5.6). Up to the frame these are the same in all versions except for
//! one word (`_self`), which can be recognised: it is the greenlet's own address. What follows the frame differs, and is searched.

use super::{AwaitLayout, Collector, Interpreter};
use crate::remote::{MappedPath, Mapping};

/// Where fields are, in bytes from the start of the structure named.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GreenletLayout {
    /// The lists that contain all greenlets.
    pub collector: Collector,
    /// Where fields of types are.
    pub awaits: AwaitLayout,
    /// `PyTypeObject.tp_base`.
    pub type_base: u64,
    /// `PyGreenlet.dict`.
    pub dict: u64,
    /// `PyGreenlet.pimpl`: the `Greenlet`.
    pub implementation: u64,
    /// `Greenlet.stack_state` where `_self` precedes it; one word less without.
    pub stack_state: u64,
    /// `PyFrameObject.f_frame` (3.11+).
    pub frame_interp: Option<u64>,
}

/// From `PyTypeObject.tp_flags` to `.tp_base`: both are part of the layout that extensions are compiled against.
const FROM_FLAGS_TO_BASE: u64 = 88;

/// Name of greenlet's extension module, without the rest of its file name: it is imported by this name.
const MODULE: &[u8] = b"_greenlet.";

impl GreenletLayout {
    /// That of a process; `None` if it has not loaded greenlet, or has no lists that contain greenlets.
    #[must_use]
    pub fn of(interpreter: &Interpreter, maps: &[Mapping]) -> Option<Self> {
        Self::is_loaded(maps).then(|| Self::on(interpreter)).flatten()
    }

    /// Whether a process has loaded greenlet.
    #[must_use]
    pub fn is_loaded(maps: &[Mapping]) -> bool {
        maps.iter().any(is_module)
    }

    fn on(interpreter: &Interpreter) -> Option<Self> {
        let (collector, awaits) = (interpreter.collector?, interpreter.awaits?);
        // An object header with more in it means a debug build.
        let header = Some(u64::from(interpreter.layout.ob_type) + 8).filter(|&header| header == 16)?;
        let in_objects = interpreter.layout.minor_version() < (3, 11);
        // `_PyErr_StackItem` lost two of its four words in 3.11.
        let handled_exception = if in_objects { 32 } else { 16 };
        Some(Self {
            collector,
            awaits,
            type_base: awaits.type_flags + FROM_FLAGS_TO_BASE,
            // The weak references come first.
            dict: header + 8,
            implementation: header + 16,
            // The table of virtual functions, `_self`, `exception_state` and `switch_args`.
            stack_state: 8 + 8 + (8 + handled_exception) + 16,
            frame_interp: (!in_objects).then_some(header + 8),
        })
    }
}

fn is_module(mapping: &Mapping) -> bool {
    let MappedPath::File { path, .. } = &mapping.path else { return false };
    let name = path.rsplit(|&byte| byte == b'/').next();
    mapping.executable && name.is_some_and(|name| name.starts_with(MODULE))
}
