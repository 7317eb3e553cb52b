//! Where the package greenlet (2.0 and later) keeps a thread's running greenlet, and the state of one that is switched away.
//!
//! It publishes nothing. `PyGreenlet` is in its public header; what it points to is C++: `class Greenlet` and its members
//! (`src/greenlet/TGreenlet.hpp`, greenlet 2.0.2, 3.1.1, 3.2.4, 3.5.6). Up to the frame these are the same in all versions except for
//! one word (`_self`), which can be recognised: it is the greenlet's own address. What follows the frame differs, and is searched.

use super::spans::Spans;
use super::{AwaitLayout, Collector, Interpreter, ObjectLayout};
use crate::remote::{MappedPath, Mapping, RemoteProcess};
use tachyon_common::layout::Layout;
use tachyon_common::whose::Greenlets;

/// Where fields are, in bytes from the start of the structure named.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GreenletLayout {
    /// The lists that contain all greenlets.
    pub collector: Collector,
    /// Where fields of types are.
    pub awaits: AwaitLayout,
    /// `PyTypeObject.tp_base`.
    pub type_base: u64,
    /// Where greenlet's own fields are.
    pub classes: GreenletClasses,
}

/// Where fields of greenlet's classes, and of frame objects, are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GreenletClasses {
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

/// Name of the variable that leads to a thread's greenlets (`src/greenlet/greenlet.cpp`), and where it is in the module's block: after the
/// byte that says whether the thread has been given its own (`__tls_guard`), so in all of greenlet's wheels from 2.0.2 to 3.5.6.
const THREAD_STATE: (&str, u64) = ("_ZL21g_thread_state_global", 8);

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
        let classes = GreenletClasses::of(&interpreter.layout)?;
        Some(Self { collector, awaits, type_base: awaits.type_flags + FROM_FLAGS_TO_BASE, classes })
    }
}

impl GreenletClasses {
    fn of(layout: &Layout) -> Option<Self> {
        // An object header with anything else in it means a debug build.
        let free_threaded = layout.has(tachyon_common::layout::flags::FREE_THREADED);
        let header = if free_threaded { 32 } else { 16 };
        let header = Some(header).filter(|&header| u64::from(layout.ob_type) + 8 == header)?;
        let in_objects = layout.minor_version() < (3, 11);
        // `_PyErr_StackItem` lost two of its four words in 3.11.
        let handled_exception = if in_objects { 32 } else { 16 };
        Some(Self {
            // The weak references come first.
            dict: header + 8,
            implementation: header + 16,
            // The table of virtual functions, `_self`, `exception_state` and `switch_args`.
            stack_state: 8 + 8 + (8 + handled_exception) + 16,
            frame_interp: (!in_objects).then_some(header + 8),
        })
    }
}

/// What the kernel side needs to read a thread's running greenlet; `None` if the process has not loaded greenlet, or that is not known.
#[must_use]
pub fn running_greenlets(
    process: &RemoteProcess,
    maps: &[Mapping],
    interpreter: &Interpreter,
    spans: &mut Spans,
) -> Option<Greenlets> {
    let (classes, awaits) = (GreenletClasses::of(&interpreter.layout)?, interpreter.awaits?);
    let state = spans.own_variable(process, maps, is_module, THREAD_STATE).ok()?;
    let objects = ObjectLayout::of_dictionaries(&interpreter.layout);
    let in_objects = |field: fn(&ObjectLayout) -> u64| u32::try_from(objects.map_or(0, field)).ok();
    Some(Greenlets {
        state,
        dict: u32::try_from(classes.dict).ok()?,
        implementation: u32::try_from(classes.implementation).ok()?,
        stack_state: u32::try_from(classes.stack_state).ok()?,
        frame_interp: u32::try_from(classes.frame_interp.unwrap_or(0)).ok()?,
        type_name: u32::try_from(awaits.type_name).ok()?,
        dict_used: in_objects(|objects| objects.dict_used)?,
        keys_nentries: in_objects(|objects| objects.keys_nentries)?,
        keys_indices: in_objects(|objects| objects.keys_indices)?,
        values_start: in_objects(|objects| objects.values_start)?,
        _pad: 0,
    })
}

fn is_module(mapping: &Mapping) -> bool {
    let MappedPath::File { path, .. } = &mapping.path else { return false };
    let name = path.rsplit(|&byte| byte == b'/').next();
    mapping.executable && name.is_some_and(|name| name.starts_with(MODULE))
}
