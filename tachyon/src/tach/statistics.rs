//! The optional block before the footer: duration, rate and shares of what went wrong.

use super::header::ByteOrder;
use super::{FOOTER_LEN, HEADER_LEN, ReadError, WriteError};

/// Figures that CPython's flame graphs show. Times are seconds, shares are percent.
#[derive(Clone, Copy, Debug, Default, PartialEq, serde::Serialize)]
pub struct Statistics {
    /// Length of the recording, seconds.
    pub duration_sec: f64,
    /// Samples per second.
    pub sample_rate: f64,
    /// Samples that failed, percent; `None`: not known.
    pub error_rate: Option<f64>,
    /// Samples that were never taken, percent; may be negative; `None`: not known.
    pub missed_samples: Option<f64>,
}

/// Marks the block's end.
pub(super) const MARK: [u8; 8] = *b"TACHSTAT";
const VERSION: u32 = 1;
/// Bytes of the block as written since 3.15.0.
pub(super) const SIZE: usize = 56;
/// Bytes of the mark with version and size, and of the block's older form without shares.
pub(super) const TRAILER_SIZE: usize = 16;
const OLD_SIZE: u32 = 32;
const PRESENT_ERROR_RATE: u32 = 1;
const PRESENT_MISSED: u32 = 2;

