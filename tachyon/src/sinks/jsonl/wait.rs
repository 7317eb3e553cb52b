//! What a line says about a wait, and how the wait is stored in the temporary file until names are known.

use crate::profile::{FrameId, Holder, Profile, ThreadId, Wait};
use crate::sinks::label::Label;
use crate::sinks::stacks::StackId;
use crate::sinks::streams::{get, put};
use serde::Serialize;
use std::io;

/// What a thread waited for.
#[derive(Serialize)]
pub(super) struct Waiting<'a> {
    cause: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    syscall: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    futex: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    since_us: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    wait_us: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    queued_us: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    waker_tid: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    holder: Option<HolderPlace<'a>>,
}

/// Who held the GIL.
#[derive(Serialize)]
struct HolderPlace<'a> {
    tid: Option<u32>,
    function: &'a str,
    file: Option<&'a str>,
    line: Option<i32>,
}

impl<'a> Waiting<'a> {
    pub fn new(profile: &'a Profile, cause: &'a str, wait: Option<&Wait<'_>>) -> Self {
        Self {
            cause,
            syscall: wait.and_then(Wait::syscall_name),
            futex: wait.and_then(|wait| wait.futex).map(|address| format!("{address:#x}")),
            since_us: wait.map(|wait| wait.since_us),
            wait_us: wait.map(|wait| wait.wait_us),
            queued_us: wait.and_then(|wait| wait.queued_us),
            waker_tid: wait.and_then(|wait| wait.waker),
            holder: wait.and_then(|wait| wait.holder).map(|holder| HolderPlace::new(profile, holder)),
        }
    }
}

impl<'a> HolderPlace<'a> {
    fn new(profile: &'a Profile, Holder { tid, frame }: Holder) -> Self {
        let frame = profile.frames.get(frame);
        let label = Label::of(profile, frame);
        Self {
            tid,
            function: label.function,
            file: (!label.filename.is_empty()).then_some(label.filename),
            line: (frame.lineno != -1).then_some(frame.lineno),
        }
    }
}

/// Puts a wait after its sample, with the waker's thread and stack. Its weight comes first; it is 0 after a sample without
/// a wait.
pub(super) fn put_wait(out: &mut Vec<u8>, wait: &Wait<'_>, waker: Option<(ThreadId, StackId)>) {
    put(out, wait.weight);
    if wait.weight == 0 {
        return;
    }
    // An optional number is stored plus one, or as 0 if absent.
    let mut put_option = |number: Option<u64>| put(out, number.map_or(0, |number| number.saturating_add(1)));
    for number in [Some(wait.since_us), Some(wait.wait_us), wait.syscall.map(u64::from), wait.futex, wait.queued_us] {
        put_option(number);
    }
    put_option(wait.waker.map(u64::from));
    put_option(waker.map(|(thread, _)| u64::from(thread.0)));
    put_option(waker.map(|(_, stack)| u64::from(stack.0)));
    put_option(wait.holder.map(|holder| u64::from(holder.frame.0)));
    put_option(wait.holder.and_then(|holder| holder.tid).map(u64::from));
}

/// The same as read back.
#[derive(Clone, Copy, Debug)]
pub(super) struct Spooled {
    pub wait: Wait<'static>,
    /// The waker's thread and stack.
    pub waker: Option<(ThreadId, StackId)>,
}

/// Reads it back.
pub(super) fn get_wait(bytes: &mut &[u8]) -> io::Result<Option<Spooled>> {
    let weight = get(bytes)?;
    if weight == 0 {
        return Ok(None);
    }
    let mut number = || get(bytes).map(|number| number.checked_sub(1));
    let (since_us, wait_us) = (number()?.unwrap_or(0), number()?.unwrap_or(0));
    let small = |number: Option<u64>| number.and_then(|number| u32::try_from(number).ok());
    let (syscall, futex, queued_us, waker) = (small(number()?), number()?, number()?, small(number()?));
    let (waker_thread, waker_stack) = (small(number()?).map(ThreadId), small(number()?).map(StackId));
    let (holder, holder_tid) = (small(number()?).map(FrameId), small(number()?));
    let holder = holder.map(|frame| Holder { tid: holder_tid, frame });
    let wait = Wait { weight, since_us, wait_us, syscall, futex, queued_us, waker, waker_stack: None, holder };
    Ok(Some(Spooled { wait, waker: waker_thread.zip(waker_stack) }))
}
