//! The 64 bytes at the start and the 32 at the end.

use super::{FOOTER_LEN, HEADER_LEN, MAGIC, OffsetFault, ReadError, VERSION};

/// Bytes of [`HEADER_LEN`] as an array's length.
pub(super) const HEADER_SIZE: usize = 64;
/// Bytes of [`FOOTER_LEN`] as an array's length.
pub(super) const FOOTER_SIZE: usize = 32;
const _: () = assert!(HEADER_LEN == HEADER_SIZE as u64 && FOOTER_LEN == FOOTER_SIZE as u64);

/// Which description of the header applies. Both call themselves version 1.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Layout {
    /// CPython 3.15.0b4 and later.
    #[default]
    Released,
    /// CPython 3.15.0a4 to b3: the sample count takes four bytes, everything after it comes earlier, and no mode is
    /// recorded.
    Early,
}

impl Layout {
    /// `released` or `early`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Released => "released",
            Self::Early => "early",
        }
    }
}

/// Byte order of the fixed-width fields.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ByteOrder {
    /// Least significant byte first; what [`super::Writer`] writes.
    #[default]
    Little,
    /// Most significant byte first.
    Big,
}

impl ByteOrder {
    /// `little-endian` or `big-endian`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Little => "little-endian",
            Self::Big => "big-endian",
        }
    }

    pub(super) fn u32(self, bytes: [u8; 4]) -> u32 {
        match self {
            Self::Little => u32::from_le_bytes(bytes),
            Self::Big => u32::from_be_bytes(bytes),
        }
    }

    pub(super) fn u64(self, bytes: [u8; 8]) -> u64 {
        match self {
            Self::Little => u64::from_le_bytes(bytes),
            Self::Big => u64::from_be_bytes(bytes),
        }
    }
}

/// What is done to the sample data.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Compression {
    /// Nothing.
    None,
    /// One zstd frame: level 5, window log 21.
    #[default]
    Zstd,
}

impl Compression {
    /// `none` or `zstd`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Zstd => "zstd",
        }
    }

    fn from_raw(value: u32) -> Option<Self> {
        match value {
            0 => Some(Self::None),
            1 => Some(Self::Zstd),
            _ => None,
        }
    }

    fn raw(self) -> u32 {
        match self {
            Self::None => 0,
            Self::Zstd => 1,
        }
    }
}

/// When samples were taken. The numbers are CPython's `PROFILING_MODE_*`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// At all times.
    Wall = 0,
    /// While a thread runs on a CPU.
    Cpu = 1,
    /// While a thread holds the GIL.
    Gil = 2,
    /// At all times, with CPU and GIL states.
    All = 3,
    /// While an exception is raised or handled.
    Exception = 4,
}

impl Mode {
    /// CPython's name for it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Wall => "wall",
            Self::Cpu => "cpu",
            Self::Gil => "gil",
            Self::All => "all",
            Self::Exception => "exception",
        }
    }
}

/// What was recorded in addition to Python frames of one thread.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Features {
    /// Samples of all threads.
    pub all_threads: bool,
    /// Native frames.
    pub native: bool,
    /// Frames of the garbage collector.
    pub gc: bool,
    /// Opcodes.
    pub opcodes: bool,
    /// The target was stopped for each sample.
    pub blocking: bool,
}

impl Features {
    /// CPython's bits: 1 all threads, 2 native, 4 gc, 8 opcodes, 16 blocking.
    #[must_use]
    pub fn bits(self) -> u32 {
        u32::from(self.all_threads)
            | u32::from(self.native) << 1
            | u32::from(self.gc) << 2
            | u32::from(self.opcodes) << 3
            | u32::from(self.blocking) << 4
    }

    fn from_bits(bits: u32) -> Self {
        Self {
            all_threads: bits & 1 != 0,
            native: bits & 2 != 0,
            gc: bits & 4 != 0,
            opcodes: bits & 8 != 0,
            blocking: bits & 16 != 0,
        }
    }
}

/// What header and footer say.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Header {
    /// Which layout the header has.
    pub layout: Layout,
    /// Byte order of the fixed-width fields.
    pub byte_order: ByteOrder,
    /// Version of CPython that wrote it, or, in this profiler's files, that was profiled: major, minor, micro.
    pub python_version: [u8; 3],
    /// Start on the monotonic clock, microseconds.
    pub start_time_us: u64,
    /// Microseconds between samples.
    pub sample_interval_us: u64,
    /// Samples of single threads, not ticks.
    pub sample_count: u64,
    /// Distinct pairs of thread and interpreter.
    pub thread_count: u32,
    /// Where the string table starts, and the sample data ends.
    pub string_table_offset: u64,
    /// Where the frame table starts.
    pub frame_table_offset: u64,
    /// What was done to the sample data.
    pub compression: Compression,
    /// When samples were taken; `None`: not recorded.
    pub mode: Option<Mode>,
    /// What was recorded; `None`: not recorded.
    pub features: Option<Features>,
    /// Strings, as the footer says.
    pub string_count: u32,
    /// Frames, as the footer says.
    pub frame_count: u32,
    /// The file's size, as the footer says. CPython never looks at it.
    pub declared_size: u64,
    /// The file's size.
    pub file_size: u64,
}

