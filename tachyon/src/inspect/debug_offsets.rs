//! `_Py_DebugOffsets`: what an interpreter from 3.13 on publishes of its own layout, at the start of `_PyRuntime`.
//!
//! Read from the ELF file's own initial data, so that it is known at the moment a library is mapped, before any of its
//! code has run. The structure differs between minor versions and is stable within one (its own comment says so).
//! Which numbers to believe is `validate`'s to say.

use super::layout::LayoutError;

/// `_Py_Debug_Cookie`.
const COOKIE: &[u8; 8] = b"xdebugpy";

/// Cookie, version and `free_threaded`, before the first offset.
const HEAD_BYTES: usize = 24;

/// Bytes to read at `_PyRuntime`: 3.15's structure has 888.
pub(super) const MAX_BYTES: usize = 1024;

/// What one interpreter publishes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct DebugOffsets {
    /// `PY_VERSION_HEX`.
    pub(super) version_hex: u32,
    /// Built with `Py_GIL_DISABLED`.
    pub(super) free_threaded: bool,
    /// Names of the words that follow, in order; empty for a version whose structure is not known.
    names: &'static [&'static str],
    words: Vec<u64>,
}

impl DebugOffsets {
    /// Decodes the first bytes of `_PyRuntime`. `None` when the cookie is missing (3.12 and before).
    ///
    /// # Errors
    /// When the head makes no sense or the bytes end early.
    pub(super) fn decode(bytes: &[u8]) -> Result<Option<Self>, LayoutError> {
        if bytes.get(..COOKIE.len()) != Some(COOKIE) {
            return Ok(None);
        }
        let word = |index: usize| {
            let start = index.checked_mul(8)?.checked_add(COOKIE.len())?;
            Some(u64::from_le_bytes(*bytes.get(start..)?.first_chunk()?))
        };
        let odd = |field: &'static str, value: Option<u64>| LayoutError::Odd { field, value: value.unwrap_or(0) };
        let version = word(0).and_then(|version| u32::try_from(version).ok());
        let version_hex = version.filter(|hex| hex >> 24 == 3).ok_or_else(|| odd("version", word(0)))?;
        let free_threaded = match word(1) {
            Some(0) => false,
            Some(1) => true,
            other => return Err(odd("free_threaded", other)),
        };
        let names = names(version_hex >> 16 & 0xff);
        let words = (0..names.len()).map(|index| word(index + HEAD_BYTES / 8 - 1)).collect::<Option<Vec<_>>>();
        let words = words.ok_or_else(|| odd("cookie", None))?;
        Ok(Some(Self { version_hex, free_threaded, names, words }))
    }

    /// The word of this name, e.g. `thread_state.next`; `None` when this version does not publish it.
    pub(super) fn get(&self, name: &str) -> Option<u64> {
        let index = self.names.iter().position(|&of| of == name)?;
        self.words.get(index).copied()
    }
}

/// Bytes of a version's structure.
#[cfg(test)]
pub(super) fn published_bytes(version_hex: u32) -> usize {
    HEAD_BYTES + names(version_hex >> 16 & 0xff).len() * 8
}

/// The words of a minor version's structure, in order.
fn names(minor: u32) -> &'static [&'static str] {
    match minor {
        13 => FIELDS_3_13,
        14 => FIELDS_3_14,
        15 => FIELDS_3_15,
        _ => &[],
    }
}

/// CPython v3.13.0, `Include/internal/pycore_runtime.h` (the same in 3.13.5 and 3.13.18).
const FIELDS_3_13: &[&str] = &[
    "runtime_state.size",
    "runtime_state.finalizing",
    "runtime_state.interpreters_head",
    "interpreter_state.size",
    "interpreter_state.id",
    "interpreter_state.next",
    "interpreter_state.threads_head",
    "interpreter_state.gc",
    "interpreter_state.imports_modules",
    "interpreter_state.sysdict",
    "interpreter_state.builtins",
    "interpreter_state.ceval_gil",
    "interpreter_state.gil_runtime_state",
    "interpreter_state.gil_runtime_state_enabled",
    "interpreter_state.gil_runtime_state_locked",
    "interpreter_state.gil_runtime_state_holder",
    "thread_state.size",
    "thread_state.prev",
    "thread_state.next",
    "thread_state.interp",
    "thread_state.current_frame",
    "thread_state.thread_id",
    "thread_state.native_thread_id",
    "thread_state.datastack_chunk",
    "thread_state.status",
    "interpreter_frame.size",
    "interpreter_frame.previous",
    "interpreter_frame.executable",
    "interpreter_frame.instr_ptr",
    "interpreter_frame.localsplus",
    "interpreter_frame.owner",
    "code_object.size",
    "code_object.filename",
    "code_object.name",
    "code_object.qualname",
    "code_object.linetable",
    "code_object.firstlineno",
    "code_object.argcount",
    "code_object.localsplusnames",
    "code_object.localspluskinds",
    "code_object.co_code_adaptive",
    "pyobject.size",
    "pyobject.ob_type",
    "type_object.size",
    "type_object.tp_name",
    "type_object.tp_repr",
    "type_object.tp_flags",
    "tuple_object.size",
    "tuple_object.ob_item",
    "tuple_object.ob_size",
    "list_object.size",
    "list_object.ob_item",
    "list_object.ob_size",
    "dict_object.size",
    "dict_object.ma_keys",
    "dict_object.ma_values",
    "float_object.size",
    "float_object.ob_fval",
    "long_object.size",
    "long_object.lv_tag",
    "long_object.ob_digit",
    "bytes_object.size",
    "bytes_object.ob_size",
    "bytes_object.ob_sval",
    "unicode_object.size",
    "unicode_object.state",
    "unicode_object.length",
    "unicode_object.asciiobject_size",
    "gc.size",
    "gc.collecting",
];

