//! The native side of samples: their whole stacks.

use crate::events::Event;
use crate::merge::{self, Merger, MixedWith, NativeFrames as _, Quality};
use crate::profile::{FrameId, Merge, ProcessId, Profile};
use crate::recording::made::Made;
use crate::recording::native::{Copies, Finished, Mixer, News};
use crate::recording::settled::Settled;
use crate::symbolize::Symbolizer;
use std::collections::HashMap;
use std::sync::mpsc::Sender;
use std::time::{Duration, Instant};
use tachyon_common::event::SampleRecord;
use tachyon_common::stop::StopReason;

/// What native stacks need.
pub(in crate::recording) struct NativeSide {
    pub(super) mixer: Mixer,
    pub(super) copies: Copies,
    mapper: Sender<News>,
    /// For each process whose samples meet code that it generated and has not named: when that may next be reported, and how
    /// long after that again.
    unnamed: HashMap<u32, (Instant, Duration)>,
}

/// Such code is reported again after the first time, at intervals that double from the first of these to the second:
/// many processes name none of their code.
const UNNAMED: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(2));
/// Most processes for which that is kept; beyond that, all of it is forgotten.
const MAX_UNNAMED: usize = 1 << 12;

/// Reports that a sample met code without a file that nobody has named.
fn tell_of_unnamed(
    told: &mut HashMap<u32, (Instant, Duration)>,
    mapper: &Sender<News>,
    record: &SampleRecord,
    (address, caller): (u64, Option<u64>),
) {
    let (pid, now) = (record.tgid, Instant::now());
    if told.len() >= MAX_UNNAMED {
        told.clear();
    }
    let (next, wait) = told.entry(pid).or_insert((now, UNNAMED.0));
    if now < *next {
        return;
    }
    (*next, *wait) = (now + *wait, (*wait * 2).min(UNNAMED.1));
    // If it has panicked, that is reported at the end.
    let _ended = mapper.send(News::Unnamed { pid, address, caller });
}

impl NativeSide {
    /// The native frames of the present sample, leaf first, including those that are not shown.
    pub(super) fn leaf_first(&mut self, profile: &mut Profile) -> Vec<FrameId> {
        let mixer = &mut self.mixer;
        (0..mixer.kinds.len()).flat_map(|index| mixer.frames(profile, index).to_vec()).collect()
    }

    /// Nothing yet.
    pub fn new(mixer: Mixer, mapper: Sender<News>) -> Self {
        let copies = Copies::new(mixer.spaces(), mapper.clone());
        Self { copies, mixer, mapper, unnamed: HashMap::new() }
    }

    /// A record whose native stack ended for want of tables, with as much of it as a copy of that stack leads to; `None`: there is no
    /// copy, or it leads no further.
    pub(super) fn finish(&mut self, bytes: &[u8], event: &Event<'_>) -> Option<Vec<u8>> {
        let (Event::Sample(_, frames)
        | Event::Wait(_, frames, _)
        | Event::WaitBegin(_, frames, _)
        | Event::Waker(_, frames, _)) = event
        else {
            return None;
        };
        let Finished { bytes, before, last } = self.copies.finish(bytes, frames.native())?;
        self.tell_of_stop(&before, last);
        Some(bytes)
    }

    /// Has the mapper make the tables for want of which a stack ended, if it did.
    fn tell_of_stop(&self, record: &SampleRecord, last: Option<u64>) {
        const STALE: [u8; 2] = [StopReason::UnknownCode as u8, StopReason::NoUnwindTables as u8];
        if STALE.contains(&record.native_stop) {
            let pid = record.tgid;
            let unmade = record.native_stop == StopReason::NoUnwindTables as u8;
            let news = match last.filter(|_| unmade) {
                Some(address) => News::Met { pid, address, sp: record.user_sp },
                None => News::Unknown { pid },
            };
            // If it has panicked, that is reported at the end.
            let _ended = self.mapper.send(news);
        }
    }

    /// Makes the whole stack of a record, native frames included. Doubted frames are accepted if the native stack bears
    /// them out.
    pub(super) fn stack(
        &mut self,
        made: &mut Made,
        merger: &mut Merger,
        symbolizer: &mut Symbolizer,
        process: ProcessId,
        settled: &mut Settled<'_>,
    ) -> Merge {
        let (profile, counts) = (&mut made.profile, &mut made.native);
        let (record, frames) = (&settled.record, settled.frames);
        *counts.stops.entry(record.native_stop).or_default() += 1;
        self.tell_of_stop(record, frames.native().last());
        let mixer = &mut self.mixer;
        mixer.take(profile, process, record, frames);
        if let Some(unnamed) = mixer.unnamed {
            tell_of_unnamed(&mut self.unnamed, &self.mapper, record, unnamed);
        }
        if mixer.switch.rooted {
            settled.record.native_stop = StopReason::Complete as u8;
        }
        let record = &settled.record;
        if mixer.kinds.is_empty() {
            merger.stack(profile, symbolizer, record, frames);
            return Merge::None;
        }
        let kinds = std::mem::take(&mut mixer.kinds);
        let thread = merge::thread_told(record, &kinds);
        settled.record.stop = thread;
        let (record, frames) = (&settled.record, settled.frames);
        let with = MixedWith {
            kinds: &kinds,
            boundaries: settled.boundaries,
            foreign: mixer.switch.foreign,
            switching: mixer.switch.under_way(),
            assembly: mixer.assembly,
            keep: mixer.keep,
        };
        if let Some(doubted) = settled.doubted {
            let complete = SampleRecord { stop: StopReason::Complete as u8, ..*record };
            if merger.mixed(profile, symbolizer, (&complete, doubted), &with, mixer) == Quality::Exact {
                (settled.record, settled.frames) = (complete, doubted);
                mixer.kinds = kinds;
                return Merge::Exact;
            }
        }
        let quality = merger.mixed(profile, symbolizer, (record, frames), &with, mixer);
        mixer.kinds = kinds;
        let merge = match quality {
            Quality::Exact => Merge::Exact,
            Quality::Repaired(_) => Merge::Repaired,
            Quality::Failed => Merge::Failed,
        };
        if merge != Merge::Exact {
            *counts.repairs.entry(quality.name()).or_default() += 1;
        }
        merge
    }
}
