//! What goes into a file before its first sample.

use super::{Compression, Features, Header, Layout, MAX_SAMPLE_BYTES, Mode};

/// What goes into a file at its start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Options {
    /// Which layout the header gets.
    pub layout: Layout,
    /// What is done to the samples.
    pub compression: Compression,
    /// Start on the monotonic clock, microseconds: each thread's first time is stored as the distance from it.
    pub start_time_us: u64,
    /// Microseconds between samples.
    pub sample_interval_us: u64,
    /// Version of CPython: major, minor, micro.
    pub python_version: [u8; 3],
    /// When samples are taken.
    pub mode: Option<Mode>,
    /// What is recorded.
    pub features: Option<Features>,
    /// Most bytes of samples, before compression, in a compressed file; capped at [`MAX_SAMPLE_BYTES`].
    pub max_sample_bytes: u64,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            layout: Layout::default(),
            compression: Compression::default(),
            start_time_us: 0,
            sample_interval_us: 0,
            python_version: [0; 3],
            mode: None,
            features: None,
            max_sample_bytes: MAX_SAMPLE_BYTES,
        }
    }
}

/// What goes into a file with the same samples at its start.
impl From<&Header> for Options {
    fn from(header: &Header) -> Self {
        Self {
            layout: header.layout,
            compression: header.compression,
            start_time_us: header.start_time_us,
            sample_interval_us: header.sample_interval_us,
            python_version: header.python_version,
            mode: header.mode,
            features: header.features,
            ..Self::default()
        }
    }
}

impl Options {
    pub(super) fn header(&self) -> Header {
        Header {
            layout: self.layout,
            python_version: self.python_version,
            start_time_us: self.start_time_us,
            sample_interval_us: self.sample_interval_us,
            compression: self.compression,
            mode: self.mode,
            features: self.features,
            ..Header::default()
        }
    }
}