/// Configuration word: "features known".
const FEATURES_KNOWN: u32 = 1 << 3;
const FEATURES_SHIFT: u32 = 4;

/// Bytes of a header up to its start time, that included.
pub(crate) const HEAD_LEN: usize = START_TIME + size_of::<u64>();

/// Where the start time stands.
const START_TIME: usize = 12;

/// The start time from the beginning of a little-endian header, microseconds; `None` if no such header begins there.
pub(crate) fn start_time_of(head: &[u8; HEAD_LEN]) -> Option<u64> {
    let time = head.last_chunk().map(|time| u64::from_le_bytes(*time));
    time.filter(|_| head.starts_with(&MAGIC.to_le_bytes()))
}

impl Header {
    /// The header's bytes, little-endian.
    pub(super) fn encode(&self) -> [u8; HEADER_SIZE] {
        let mut out = Vec::with_capacity(HEADER_SIZE);
        let [major, minor, micro] = self.python_version;
        out.extend(MAGIC.to_le_bytes());
        out.extend(VERSION.to_le_bytes());
        out.extend([major, minor, micro, 0]);
        out.extend(self.start_time_us.to_le_bytes());
        out.extend(self.sample_interval_us.to_le_bytes());
        match self.layout {
            Layout::Released => out.extend(self.sample_count.to_le_bytes()),
            // The writer refuses more samples than four bytes count.
            Layout::Early => out.extend(u32::try_from(self.sample_count).unwrap_or(u32::MAX).to_le_bytes()),
        }
        out.extend(self.thread_count.to_le_bytes());
        out.extend(self.string_table_offset.to_le_bytes());
        out.extend(self.frame_table_offset.to_le_bytes());
        out.extend(self.compression.raw().to_le_bytes());
        if self.layout == Layout::Released {
            let mode = self.mode.map_or(0, |mode| mode as u32 + 1);
            let features = self.features.map_or(0, |features| FEATURES_KNOWN | features.bits() << FEATURES_SHIFT);
            out.extend((mode | features).to_le_bytes());
        }
        out.resize(HEADER_SIZE, 0);
        out.try_into().expect("resized to the array's length")
    }

    /// The footer's bytes, little-endian.
    pub(super) fn encode_footer(&self) -> [u8; FOOTER_SIZE] {
        let mut out = Vec::with_capacity(FOOTER_SIZE);
        out.extend(self.string_count.to_le_bytes());
        out.extend(self.frame_count.to_le_bytes());
        out.extend(self.declared_size.to_le_bytes());
        out.resize(FOOTER_SIZE, 0);
        out.try_into().expect("resized to the array's length")
    }

    /// Reads a header and a footer of a file of `file_size` bytes.
    pub(super) fn decode(
        header: &[u8; HEADER_SIZE],
        footer: &[u8; FOOTER_SIZE],
        file_size: u64,
    ) -> Result<Self, ReadError> {
        let byte_order = match u32::from_le_bytes(field(header, 0)) {
            MAGIC => ByteOrder::Little,
            swapped if swapped.swap_bytes() == MAGIC => ByteOrder::Big,
            // CPython's writer leaves zeros until it has finished. (A gperftools profile begins with one.)
            0 if header.iter().all(|&byte| byte == 0) => return Err(ReadError::Unfinished),
            other => return Err(ReadError::BadMagic(other)),
        };
        let version = byte_order.u32(field(header, 4));
        if version != VERSION {
            return Err(ReadError::UnsupportedVersion(version));
        }
        let layout = choose_layout(header, byte_order, file_size)?;
        let u32_at = |offset| byte_order.u32(field(header, offset));
        let u64_at = |offset| byte_order.u64(field(header, offset));
        let at = offsets(layout);
        let (sample_count, config) = match layout {
            Layout::Released => (u64_at(28), u32_at(60)),
            Layout::Early => (u64::from(u32_at(28)), 0),
        };
        let compression = u32_at(at.compression);
        let mode = match config & 7 {
            0 => None,
            1 => Some(Mode::Wall),
            2 => Some(Mode::Cpu),
            3 => Some(Mode::Gil),
            4 => Some(Mode::All),
            5 => Some(Mode::Exception),
            other => return Err(ReadError::InvalidMode(other)),
        };
        let known = config & FEATURES_KNOWN != 0;
        Ok(Self {
            layout,
            byte_order,
            python_version: field(header, 8),
            start_time_us: u64_at(START_TIME),
            sample_interval_us: u64_at(20),
            sample_count,
            thread_count: u32_at(at.threads),
            string_table_offset: u64_at(at.strings),
            frame_table_offset: u64_at(at.frames),
            compression: Compression::from_raw(compression).ok_or(ReadError::UnknownCompression(compression))?,
            mode,
            features: known.then(|| Features::from_bits(config >> FEATURES_SHIFT)),
            string_count: byte_order.u32(field(footer, 0)),
            frame_count: byte_order.u32(field(footer, 4)),
            declared_size: byte_order.u64(field(footer, 8)),
            file_size,
        })
    }
}

