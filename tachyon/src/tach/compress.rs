//! The way of sample bytes into a file: buffered, then plain or through one zstd frame.

use super::Compression;
use std::io::{self, Write};
use zstd::stream::raw::{CParameter, Encoder, Operation};
use zstd::zstd_safe::{CCtx, InBuffer, OutBuffer};

/// Sample bytes that are gathered before they are compressed or written.
const BUFFER_LEN: usize = 64 * 1024;
/// CPython's compression level.
const LEVEL: i32 = 5;
/// CPython's window: 2 MiB.
const WINDOW_LOG: u32 = 21;

/// Takes sample bytes.
pub(super) struct SampleOutput {
    buffer: Vec<u8>,
    zstd: Option<Zstd>,
    /// Bytes taken.
    taken: u64,
    /// Bytes given to the file.
    written: u64,
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
                Some(Zstd { encoder, out: Vec::with_capacity(CCtx::out_size()) })
            }
        };
        Ok(Self { buffer: Vec::with_capacity(BUFFER_LEN + 4096), zstd, taken: 0, written: 0 })
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

    /// Brings all bytes to the file; zstd ends a block, so that a reader of a cut file gets them.
    pub(super) fn flush(&mut self, file: &mut impl Write) -> io::Result<()> {
        self.drain(file)?;
        self.zstd_steps(file, Operation::flush)
    }

    /// Brings all bytes to the file and ends the zstd frame.
    pub(super) fn finish(&mut self, file: &mut impl Write) -> io::Result<()> {
        self.drain(file)?;
        self.zstd_steps(file, |encoder, out| encoder.finish(out, true))?;
        self.zstd = None;
        Ok(())
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
        self.buffer.clear();
        Ok(())
    }

    /// Repeats `step`, which says how much is left, until nothing is.
    fn zstd_steps(
        &mut self,
        file: &mut impl Write,
        step: impl Fn(&mut Encoder<'static>, &mut OutBuffer<'_, Vec<u8>>) -> io::Result<usize>,
    ) -> io::Result<()> {
        let Some(Zstd { encoder, out }) = &mut self.zstd else { return Ok(()) };
        loop {
            out.clear();
            let left = step(encoder, &mut OutBuffer::around(out))?;
            file.write_all(out)?;
            self.written += out.len() as u64;
            if left == 0 {
                return Ok(());
            }
        }
    }
}
