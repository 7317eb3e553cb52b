//! Buffered, checked reading of one section of a file.

use super::varint::unzigzag;
use super::{ReadError, Section};
use std::io::{self, Read};

const BUFFER_LEN: usize = 64 * 1024;

/// Reads numbers and bytes from a stream. Every read is checked against the end; memory is one buffer.
pub(super) struct Bytes<R> {
    source: R,
    section: Section,
    /// How a failed read of the source is reported.
    fault: fn(io::Error) -> ReadError,
    buffer: Box<[u8]>,
    start: usize,
    end: usize,
    /// Bytes taken from the source.
    received: u64,
    /// Most bytes the source may give.
    limit: u64,
}

impl<R: Read> Bytes<R> {
    pub(super) fn new(source: R, section: Section, fault: fn(io::Error) -> ReadError, limit: u64) -> Self {
        let buffer = vec![0; BUFFER_LEN].into_boxed_slice();
        Self { source, section, fault, buffer, start: 0, end: 0, received: 0, limit }
    }

    /// Bytes that were read out of it so far.
    pub(super) fn consumed(&self) -> u64 {
        self.received - (self.end - self.start) as u64
    }

    /// Tries to have `len` bytes in the buffer, and says how many there are: fewer only at the end.
    pub(super) fn have(&mut self, len: usize) -> Result<usize, ReadError> {
        debug_assert!(len <= self.buffer.len());
        if self.end - self.start >= len {
            return Ok(self.end - self.start);
        }
        self.buffer.copy_within(self.start..self.end, 0);
        self.end -= self.start;
        self.start = 0;
        while self.end < len {
            match self.source.read(&mut self.buffer[self.end..]) {
                Ok(0) => break,
                Ok(count) => {
                    self.end += count;
                    self.received += count as u64;
                    if self.received > self.limit {
                        return Err(ReadError::TooLarge);
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err((self.fault)(error)),
            }
        }
        Ok(self.end)
    }

    /// The next `N` bytes.
    pub(super) fn array<const N: usize>(&mut self) -> Result<[u8; N], ReadError> {
        self.have(N)?;
        let bytes = self.buffer[self.start..self.end].first_chunk::<N>().ok_or(ReadError::Cut(self.section))?;
        self.start += N;
        Ok(*bytes)
    }

    /// The next byte.
    pub(super) fn u8(&mut self) -> Result<u8, ReadError> {
        let [byte] = self.array()?;
        Ok(byte)
    }

    /// A LEB128 number of at most ten bytes. As in CPython, bits of the tenth that a `u64` has no room for are dropped.
    pub(super) fn varint_u64(&mut self) -> Result<u64, ReadError> {
        // Nearly all are short and in the buffer.
        if let [first, second, ..] = self.buffer[self.start..self.end] {
            if first & 0x80 == 0 {
                self.start += 1;
                return Ok(u64::from(first));
            }
            if second & 0x80 == 0 {
                self.start += 2;
                return Ok(u64::from(first & 0x7f) | u64::from(second) << 7);
            }
        }
        // More is read only when it is needed: a file that was cut may not have more.
        let buffered = self.buffer[self.start..self.end].iter().take(super::varint::MAX_LEN);
        if buffered.into_iter().all(|byte| byte & 0x80 != 0) {
            self.have(super::varint::MAX_LEN)?;
        }
        let mut value = 0;
        for (index, &byte) in self.buffer[self.start..self.end].iter().take(super::varint::MAX_LEN).enumerate() {
            value |= u64::from(byte & 0x7f) << (7 * index);
            if byte & 0x80 == 0 {
                self.start += index + 1;
                return Ok(value);
            }
        }
        if self.end - self.start < super::varint::MAX_LEN {
            return Err(ReadError::Cut(self.section));
        }
        Err(ReadError::MalformedVarint(self.section))
    }

    /// A LEB128 number that fits 32 bits.
    pub(super) fn varint_u32(&mut self) -> Result<u32, ReadError> {
        u32::try_from(self.varint_u64()?).map_err(|_| ReadError::MalformedVarint(self.section))
    }

    /// Gives `take` the next `count` LEB128 numbers that fit 32 bits.
    pub(super) fn varints_u32(
        &mut self,
        count: u32,
        mut take: impl FnMut(u32) -> Result<(), ReadError>,
    ) -> Result<(), ReadError> {
        let mut left = count;
        while left > 0 {
            // Nearly all are short and in the buffer.
            let bytes = &self.buffer[self.start..self.end];
            let mut at = 0;
            while left > 0
                && let Some(&[first, second]) = bytes.get(at..at + 2)
            {
                let (value, len) = if first & 0x80 == 0 {
                    (u32::from(first), 1)
                } else if second & 0x80 == 0 {
                    (u32::from(first & 0x7f) | u32::from(second) << 7, 2)
                } else {
                    break;
                };
                take(value)?;
                at += len;
                left -= 1;
            }
            self.start += at;
            if left > 0 {
                take(self.varint_u32()?)?;
                left -= 1;
            }
        }
        Ok(())
    }

    /// Gives `take` the LEB128 numbers of the next pairs of such a number and the byte `second`, `most` of them at most,
    /// and says how many there were: those in the buffer up to the first other pair. Nothing else is consumed.
    pub(super) fn pairs(&mut self, most: u32, second: u8, mut take: impl FnMut(u64)) -> u32 {
        let bytes = &self.buffer[self.start..self.end];
        let (mut at, mut count) = (0, 0);
        while count < most {
            let (number, len) = match bytes.get(at..) {
                Some(&[number, byte, ..]) if number & 0x80 == 0 && byte == second => (u64::from(number), 2),
                Some(&[low, high, byte, ..]) if low & 0x80 != 0 && high & 0x80 == 0 && byte == second => {
                    (u64::from(low & 0x7f) | u64::from(high) << 7, 3)
                }
                Some(&[low, mid, high, byte, ..]) if low & mid & 0x80 != 0 && high & 0x80 == 0 && byte == second => {
                    (u64::from(low & 0x7f) | u64::from(mid & 0x7f) << 7 | u64::from(high) << 14, 4)
                }
                _ => break,
            };
            take(number);
            at += len;
            count += 1;
        }
        self.start += at;
        count
    }

    /// A zigzag number.
    pub(super) fn varint_i32(&mut self) -> Result<i32, ReadError> {
        self.varint_u32().map(unzigzag)
    }

    /// Appends the next `len` bytes to `out`, which grows as they arrive and not before.
    pub(super) fn append(&mut self, mut len: usize, out: &mut Vec<u8>) -> Result<(), ReadError> {
        while len > 0 {
            let available = self.have(1)?.min(len);
            if available == 0 {
                return Err(ReadError::Cut(self.section));
            }
            out.extend_from_slice(&self.buffer[self.start..self.start + available]);
            self.start += available;
            len -= available;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(data: &[u8]) -> Bytes<&[u8]> {
        Bytes::new(data, Section::Samples, ReadError::Io, u64::MAX)
    }

    #[test]
    fn numbers() {
        assert_eq!(bytes(&[0x80, 0x80, 0x00]).varint_u64().unwrap(), 0, "not the shortest form");
        assert_eq!(bytes(&[0xff; 9]).varint_u64().unwrap_err().to_string(), "sample data ends inside an entry");
        assert!(matches!(bytes(&[0xff; 11]).varint_u64(), Err(ReadError::MalformedVarint(_))));
        let excess = [[0xff; 9].as_slice(), &[0x7f]].concat();
        assert_eq!(bytes(&excess).varint_u64().unwrap(), u64::MAX);
        assert!(matches!(bytes(&[0xff, 0xff, 0xff, 0xff, 0x1f]).varint_u32(), Err(ReadError::MalformedVarint(_))));
        assert_eq!(bytes(&[0xff, 0xff, 0xff, 0xff, 0x0f]).varint_i32().unwrap(), i32::MIN);
    }

    #[test]
    fn many_numbers() {
        let numbers: Vec<u32> =
            (0..50_000).map(|number: u32| number.wrapping_mul(2_654_435_761) >> (number % 32)).collect();
        let mut data = Vec::new();
        numbers.iter().for_each(|&number| crate::tach::varint::put_u32(&mut data, number));
        let mut reader = bytes(&data);
        let mut read = Vec::new();
        let mut take = |value| {
            read.push(value);
            Ok(())
        };
        reader.varints_u32(1, &mut take).unwrap();
        reader.varints_u32(0, &mut take).unwrap();
        reader.varints_u32(49_999, &mut take).unwrap();
        assert!(matches!(reader.varints_u32(1, &mut take), Err(ReadError::Cut(_))));
        assert_eq!(read, numbers);
        let refuse = |value| if value == 3 { Err(ReadError::EmptyZstd) } else { Ok(()) };
        assert!(matches!(bytes(&[1, 2, 3, 4]).varints_u32(4, refuse), Err(ReadError::EmptyZstd)));
        assert!(matches!(
            bytes(&[1, 0xff, 0xff, 0xff, 0xff, 0x1f]).varints_u32(2, refuse),
            Err(ReadError::MalformedVarint(_))
        ));
    }

    #[test]
    fn pairs_that_are_alike() {
        let data = [5, 7, 0x80, 1, 7, 0xff, 0xff, 1, 7, 9, 7, 9, 8, 9, 7, 1];
        let mut reader = bytes(&data);
        assert_eq!(reader.pairs(9, 7, |_| panic!("nothing was read yet")), 0);
        reader.have(1).unwrap();
        let mut read = Vec::new();
        assert_eq!(reader.pairs(3, 7, |number| read.push(number)), 3);
        assert_eq!(reader.pairs(9, 7, |number| read.push(number)), 1);
        assert_eq!(read, [5, 128, 0x7fff, 9]);
        assert_eq!((reader.u8().unwrap(), reader.u8().unwrap()), (9, 8));
        assert_eq!((reader.pairs(9, 7, |_| ()), reader.pairs(9, 7, |_| ())), (1, 0), "half a pair is none");
    }

    #[test]
    fn reads_across_the_buffer() {
        let data: Vec<u8> = (0..3 * BUFFER_LEN).map(|index| (index % 251) as u8).collect();
        let mut reader = bytes(&data);
        let mut out = Vec::new();
        reader.append(BUFFER_LEN - 3, &mut out).unwrap();
        out.extend(reader.array::<8>().unwrap());
        reader.append(BUFFER_LEN * 2 - 5, &mut out).unwrap();
        assert_eq!(out, data);
        assert_eq!(reader.consumed(), data.len() as u64);
        assert!(matches!(reader.u8(), Err(ReadError::Cut(Section::Samples))));
    }

    #[test]
    fn the_limit_holds() {
        let mut reader = Bytes::new([0; 10].as_slice(), Section::Samples, ReadError::Io, 9);
        assert!(matches!(reader.u8(), Err(ReadError::TooLarge)));
    }
}
