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
    names: Vec<&'static str>,
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

/// The words of a minor version's structure, in order; none where it is not known.
fn names(minor: u32) -> Vec<&'static str> {
    if !(13..=15).contains(&minor) {
        return Vec::new();
    }
    FIELDS.iter().filter(|(_, since)| *since <= minor).map(|(name, _)| *name).collect()
}

/// Every word with the minor version that first has it. Each version has put new words between the old ones and taken none
/// away: `Include/internal/pycore_runtime.h` of v3.13.0 (the same in 3.13.5 and 3.13.18),
/// `Include/internal/pycore_debug_offsets.h` of v3.14.10 and v3.15.2.
const FIELDS: &[(&str, u32)] = &[
    ("runtime_state.size", 13),
    ("runtime_state.finalizing", 13),
    ("runtime_state.interpreters_head", 13),
    ("interpreter_state.size", 13),
    ("interpreter_state.id", 13),
    ("interpreter_state.next", 13),
    ("interpreter_state.threads_head", 13),
    ("interpreter_state.threads_main", 14),
    ("interpreter_state.gc", 13),
    ("interpreter_state.imports_modules", 13),
    ("interpreter_state.sysdict", 13),
    ("interpreter_state.builtins", 13),
    ("interpreter_state.ceval_gil", 13),
    ("interpreter_state.gil_runtime_state", 13),
    ("interpreter_state.gil_runtime_state_enabled", 13),
    ("interpreter_state.gil_runtime_state_locked", 13),
    ("interpreter_state.gil_runtime_state_holder", 13),
    ("interpreter_state.code_object_generation", 14),
    ("interpreter_state.tlbc_generation", 14),
    ("thread_state.size", 13),
    ("thread_state.prev", 13),
    ("thread_state.next", 13),
    ("thread_state.interp", 13),
    ("thread_state.current_frame", 13),
    ("thread_state.base_frame", 15),
    ("thread_state.last_profiled_frame", 15),
    ("thread_state.last_profiled_frame_seq", 15),
    ("thread_state.thread_id", 13),
    ("thread_state.native_thread_id", 13),
    ("thread_state.datastack_chunk", 13),
    ("thread_state.status", 13),
    ("thread_state.holds_gil", 15),
    ("thread_state.gil_requested", 15),
    ("thread_state.current_exception", 15),
    ("thread_state.exc_state", 15),
    ("err_stackitem.exc_value", 15),
    ("interpreter_frame.size", 13),
    ("interpreter_frame.previous", 13),
    ("interpreter_frame.executable", 13),
    ("interpreter_frame.instr_ptr", 13),
    ("interpreter_frame.localsplus", 13),
    ("interpreter_frame.owner", 13),
    ("interpreter_frame.stackpointer", 14),
    ("interpreter_frame.tlbc_index", 14),
    ("code_object.size", 13),
    ("code_object.filename", 13),
    ("code_object.name", 13),
    ("code_object.qualname", 13),
    ("code_object.linetable", 13),
    ("code_object.firstlineno", 13),
    ("code_object.argcount", 13),
    ("code_object.localsplusnames", 13),
    ("code_object.localspluskinds", 13),
    ("code_object.co_code_adaptive", 13),
    ("code_object.co_tlbc", 14),
    ("pyobject.size", 13),
    ("pyobject.ob_type", 13),
    ("type_object.size", 13),
    ("type_object.tp_name", 13),
    ("type_object.tp_repr", 13),
    ("type_object.tp_flags", 13),
    ("type_object.tp_basicsize", 15),
    ("type_object.tp_dictoffset", 15),
    ("heap_type_object.size", 15),
    ("heap_type_object.ht_cached_keys", 15),
    ("tuple_object.size", 13),
    ("tuple_object.ob_item", 13),
    ("tuple_object.ob_size", 13),
    ("list_object.size", 13),
    ("list_object.ob_item", 13),
    ("list_object.ob_size", 13),
    ("set_object.size", 14),
    ("set_object.used", 14),
    ("set_object.table", 14),
    ("set_object.mask", 14),
    ("dict_object.size", 13),
    ("dict_object.ma_keys", 13),
    ("dict_object.ma_values", 13),
    ("float_object.size", 13),
    ("float_object.ob_fval", 13),
    ("long_object.size", 13),
    ("long_object.lv_tag", 13),
    ("long_object.ob_digit", 13),
    ("bytes_object.size", 13),
    ("bytes_object.ob_size", 13),
    ("bytes_object.ob_sval", 13),
    ("unicode_object.size", 13),
    ("unicode_object.state", 13),
    ("unicode_object.length", 13),
    ("unicode_object.asciiobject_size", 13),
    ("unicode_object.compactunicodeobject_size", 15),
    ("gc.size", 13),
    ("gc.collecting", 13),
    ("gc.frame", 15),
    ("gc.generation_stats_size", 15),
    ("gc.generation_stats", 15),
    ("gen_object.size", 14),
    ("gen_object.gi_name", 14),
    ("gen_object.gi_iframe", 14),
    ("gen_object.gi_frame_state", 14),
    ("llist_node.next", 14),
    ("llist_node.prev", 14),
    ("debugger_support.eval_breaker", 14),
    ("debugger_support.remote_debugger_support", 14),
    ("debugger_support.remote_debugging_enabled", 14),
    ("debugger_support.debugger_pending_call", 14),
    ("debugger_support.debugger_script_path", 14),
    ("debugger_support.debugger_script_path_size", 14),
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
        for (minor, count) in [(13, 70), (14, 92), (15, 108)] {
            assert_eq!(names(minor as u32).len(), count);
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
        for len in 8..HEAD_BYTES + names(13).len() * 8 {
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
