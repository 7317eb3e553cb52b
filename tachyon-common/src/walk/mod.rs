//! The walk over a CPython process's memory: thread, frame chain, identity of code objects.
//!
//! One piece of code for three places: the BPF program (over `bpf_probe_read_user`), tests (over recorded memory)
//! and user space (over `process_vm_readv`). It trusts nothing that it reads: every loop is bounded, every buffer
//! access is masked or checked, and every early end has a
//! [`crate::stop::StopReason`]. Loops stop after a fixed number of steps and can be continued, because a BPF program must
//! end and may only tail-call on.

mod awaiting;
mod buffer;
mod code;
mod content;
mod current;
mod facts;
mod frames;
pub mod greenlet;
mod linked;
mod memory;
mod owner;
mod span;
mod task;
mod text;
mod thread;

pub use awaiting::Awaiting;
pub use buffer::{Buffer, CodeBuffer, FrameBuffer, InterpBuffer, SlotBuffer, ThreadBuffer};
pub use code::{CodeIdentity, Identified, code_identity, linetable_len, mix};
pub use content::{Content, TextHash, lacks};
pub use current::{CurrentTasks, MAX_CURRENT_LOOKS};
pub use facts::{ThreadFacts, thread_facts};
pub use frames::{FrameSink, FrameWalk, believable_stop, innermost_frame};
pub use greenlet::{GreenletWalk, MAX_NAME_LOOKS};
pub use linked::Link;
pub use memory::{Unreadable, UserMemory, read_u8, read_u32, read_u64};
pub use owner::{OwnStack, REFERRED_WORDS, StackScan, entered_here, read_slots, references, runs_here};
pub use span::{running_span, span_at, thread_variable};
pub use task::{TaskReader, running_task};
pub use text::{Text, text};
pub use thread::{
    Found, THREAD_POINTER_REACH, ThreadPointer, ThreadSearch, newest_interpreter, read_thread, verify_thread,
};
