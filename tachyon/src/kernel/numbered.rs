//! Tables of values that process entries refer to by number: processes of one build share theirs.

use super::object::take;
use super::pod::Pod;
use super::{Kernel, KernelError};
use aya::Ebpf;
use aya::maps::{Array, MapData};
use tachyon_common::layout::Layout;
use tachyon_common::whose::{Asyncio, Greenlets, ThreadLocal};

/// A table that holds each value once.
pub(super) struct Numbered<T>
where
    Pod<T>: aya::Pod,
{
    name: &'static str,
    map: Array<MapData, Pod<T>>,
    known: Vec<T>,
    /// The first number: 1 if 0 stands for "none".
    first: u32,
    entries: u32,
}

impl<T: Copy + PartialEq> Numbered<T>
where
    Pod<T>: aya::Pod,
{
    /// Takes the map of that name and size, empty.
    pub fn of(ebpf: &mut Ebpf, name: &'static str, first: u32, entries: u32) -> Result<Self, KernelError> {
        Ok(Self { name, map: take(ebpf, name)?, known: Vec::new(), first, entries })
    }

    /// The number of a value, which is added if it is new; `None`: the table is full.
    pub fn number(&mut self, value: &T) -> Result<Option<u32>, KernelError> {
        let known = self.known.iter().position(|known| known == value);
        let Ok(at) = u32::try_from(known.unwrap_or(self.known.len())) else { return Ok(None) };
        let number = self.first + at;
        if known.is_some() {
            return Ok(Some(number));
        }
        if number >= self.entries {
            return Ok(None);
        }
        self.map.set(number, Pod(*value), 0).map_err(KernelError::map(self.name))?;
        self.known.push(*value);
        Ok(Some(number))
    }
}

impl Kernel {
    /// The number of a layout, which is stored if it is new.
    ///
    /// # Errors
    /// When there are too many.
    pub fn layout_number(&mut self, layout: &Layout) -> Result<u32, KernelError> {
        self.widen_if(|made_for| made_for.layout != *layout)?;
        self.layouts.number(layout)?.ok_or(KernelError::TooManyLayouts)
    }

    /// The number for where asyncio keeps the running task; `None`: there are too many.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn asyncio_number(&mut self, asyncio: &Asyncio) -> Result<Option<u16>, KernelError> {
        self.widen_if(|made_for| !made_for.tasks)?;
        Ok(self.asyncio.number(asyncio)?.and_then(|number| u16::try_from(number).ok()))
    }

    /// The number for where a thread keeps its span, likewise.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn spans_number(&mut self, place: &ThreadLocal) -> Result<Option<u16>, KernelError> {
        Ok(self.spans.number(place)?.and_then(|number| u16::try_from(number).ok()))
    }

    /// The number for where threads keep their greenlets, likewise.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn greenlets_number(&mut self, place: &Greenlets) -> Result<Option<u16>, KernelError> {
        self.widen_if(|made_for| !made_for.greenlets)?;
        Ok(self.greenlets.number(place)?.and_then(|number| u16::try_from(number).ok()))
    }
}
