//! How sample bytes get into a file: buffered, then plain or through one zstd frame.

use super::checkpoint::{Base, checksum};
use super::{Compression, Options};
use std::io::{self, Write};
use zstd::stream::raw::{CParameter, Encoder, Operation};
use zstd::zstd_safe::{CCtx, InBuffer, OutBuffer};

/// Sample bytes that are gathered before they are compressed or written.
const BUFFER_LEN: usize = 64 * 1024;
/// CPython's compression level.
const LEVEL: i32 = 5;
/// The level for what fits into the buffer: with small tables CPython's would come out larger than CPython's own.
const LEVEL_OF_LITTLE: i32 = 9;
/// CPython's window: 2 MiB.
const WINDOW_LOG: u32 = 21;
/// The compressor gathers this many bytes, then outputs all blocks made from them at once (`inBuffTarget` in
/// `ZSTD_compressStream_generic`, zstd 1.5.7). If another version does otherwise, tests fail.
const ZSTD_INPUT: u64 = 128 * 1024;

/// Takes sample bytes.
pub(super) struct SampleOutput {
    buffer: Vec<u8>,
    zstd: Option<Zstd>,
    /// Bytes taken.
    taken: u64,
    /// Bytes given to the file.
    written: u64,
    /// Kept for checkpoints.
    kept: Option<Kept>,
}

/// The bytes that the compressor has taken but may not have output yet.
struct Kept {
    bytes: Vec<u8>,
    /// Number of bytes before those.
    start: u64,
    /// Checksum of the bytes before those.
    checksum: crc32fast::Hasher,
}

impl Kept {
    /// Forgets what comes before this place.
    fn forget_before(&mut self, end: u64) {
        let len = usize::try_from(end - self.start).expect("no more than is kept");
        self.checksum.update(&self.bytes[..len]);
        self.bytes.drain(..len);
        self.start = end;
    }
}

struct Zstd {
    encoder: Encoder<'static>,
    out: Vec<u8>,
}

impl SampleOutput {
    pub(super) fn new(compression: Compression) -> io::Result<Self> {
        let zstd = match compression {
            Compression::None => None,
            Compression::Zstd => {
                let mut encoder = Encoder::new(LEVEL)?;
                encoder.set_parameter(CParameter::WindowLog(WINDOW_LOG))?;
                // CPython's frames do not say how long they are either.
                encoder.set_parameter(CParameter::ContentSizeFlag(false))?;
                Some(Zstd { encoder, out: Vec::with_capacity(CCtx::out_size()) })
            }
        };
        Ok(Self { buffer: Vec::with_capacity(BUFFER_LEN + 4096), zstd, taken: 0, written: 0, kept: None })
    }

    /// Where the next record's bytes are put; [`Self::record_end`] must follow.
    pub(super) fn buffer(&mut self) -> &mut Vec<u8> {
        &mut self.buffer
    }

    /// Passes the buffer on when it is full.
    pub(super) fn record_end(&mut self, file: &mut impl Write) -> io::Result<()> {
        if self.buffer.len() >= BUFFER_LEN { self.drain(file) } else { Ok(()) }
    }

    /// Bytes taken so far.
    #[inline]
    pub(super) fn taken(&self) -> u64 {
        self.taken + self.buffer.len() as u64
    }

    /// Bytes in the file so far.
    pub(super) fn written(&self) -> u64 {
        self.written
    }

    /// Keeps what is needed for [`Self::base`]. Nothing was taken yet.
    pub(super) fn keep(&mut self, options: &Options) {
        self.kept = Some(Kept { bytes: Vec::new(), start: 0, checksum: checksum(options) });
    }

    /// Writes to the file what can be written without changing what the file will be.
    pub(super) fn bring(&mut self, file: &mut impl Write) -> io::Result<()> {
        if self.zstd.is_none() { self.drain(file) } else { Ok(()) }
    }

    /// The end of the bytes that have certainly been written to the file, and the bytes after that.
    pub(super) fn base(&self) -> Option<(Base, [&[u8]; 2])> {
        let kept = self.kept.as_ref()?;
        let base = Base { len: kept.start, crc32: kept.checksum.clone().finalize() };
        Some((base, [&kept.bytes, &self.buffer]))
    }

    /// Writes all bytes to the file and ends the zstd frame.
    pub(super) fn finish(&mut self, file: &mut impl Write) -> io::Result<()> {
        if self.taken == 0
            && let Some(Zstd { encoder, .. }) = &mut self.zstd
        {
            // So little data needs no tables for a window of 2 MiB: making and clearing those takes longer than
            // compressing it.
            encoder.set_parameter(CParameter::CompressionLevel(LEVEL_OF_LITTLE))?;
            encoder.set_pledged_src_size(Some(self.buffer.len() as u64))?;
        }
        self.drain(file)?;
        self.kept = None;
        let Some(Zstd { mut encoder, mut out }) = self.zstd.take() else { return Ok(()) };
        loop {
            out.clear();
            let left = encoder.finish(&mut OutBuffer::around(&mut out), true)?;
            file.write_all(&out)?;
            self.written += out.len() as u64;
            if left == 0 {
                return Ok(());
            }
        }
    }

    fn drain(&mut self, file: &mut impl Write) -> io::Result<()> {
        if let Some(Zstd { encoder, out }) = &mut self.zstd {
            let mut input = InBuffer::around(&self.buffer);
            while input.pos < input.src.len() {
                out.clear();
                encoder.run(&mut input, &mut OutBuffer::around(out))?;
                file.write_all(out)?;
                self.written += out.len() as u64;
            }
        } else {
            file.write_all(&self.buffer)?;
            self.written += self.buffer.len() as u64;
        }
        self.taken += self.buffer.len() as u64;
        if let Some(kept) = &mut self.kept {
            kept.bytes.extend_from_slice(&self.buffer);
            kept.forget_before(if self.zstd.is_some() { self.taken - self.taken % ZSTD_INPUT } else { self.taken });
        }
        self.buffer.clear();
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// That many bytes, what is written for them, and the size of the frame's window.
    fn frame(len: usize) -> (Vec<u8>, Vec<u8>, u64) {
        let bytes: Vec<u8> = (0..len).map(|at| (at % 251 + at / 1000) as u8).collect();
        let (mut output, mut file) = (SampleOutput::new(Compression::Zstd).expect("it can be made"), Vec::new());
        for part in bytes.chunks(1000) {
            output.buffer().extend_from_slice(part);
            output.record_end(&mut file).expect("there is room");
        }
        output.finish(&mut file).expect("there is room");
        assert_eq!(output.written(), file.len() as u64);
        // RFC 8878, 3.1.1.1: after the magic number a descriptor, whose bits 5 to 7 say whether the content's size is given;
        // then, since it is not, the window's size.
        let [descriptor, window] = [file[4], file[5]];
        assert_eq!(descriptor >> 5, 0, "the content's size is not told");
        let base = 1 << (10 + (window >> 3));
        (bytes, file, base + (base / 8) * u64::from(window & 7))
    }

    #[test]
    fn little_is_compressed_with_small_tables_and_much_as_cpython_does() {
        for (len, least, most) in
            [(0, 0, 1 << 17), (1000, 0, 1 << 17), (60_000, 0, 1 << 17), (1 << 20, 1 << 21, 1 << 21)]
        {
            let (bytes, file, window) = frame(len);
            assert_eq!(zstd::decode_all(&file[..]).expect("a frame"), bytes);
            assert!((least..=most).contains(&window), "{len} bytes: a window of {window}");
        }
    }
}
