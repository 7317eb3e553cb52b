//! Tables of where processes keep whose work their threads do.

use super::pod::Pod;
use super::{KernelError, object::take};
use aya::Ebpf;
use aya::maps::{Array, MapData};
use tachyon_common::limits::{MAX_ASYNCIO, MAX_SPANS};
use tachyon_common::whose::{Asyncio, ThreadLocal};

/// Both tables. Most hosts need a handful of entries, for processes of one build share theirs.
pub(super) struct WorkMaps {
    asyncio: Numbered<Asyncio>,
    spans: Numbered<ThreadLocal>,
}

impl WorkMaps {
    pub fn of(ebpf: &mut Ebpf) -> Result<Self, KernelError> {
        Ok(Self {
            asyncio: Numbered::of(ebpf, "ASYNCIO", MAX_ASYNCIO)?,
            spans: Numbered::of(ebpf, "SPANS", MAX_SPANS)?,
        })
    }

    /// The number of where asyncio keeps the running task; `None`: the table is full.
    pub fn asyncio(&mut self, asyncio: &Asyncio) -> Result<Option<u16>, KernelError> {
        self.asyncio.number(asyncio)
    }

    /// The number of where spans are; `None`: the table is full.
    pub fn spans(&mut self, spans: &ThreadLocal) -> Result<Option<u16>, KernelError> {
        self.spans.number(spans)
    }
}

/// A table whose values have numbers from 1 on.
struct Numbered<T>
where
    Pod<T>: aya::Pod,
{
    name: &'static str,
    map: Array<MapData, Pod<T>>,
    known: Vec<T>,
    most: usize,
}

impl<T: Copy + PartialEq> Numbered<T>
where
    Pod<T>: aya::Pod,
{
    fn of(ebpf: &mut Ebpf, name: &'static str, entries: u32) -> Result<Self, KernelError> {
        Ok(Self { name, map: take(ebpf, name)?, known: Vec::new(), most: entries as usize - 1 })
    }

    fn number(&mut self, value: &T) -> Result<Option<u16>, KernelError> {
        let at = match self.known.iter().position(|known| known == value) {
            Some(at) => at,
            None if self.known.len() >= self.most => return Ok(None),
            None => {
                let at = self.known.len();
                let index = u32::try_from(at + 1).unwrap_or(u32::MAX);
                self.map.set(index, Pod(*value), 0).map_err(KernelError::map(self.name))?;
                self.known.push(*value);
                at
            }
        };
        Ok(u16::try_from(at + 1).ok())
    }
}
