//! Where a target waits that was hardly ever on a CPU: its main thread's innermost frame, read once from outside.

use super::follow::lock;
use super::registry::{ProcessInfo, Registry};
use super::request::Targets;
use crate::inspect::{self, ElfCache};
use crate::remote::RemoteProcess;
use crate::snapshot::{self, Wanted};
use std::path::Path;
use std::sync::Mutex;
use std::time::Duration;

/// Short, because the recording has ended and its account waits for this.
const TIME_LIMIT: Duration = Duration::from_secs(1);

/// From this share of the time on nobody asks where a target waits: an account tells it below a fifth of that. Finding it out would
/// take a tenth of the CPU time that a short recording takes.
const RAN: f64 = 0.05;

/// `file:line function` of the first target's main thread; `None` if there is no single target, it cannot be read, or it has run for
/// much of the time since the recording began, `elapsed` ago.
pub(super) fn place(targets: &Targets, registry: &Mutex<Registry>, elapsed: Duration) -> Option<String> {
    let Targets::Pids(pids) = targets else { return None };
    let pid = *pids.first()?;
    let ran = |info: &ProcessInfo| info.cpu_ns().is_some_and(|ns| Duration::from_nanos(ns) > elapsed.mul_f64(RAN));
    if !lock(registry).by_pid(pid.0).is_some_and(|info| info.alive && !ran(info)) {
        return None;
    }
    let process = RemoteProcess::open(pid).ok()?;
    let inspect::Verdict::Python(interpreter) = inspect::inspect(&process, &mut ElfCache::default()).ok()? else {
        return None;
    };
    let snapshot = snapshot::take(&process, &interpreter, &Wanted { limit: TIME_LIMIT, ..Wanted::default() }).ok()?;
    let main = snapshot.threads.iter().find(|thread| thread.main)?;
    let profile = &snapshot.profile;
    let frame = profile.frames.get(*main.python.as_ref()?.frames.first()?);
    let filename = Path::new(profile.strings.get(frame.filename));
    let name = filename.file_name().map_or(filename.to_string_lossy(), |name| name.to_string_lossy());
    Some(format!("{name}:{} {}", frame.lineno, profile.strings.get(frame.function)))
}