impl Statistics {
    /// What no reader would accept, if anything.
    fn fault(&self) -> Option<&'static str> {
        if !self.duration_sec.is_finite() || self.duration_sec < 0.0 {
            Some("the duration is no finite number from 0")
        } else if !self.sample_rate.is_finite() || self.sample_rate < 0.0 {
            Some("the sample rate is no finite number from 0")
        } else if self.error_rate.is_some_and(|rate| !rate.is_finite() || rate < 0.0) {
            Some("the error rate is no finite number from 0")
        } else if self.missed_samples.is_some_and(|missed| !missed.is_finite()) {
            Some("the share of missed samples is no finite number")
        } else {
            None
        }
    }

    /// The block's bytes, little-endian.
    pub(super) fn encode(&self) -> Result<[u8; SIZE], WriteError> {
        if let Some(fault) = self.fault() {
            return Err(WriteError::InvalidStatistics(fault));
        }
        let mut present = 0;
        if self.error_rate.is_some() {
            present |= PRESENT_ERROR_RATE;
        }
        if self.missed_samples.is_some() {
            present |= PRESENT_MISSED;
        }
        let mut out = Vec::with_capacity(SIZE);
        out.extend(self.duration_sec.to_le_bytes());
        out.extend(self.sample_rate.to_le_bytes());
        out.extend(self.error_rate.unwrap_or(0.0).to_le_bytes());
        out.extend(self.missed_samples.unwrap_or(0.0).to_le_bytes());
        out.extend(present.to_le_bytes());
        out.extend(0_u32.to_le_bytes());
        out.extend(MARK);
        out.extend(VERSION.to_le_bytes());
        out.extend(u32::try_from(SIZE).expect("56 fits").to_le_bytes());
        Ok(out.try_into().expect("the fields add up to the block's size"))
    }

    /// Where the block starts and how long it is, when the 16 bytes before the footer say that there is one.
    pub(super) fn locate(
        trailer: &[u8; TRAILER_SIZE],
        order: ByteOrder,
        file_size: u64,
    ) -> Result<Option<(u64, usize)>, ReadError> {
        let [mark @ .., v0, v1, v2, v3, s0, s1, s2, s3] = trailer;
        if *mark != MARK {
            return Ok(None);
        }
        let size = order.u32([*s0, *s1, *s2, *s3]);
        if size < OLD_SIZE {
            return Err(ReadError::InvalidStatistics("smaller than any version of it"));
        }
        let end = file_size.saturating_sub(FOOTER_LEN);
        let Some(start) = end.checked_sub(u64::from(size)).filter(|&start| start >= HEADER_LEN) else {
            return Err(ReadError::InvalidStatistics("larger than the file"));
        };
        if order.u32([*v0, *v1, *v2, *v3]) != VERSION {
            return Ok(None);
        }
        let len = if u64::from(size) >= SIZE as u64 { SIZE } else { OLD_SIZE as usize };
        Ok(Some((start, len)))
    }

    /// Reads the block's first bytes, 32 or 56 of them.
    pub(super) fn decode(bytes: &[u8], order: ByteOrder) -> Result<Self, ReadError> {
        let number = |index: usize| {
            let bytes: Option<[u8; 8]> = bytes.get(index * 8..index * 8 + 8).and_then(|bytes| bytes.try_into().ok());
            bytes.map(|bytes| order.u64(bytes)).ok_or(ReadError::InvalidStatistics("cut"))
        };
        let mut statistics = Self {
            duration_sec: f64::from_bits(number(0)?),
            sample_rate: f64::from_bits(number(1)?),
            error_rate: None,
            missed_samples: None,
        };
        if bytes.len() >= SIZE {
            let present = order.u32(bytes[32..36].try_into().expect("the slice has the array's length"));
            if present & PRESENT_ERROR_RATE != 0 {
                statistics.error_rate = Some(f64::from_bits(number(2)?));
            }
            if present & PRESENT_MISSED != 0 {
                statistics.missed_samples = Some(f64::from_bits(number(3)?));
            }
        }
        match statistics.fault() {
            Some(fault) => Err(ReadError::InvalidStatistics(fault)),
            None => Ok(statistics),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn trailer(bytes: &[u8]) -> [u8; TRAILER_SIZE] {
        bytes[bytes.len() - TRAILER_SIZE..].try_into().unwrap()
    }

    #[test]
    fn comes_back() {
        for (error_rate, missed_samples) in [(None, None), (Some(1.25), None), (Some(0.0), Some(-0.5))] {
            let statistics = Statistics { duration_sec: 12.5, sample_rate: 99.0, error_rate, missed_samples };
            let bytes = statistics.encode().unwrap();
            let located = Statistics::locate(&trailer(&bytes), ByteOrder::Little, 1000).unwrap();
            assert_eq!(located, Some((1000 - 32 - 56, SIZE)));
            assert_eq!(Statistics::decode(&bytes, ByteOrder::Little).unwrap(), statistics);
        }
    }

    #[test]
    fn old_form_has_no_shares() {
        let mut bytes = Vec::new();
        bytes.extend(2.0_f64.to_le_bytes());
        bytes.extend(50.0_f64.to_le_bytes());
        bytes.extend(MARK);
        bytes.extend(1_u32.to_le_bytes());
        bytes.extend(32_u32.to_le_bytes());
        assert_eq!(
            Statistics::locate(&trailer(&bytes), ByteOrder::Little, 1000).unwrap(),
            Some((1000 - 32 - 32, OLD_SIZE as usize))
        );
        let statistics = Statistics::decode(&bytes, ByteOrder::Little).unwrap();
        assert_eq!((statistics.duration_sec, statistics.sample_rate), (2.0, 50.0));
        assert_eq!((statistics.error_rate, statistics.missed_samples), (None, None));
    }

    #[test]
    fn nonsense_is_refused() {
        let bytes = Statistics::default().encode().unwrap();
        let mut small = trailer(&bytes);
        small[12] = 31;
        assert!(Statistics::locate(&small, ByteOrder::Little, 1000).is_err());
        assert!(Statistics::locate(&trailer(&bytes), ByteOrder::Little, 100).is_err());
        for bad in [
            Statistics { duration_sec: f64::NAN, ..Statistics::default() },
            Statistics { sample_rate: -1.0, ..Statistics::default() },
            Statistics { error_rate: Some(-1.0), ..Statistics::default() },
            Statistics { missed_samples: Some(f64::INFINITY), ..Statistics::default() },
        ] {
            assert!(bad.encode().is_err(), "{bad:?}");
        }
    }
}