/// CPython v3.14.10, `Include/internal/pycore_debug_offsets.h`.
const FIELDS_3_14: &[&str] = &[
    "runtime_state.size",
    "runtime_state.finalizing",
    "runtime_state.interpreters_head",
    "interpreter_state.size",
    "interpreter_state.id",
    "interpreter_state.next",
    "interpreter_state.threads_head",
    "interpreter_state.threads_main",
    "interpreter_state.gc",
    "interpreter_state.imports_modules",
    "interpreter_state.sysdict",
    "interpreter_state.builtins",
    "interpreter_state.ceval_gil",
    "interpreter_state.gil_runtime_state",
    "interpreter_state.gil_runtime_state_enabled",
    "interpreter_state.gil_runtime_state_locked",
    "interpreter_state.gil_runtime_state_holder",
    "interpreter_state.code_object_generation",
    "interpreter_state.tlbc_generation",
    "thread_state.size",
    "thread_state.prev",
    "thread_state.next",
    "thread_state.interp",
    "thread_state.current_frame",
    "thread_state.thread_id",
    "thread_state.native_thread_id",
    "thread_state.datastack_chunk",
    "thread_state.status",
    "interpreter_frame.size",
    "interpreter_frame.previous",
    "interpreter_frame.executable",
    "interpreter_frame.instr_ptr",
    "interpreter_frame.localsplus",
    "interpreter_frame.owner",
    "interpreter_frame.stackpointer",
    "interpreter_frame.tlbc_index",
    "code_object.size",
    "code_object.filename",
    "code_object.name",
    "code_object.qualname",
    "code_object.linetable",
    "code_object.firstlineno",
    "code_object.argcount",
    "code_object.localsplusnames",
    "code_object.localspluskinds",
    "code_object.co_code_adaptive",
    "code_object.co_tlbc",
    "pyobject.size",
    "pyobject.ob_type",
    "type_object.size",
    "type_object.tp_name",
    "type_object.tp_repr",
    "type_object.tp_flags",
    "tuple_object.size",
    "tuple_object.ob_item",
    "tuple_object.ob_size",
    "list_object.size",
    "list_object.ob_item",
    "list_object.ob_size",
    "set_object.size",
    "set_object.used",
    "set_object.table",
    "set_object.mask",
    "dict_object.size",
    "dict_object.ma_keys",
    "dict_object.ma_values",
    "float_object.size",
    "float_object.ob_fval",
    "long_object.size",
    "long_object.lv_tag",
    "long_object.ob_digit",
    "bytes_object.size",
    "bytes_object.ob_size",
    "bytes_object.ob_sval",
    "unicode_object.size",
    "unicode_object.state",
    "unicode_object.length",
    "unicode_object.asciiobject_size",
    "gc.size",
    "gc.collecting",
    "gen_object.size",
    "gen_object.gi_name",
    "gen_object.gi_iframe",
    "gen_object.gi_frame_state",
    "llist_node.next",
    "llist_node.prev",
    "debugger_support.eval_breaker",
    "debugger_support.remote_debugger_support",
    "debugger_support.remote_debugging_enabled",
    "debugger_support.debugger_pending_call",
    "debugger_support.debugger_script_path",
    "debugger_support.debugger_script_path_size",
];

