//! What a line says about whose work it was.

use super::json;
use crate::profile::{FrameId, Profile, WorkId, WorkOf};
use serde::Serialize;
use std::io::{self, Write};

/// An asyncio task, or a greenlet.
#[derive(Serialize)]
struct Task<'a> {
    name: &'a str,
    /// The value of `id(task)`; unknown for a task read from a file.
    #[serde(skip_serializing_if = "Option::is_none")]
    id: Option<u64>,
    /// Names of those that await it, or of its parents, nearest first.
    chain: Vec<&'a str>,
}

/// Writes task and span of a sample, as far as they are known. The frames of tasks are the same as in other formats.
pub(super) fn write(
    out: &mut impl Write,
    profile: &Profile,
    work: Option<WorkId>,
    stack: &[FrameId],
) -> io::Result<()> {
    let work = work.map(|id| profile.works.get(id));
    let in_stack = || {
        stack.iter().filter_map(|&frame| {
            let frame = profile.frames.get(frame);
            WorkOf::of(profile.strings.get(frame.filename), profile.strings.get(frame.function))
        })
    };
    // Greenlets in which a task runs code are none of those that await it.
    let mut rest = in_stack().skip(WorkOf::before_whose(in_stack())).map(WorkOf::name);
    let nearest = rest.next();
    let own = work.and_then(|work| work.task);
    let name = own.map(|task| profile.strings.get(task.name)).or(nearest);
    if let Some(name) = name {
        let task = Task { name, id: own.map(|task| task.id), chain: rest.collect() };
        write!(out, "\"task\":{},", json(&task))?;
    }
    if let Some((trace, span)) = work.and_then(crate::profile::Work::span_ids) {
        write!(out, "\"trace_id\":\"{trace}\",\"span_id\":\"{span}\",")?;
    }
    Ok(())
}
