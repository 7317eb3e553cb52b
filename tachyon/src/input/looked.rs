//! What is learnt about a file before its samples are read, and what files together say about their recordings.

use super::source::FileReader;
use crate::profile::{Meta, Process};
use crate::report::Report;
use crate::sinks::metadata::Metadata;
use crate::tach::{Compression, Features, Mode, Statistics};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// What was learnt about one of several files.
pub(super) struct Looked {
    pub path: PathBuf,
    pub meta: Meta,
    pub processes: Vec<Process>,
    pub report: Report,
    pub samples: u64,
    pub mode: Option<Mode>,
    pub features: Option<Features>,
    pub compression: Compression,
    pub has_metadata: bool,
}

impl Looked {
    pub fn at(path: &Path, reader: &FileReader) -> Self {
        let mut metadata = Metadata::find(reader.tables());
        let header = reader.header();
        Self {
            path: path.to_owned(),
            meta: meta(reader, metadata.as_ref()),
            report: report(reader, metadata.as_mut()),
            samples: header.sample_count,
            mode: header.mode,
            features: header.features,
            compression: header.compression,
            has_metadata: metadata.is_some(),
            processes: metadata.into_iter().flat_map(|of| of.processes).map(Process::from).collect(),
        }
    }

    /// Files that do not say come first.
    pub fn start_unix(&self) -> f64 {
        self.report.segment.map_or(self.meta.start_unix, |segment| segment.start_unix)
    }
}

pub(super) fn meta(reader: &FileReader, metadata: Option<&Metadata>) -> Meta {
    let header = reader.header();
    let [major, minor, micro] = header.python_version;
    let mut meta = Meta {
        start_us: header.start_time_us,
        interval_us: header.sample_interval_us,
        python_version: (major, minor, micro),
        gil_only: header.mode == Some(Mode::Gil),
        waits: header.mode == Some(Mode::Wall),
        ..Meta::default()
    };
    if let Some(features) = header.features {
        meta.native = features.native;
        meta.opcodes = features.opcodes;
    }
    if let Some(metadata) = metadata {
        meta.hostname.clone_from(&metadata.host);
        meta.start_unix = metadata.start_unix;
        meta.many_processes = metadata.many_processes;
        if metadata.report.effective_rate_hz > 0.0 && metadata.report.effective_rate_hz < metadata.report.rate_hz {
            meta.interval_us = metadata.report.mean_interval_us();
        }
    }
    meta
}

/// The account of a file, which is large if there are many processes: it is moved, not copied.
pub(super) fn report(reader: &FileReader, metadata: Option<&mut Metadata>) -> Report {
    let statistics = reader.statistics();
    metadata.map_or_else(
        || Report {
            stored: reader.header().sample_count,
            duration_s: statistics.map_or(0.0, |statistics| statistics.duration_sec),
            rate_hz: statistics.map_or(0.0, |statistics| statistics.sample_rate),
            ..Report::default()
        },
        |metadata| std::mem::take(&mut metadata.report),
    )
}

/// What has to be added to a file's times to get times on the first file's clock. Another host, or another boot, has another clock.
pub(super) fn shift_us(first: &Meta, next: &Meta) -> u64 {
    /// How far two readings of one boot's clocks may differ: the calendar clock is set now and then.
    const SAME_BOOT_S: f64 = 60.0;
    if first.start_unix <= 0.0 || next.start_unix <= 0.0 {
        return 0;
    }
    let boot = |meta: &Meta| meta.start_unix - Duration::from_micros(meta.start_us).as_secs_f64();
    let apart_s = boot(next) - boot(first);
    if first.hostname == next.hostname && apart_s.abs() < SAME_BOOT_S {
        return 0;
    }
    #[expect(clippy::cast_possible_truncation, reason = "a float that is too large becomes the largest number")]
    let shift = (apart_s * 1e6).round() as i64;
    shift.cast_unsigned()
}

/// Adds what a file says about its recording to what is known about the whole.
pub(super) fn join(whole: &mut Meta, file: &Meta, start_us: u64) {
    if start_us < whole.start_us {
        (whole.start_us, whole.start_unix) = (start_us, file.start_unix);
    }
    whole.many_processes |= file.many_processes;
    whole.gil_only &= file.gil_only;
    whole.waits |= file.waits;
    whole.opcodes |= file.opcodes;
    whole.native |= file.native;
    whole.python_version = whole.python_version.max(file.python_version);
    if !whole.hostname.split(", ").any(|host| host == file.hostname) {
        let hosts = [whole.hostname.as_str(), file.hostname.as_str()];
        whole.hostname = hosts.into_iter().filter(|host| !host.is_empty()).collect::<Vec<_>>().join(", ");
    }
}

pub(super) fn union(a: Features, b: Features) -> Features {
    Features {
        all_threads: a.all_threads | b.all_threads,
        native: a.native | b.native,
        gc: a.gc | b.gc,
        opcodes: a.opcodes | b.opcodes,
        blocking: a.blocking | b.blocking,
    }
}

/// The statistics block of a file with this account.
pub(super) fn statistics(report: &Report) -> Option<Statistics> {
    let lost: u64 = report.loss.values().sum();
    let percent = crate::sinks::tach::percent;
    let statistics = Statistics {
        duration_sec: report.duration_s,
        sample_rate: report.mean_rate_hz(),
        error_rate: percent(lost, report.stored + lost).filter(|_| !report.cut),
        missed_samples: report.not_fired.zip(report.expected).and_then(|(missed, all)| percent(missed, all)),
    };
    let sound = |number: f64| number.is_finite() && number >= 0.0;
    (sound(statistics.duration_sec) && sound(statistics.sample_rate)).then_some(statistics)
}