/// CPython v3.15.2, `Include/internal/pycore_debug_offsets.h`.
const FIELDS_3_15: &[&str] = &[
    "runtime_state.size",
    "runtime_state.finalizing",
    "runtime_state.interpreters_head",
    "interpreter_state.size",
    "interpreter_state.id",
    "interpreter_state.next",
    "interpreter_state.threads_head",
    "interpreter_state.threads_main",
    "interpreter_state.gc",
    "interpreter_state.imports_modules",
    "interpreter_state.sysdict",
    "interpreter_state.builtins",
    "interpreter_state.ceval_gil",
    "interpreter_state.gil_runtime_state",
    "interpreter_state.gil_runtime_state_enabled",
    "interpreter_state.gil_runtime_state_locked",
    "interpreter_state.gil_runtime_state_holder",
    "interpreter_state.code_object_generation",
    "interpreter_state.tlbc_generation",
    "thread_state.size",
    "thread_state.prev",
    "thread_state.next",
    "thread_state.interp",
    "thread_state.current_frame",
    "thread_state.base_frame",
    "thread_state.last_profiled_frame",
    "thread_state.last_profiled_frame_seq",
    "thread_state.thread_id",
    "thread_state.native_thread_id",
    "thread_state.datastack_chunk",
    "thread_state.status",
    "thread_state.holds_gil",
    "thread_state.gil_requested",
    "thread_state.current_exception",
    "thread_state.exc_state",
    "err_stackitem.exc_value",
    "interpreter_frame.size",
    "interpreter_frame.previous",
    "interpreter_frame.executable",
    "interpreter_frame.instr_ptr",
    "interpreter_frame.localsplus",
    "interpreter_frame.owner",
    "interpreter_frame.stackpointer",
    "interpreter_frame.tlbc_index",
    "code_object.size",
    "code_object.filename",
    "code_object.name",
    "code_object.qualname",
    "code_object.linetable",
    "code_object.firstlineno",
    "code_object.argcount",
    "code_object.localsplusnames",
    "code_object.localspluskinds",
    "code_object.co_code_adaptive",
    "code_object.co_tlbc",
    "pyobject.size",
    "pyobject.ob_type",
    "type_object.size",
    "type_object.tp_name",
    "type_object.tp_repr",
    "type_object.tp_flags",
    "type_object.tp_basicsize",
    "type_object.tp_dictoffset",
    "heap_type_object.size",
    "heap_type_object.ht_cached_keys",
    "tuple_object.size",
    "tuple_object.ob_item",
    "tuple_object.ob_size",
    "list_object.size",
    "list_object.ob_item",
    "list_object.ob_size",
    "set_object.size",
    "set_object.used",
    "set_object.table",
    "set_object.mask",
    "dict_object.size",
    "dict_object.ma_keys",
    "dict_object.ma_values",
    "float_object.size",
    "float_object.ob_fval",
    "long_object.size",
    "long_object.lv_tag",
    "long_object.ob_digit",
    "bytes_object.size",
    "bytes_object.ob_size",
    "bytes_object.ob_sval",
    "unicode_object.size",
    "unicode_object.state",
    "unicode_object.length",
    "unicode_object.asciiobject_size",
    "unicode_object.compactunicodeobject_size",
    "gc.size",
    "gc.collecting",
    "gc.frame",
    "gc.generation_stats_size",
    "gc.generation_stats",
    "gen_object.size",
    "gen_object.gi_name",
    "gen_object.gi_iframe",
    "gen_object.gi_frame_state",
    "llist_node.next",
    "llist_node.prev",
    "debugger_support.eval_breaker",
    "debugger_support.remote_debugger_support",
    "debugger_support.remote_debugging_enabled",
    "debugger_support.debugger_pending_call",
    "debugger_support.debugger_script_path",
    "debugger_support.debugger_script_path_size",
];

#[cfg(test)]
mod tests {
    use super::*;

    fn published(minor: u64, words: u64) -> Vec<u8> {
        let head = [u64::from_le_bytes(*COOKIE), 0x0300_00f0 | minor << 16, 0];
        head.into_iter().chain(1..=words).flat_map(u64::to_le_bytes).collect()
    }

    #[test]
    fn words_have_their_names() {
        // Word counts as the compilers of those versions lay the structures out: sizeof / 8 - 3.
        for (minor, count) in [(13, FIELDS_3_13.len()), (14, FIELDS_3_14.len()), (15, FIELDS_3_15.len())] {
            let offsets = DebugOffsets::decode(&published(minor, count as u64)).expect("good").expect("has the cookie");
            assert_eq!(offsets.get("runtime_state.size"), Some(1));
            assert_eq!(offsets.get("runtime_state.interpreters_head"), Some(3));
            assert_eq!(offsets.get("interpreter_state.id"), Some(5));
            assert_eq!(offsets.get("no.such"), None);
            assert!(HEAD_BYTES + count * 8 <= MAX_BYTES);
        }
    }

    #[test]
    fn oddities_are_refused() {
        assert_eq!(DebugOffsets::decode(b"").expect("no cookie"), None);
        assert_eq!(DebugOffsets::decode(&[0; 64]).expect("no cookie"), None);
        let good = published(13, 100);
        for len in 8..HEAD_BYTES + FIELDS_3_13.len() * 8 {
            assert!(DebugOffsets::decode(&good[..len]).is_err(), "cut to {len}");
        }
        let mut odd = good.clone();
        odd[16] = 2;
        assert!(DebugOffsets::decode(&odd).is_err(), "free_threaded");
        let mut odd = good;
        odd[11] = 4;
        assert!(DebugOffsets::decode(&odd).is_err(), "major version");
        let newer = DebugOffsets::decode(&published(16, 4)).expect("good").expect("has the cookie");
        assert_eq!((newer.version_hex, newer.get("runtime_state.size")), (0x0310_00f0, None));
    }
}