/// Where the fields are that moved.
struct Offsets {
    threads: usize,
    strings: usize,
    frames: usize,
    compression: usize,
}

fn offsets(layout: Layout) -> Offsets {
    match layout {
        Layout::Released => Offsets { threads: 36, strings: 40, frames: 48, compression: 56 },
        Layout::Early => Offsets { threads: 32, strings: 36, frames: 44, compression: 52 },
    }
}

/// The layout whose offsets fit the file. The other one's cannot fit by chance: read at the wrong place, half of an
/// offset lands in the upper four bytes and points at least 256 GiB far.
fn choose_layout(header: &[u8; HEADER_SIZE], order: ByteOrder, file_size: u64) -> Result<Layout, ReadError> {
    let fault = |layout| {
        let at = offsets(layout);
        let strings = order.u64(field(header, at.strings));
        let frames = order.u64(field(header, at.frames));
        let compression = order.u32(field(header, at.compression));
        if strings < HEADER_LEN {
            Some(OffsetFault::StringsInHeader(strings))
        } else if strings > file_size {
            Some(OffsetFault::StringsPastEnd(strings))
        } else if frames < HEADER_LEN {
            Some(OffsetFault::FramesInHeader(frames))
        } else if frames > file_size {
            Some(OffsetFault::FramesPastEnd(frames))
        } else if frames < strings {
            Some(OffsetFault::FramesBeforeStrings(strings, frames))
        } else if layout == Layout::Early && Compression::from_raw(compression).is_none() {
            Some(OffsetFault::Compression(compression))
        } else {
            None
        }
    };
    let Some(released) = fault(Layout::Released) else { return Ok(Layout::Released) };
    let Some(early) = fault(Layout::Early) else { return Ok(Layout::Early) };
    // This project's writer puts a header without offsets at the start of an unfinished file.
    if header[28..52].iter().all(|&byte| byte == 0) {
        return Err(ReadError::Unfinished);
    }
    Err(ReadError::BadOffsets { size: file_size, released, early })
}

/// The `N` bytes at a fixed place of a fixed-size header.
fn field<const N: usize>(bytes: &[u8], offset: usize) -> [u8; N] {
    bytes[offset..offset + N].try_into().expect("the slice has the array's length")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample_header(layout: Layout) -> Header {
        Header {
            layout,
            python_version: [3, 15, 2],
            start_time_us: 1 << 40,
            sample_interval_us: 10_000,
            sample_count: 5,
            thread_count: 2,
            string_table_offset: 100,
            frame_table_offset: 200,
            string_count: 3,
            frame_count: 4,
            declared_size: 300,
            file_size: 300,
            ..Header::default()
        }
    }

    #[test]
    fn both_layouts_come_back() {
        for layout in [Layout::Released, Layout::Early] {
            let mut header = sample_header(layout);
            if layout == Layout::Released {
                header.mode = Some(Mode::Gil);
                header.features = Some(Features { native: true, blocking: true, ..Features::default() });
            }
            let decoded = Header::decode(&header.encode(), &header.encode_footer(), 300).unwrap();
            assert_eq!(decoded, header);
        }
    }

    #[test]
    fn early_fields_stand_where_the_first_description_says() {
        let bytes = sample_header(Layout::Early).encode();
        assert_eq!(bytes[28..32], 5_u32.to_le_bytes());
        assert_eq!(bytes[32..36], 2_u32.to_le_bytes());
        assert_eq!(bytes[36..44], 100_u64.to_le_bytes());
        assert_eq!(bytes[44..52], 200_u64.to_le_bytes());
        assert_eq!(bytes[52..56], 1_u32.to_le_bytes());
        assert_eq!(bytes[56..], [0; 8]);
    }

    #[test]
    fn a_header_that_fits_neither_layout_gives_both_reasons() {
        let header = sample_header(Layout::Released);
        let error = Header::decode(&header.encode(), &header.encode_footer(), 150).unwrap_err();
        let ReadError::BadOffsets { released, early, .. } = error else { panic!("{error}") };
        assert_eq!(released, OffsetFault::FramesPastEnd(200));
        assert!(matches!(early, OffsetFault::StringsPastEnd(_)));
    }

    #[test]
    fn modes_and_compressions_that_do_not_exist_are_refused() {
        let header = sample_header(Layout::Released);
        let mut bytes = header.encode();
        bytes[60] = 6;
        assert!(matches!(Header::decode(&bytes, &header.encode_footer(), 300), Err(ReadError::InvalidMode(6))));
        bytes[60] = 0;
        bytes[56] = 2;
        assert!(matches!(Header::decode(&bytes, &header.encode_footer(), 300), Err(ReadError::UnknownCompression(2))));
    }

    #[test]
    fn unfinished_files_are_told() {
        let provisional = Header { python_version: [3, 13, 0], start_time_us: 9, ..Header::default() };
        for bytes in [[0; HEADER_SIZE], provisional.encode()] {
            assert!(matches!(Header::decode(&bytes, &[0; FOOTER_SIZE], 300), Err(ReadError::Unfinished)));
        }
    }
}
