//! Looks at a live runtime through a layout: does it look like an initialised CPython?

use std::time::Duration;
use tachyon_common::layout::Layout;

use super::Interpreter;
use crate::remote::{RemoteError, RemoteProcess};
use crate::types::RemoteAddr;

/// Interpreters and thread states looked at: enough to hit a wrong `next`.
const MAX_LISTED: usize = 64;

/// Number of tries: a thread state may be linked or freed just while it is read.
const TRIES: u32 = 10;
/// Time for what is in the making to be finished.
const BETWEEN: Duration = Duration::from_micros(200);

/// Largest interpreter id that is believed.
const MAX_INTERPRETER_ID: u64 = 1 << 32;

/// Why a live runtime does not look as its layout says.
#[derive(Debug, thiserror::Error)]
pub enum SelfTestError {
    /// The runtime has no interpreter: not initialised yet, or finalised.
    #[error("the runtime is not initialised")]
    NotInitialized,
    /// A structure cannot be read where the layout says.
    #[error("cannot follow {field}: {source}")]
    Unreadable {
        /// The field that led there.
        field: &'static str,
        /// What went wrong.
        source: RemoteError,
    },
    /// A field has an impossible value.
    #[error("{field} is {value:#x}")]
    Implausible {
        /// The field.
        field: &'static str,
        /// What it holds.
        value: u64,
    },
}

impl SelfTestError {
    /// Whether a list that changed during the read may be the cause.
    fn may_pass(&self) -> bool {
        match self {
            Self::NotInitialized => false,
            Self::Implausible { .. } => true,
            // What did not arrive is not waited for again.
            Self::Unreadable { source, .. } => !source.is_gone() && !source.is_not_waited_for(),
        }
    }
}

/// Reads the runtime's interpreters and the first one's threads, and checks what is known about them: ids, the way
/// back from a thread to its interpreter, thread ids, the type of code objects.
///
/// The target keeps running, so a list can change during the read: what fails is tried again. A wrong layout fails every
/// time.
///
/// # Errors
/// [`SelfTestError::NotInitialized`] says nothing about the layout; the others are evidence against it.
pub fn self_test(process: &RemoteProcess, interpreter: &Interpreter) -> Result<(), SelfTestError> {
    let mut tested = test_once(process, interpreter);
    for _ in 1..TRIES {
        if !tested.as_ref().is_err_and(SelfTestError::may_pass) {
            break;
        }
        std::thread::sleep(BETWEEN);
        tested = test_once(process, interpreter);
    }
    tested
}

fn test_once(process: &RemoteProcess, interpreter: &Interpreter) -> Result<(), SelfTestError> {
    let layout = &interpreter.layout;
    let read = Reader { process };
    let head = read.pointer("interpreters.head", interpreter.runtime, layout.runtime_interpreters_head)?;
    if head == 0 {
        return Err(SelfTestError::NotInitialized);
    }
    let next_id = read.word("interpreters.next_id", interpreter.runtime, layout.runtime_next_interp_id)?;
    plausible("interpreters.next_id", next_id, (1..=MAX_INTERPRETER_ID).contains(&next_id))?;
    // New interpreters are put first; the main one, whose id is 0, is last.
    let mut interp = head;
    let mut main = None;
    for _ in 0..MAX_LISTED {
        let id = read.word("interp.id", interp, layout.interp_id)?;
        plausible("interp.id", id, id < next_id)?;
        let next = read.pointer("interp.next", interp, layout.interp_next)?;
        if next == 0 {
            main = Some((interp, id));
            break;
        }
        interp = next;
    }
    if let Some((_, id)) = main {
        plausible("id of the main interpreter", id, id == 0)?;
    }
    let (interp, _) = main.unwrap_or((head, 0));
    let mut tstate = read.pointer("interp.threads.head", interp, layout.interp_threads_head)?;
    if tstate == 0 {
        return Err(SelfTestError::NotInitialized);
    }
    for _ in 0..MAX_LISTED {
        let back = read.pointer("tstate.interp", tstate, layout.tstate_interp)?;
        plausible("tstate.interp", back, back == interp)?;
        let id = read.word("tstate.thread_id", tstate, layout.tstate_thread_id)?;
        plausible("tstate.thread_id", id, id.is_multiple_of(8) || id == 0)?;
        if Layout::present(layout.tstate_native_thread_id) {
            let id = read.word("tstate.native_thread_id", tstate, layout.tstate_native_thread_id)?;
            // PID_MAX_LIMIT of 64-bit kernels (`include/linux/threads.h`).
            plausible("tstate.native_thread_id", id, id <= 4 << 20)?;
        }
        tstate = read.pointer("tstate.next", tstate, layout.tstate_next)?;
        if tstate == 0 {
            break;
        }
    }
    if interpreter.code_type != 0 {
        // The type of a type is `type`, whose type is itself.
        let kind = read.pointer("PyCode_Type.ob_type", interpreter.code_type, layout.ob_type)?;
        let kind_of_kind = read.pointer("PyType_Type.ob_type", kind, layout.ob_type)?;
        plausible("PyType_Type.ob_type", kind_of_kind, kind_of_kind == kind)?;
    }
    Ok(())
}

struct Reader<'a> {
    process: &'a RemoteProcess,
}

impl Reader<'_> {
    fn word(&self, field: &'static str, base: u64, offset: u32) -> Result<u64, SelfTestError> {
        let addr = RemoteAddr(base.wrapping_add(u64::from(offset)));
        self.process.read_u64(addr).map_err(|source| SelfTestError::Unreadable { field, source })
    }

    fn pointer(&self, field: &'static str, base: u64, offset: u32) -> Result<u64, SelfTestError> {
        let value = self.word(field, base, offset)?;
        plausible(field, value, value.is_multiple_of(8))?;
        Ok(value)
    }
}

fn plausible(field: &'static str, value: u64, good: bool) -> Result<(), SelfTestError> {
    if good { Ok(()) } else { Err(SelfTestError::Implausible { field, value }) }
}
