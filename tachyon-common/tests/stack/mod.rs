//! A made-up stack and its tables, for the tests of the native walk.

use std::cell::Cell;
use std::collections::BTreeMap;
use tachyon_common::limits::{MAX_NATIVE_FRAMES, NATIVE_FRAMES_PER_STEP};
use tachyon_common::stop::StopReason;
use tachyon_common::unwind::{AddressSink, NativeWalk, Range, Row, Rule, Slices, Space, StackBuffer, pages};
use tachyon_common::walk::{Unreadable, UserMemory};

/// Memory by the word, and tables.
#[derive(Default)]
pub struct Machine {
    pub words: BTreeMap<u64, u64>,
    pub ranges: Vec<Range>,
    pub rows: Vec<Row>,
    pub reads: Cell<usize>,
    /// One of [`tachyon_common::config::machine`].
    pub processor: u32,
}

impl Machine {
    /// Code at an address whose rules hold for 16 bytes each, in order.
    pub fn with_code(code: u64, rules: &[Rule]) -> Self {
        let rows: Vec<Row> = (0..).zip(rules).map(|(at, rule)| Row::new(at * 16, *rule)).collect();
        let end = code + rows.len() as u64 * 16;
        let pages = pages::pages_of(0, rows.last().map_or(0, |row| row.pc())) as u16;
        let range = Range { start: code, end, bias: code, first_row: 0, rows: rows.len() as u16, pages };
        let index: Vec<Row> = pages::index(&rows).collect();
        Self { rows: [rows, index].concat(), ranges: vec![range], ..Self::default() }
    }

    /// Walks to the end: how it ended, where it stands, and the addresses.
    pub fn finish(&self, walk: NativeWalk) -> (StopReason, NativeWalk, Vec<u64>) {
        self.finish_from(walk, Vec::new())
    }

    /// The same, of a walk that has given these addresses already.
    pub fn finish_from(&self, mut walk: NativeWalk, addresses: Vec<u64>) -> (StopReason, NativeWalk, Vec<u64>) {
        let mut addresses = Addresses(addresses);
        let space = Space { image: 1, count: self.ranges.len() as u32, ..Space::default() };
        let tables = Slices { ranges: &self.ranges, rows: &self.rows, machine: self.processor };
        let mut stack = StackBuffer::default();
        let most = MAX_NATIVE_FRAMES / NATIVE_FRAMES_PER_STEP + 1;
        let stop = (0..most).find_map(|_| walk.step(self, &tables, space, &mut stack, &mut addresses));
        (stop.expect("a walk ends within its steps"), walk, addresses.0)
    }
}

impl UserMemory for Machine {
    fn read(&self, addr: u64, into: &mut [u8]) -> Result<(), Unreadable> {
        self.reads.set(self.reads.get() + 1);
        for (at, word) in (addr..).step_by(8).zip(into.chunks_mut(8)) {
            word.copy_from_slice(&self.words.get(&at).ok_or(Unreadable)?.to_ne_bytes());
        }
        Ok(())
    }
}

/// The addresses of a walk.
struct Addresses(Vec<u64>);

impl AddressSink for Addresses {
    fn store(&mut self, index: usize, address: u64) {
        assert!(index < MAX_NATIVE_FRAMES && index == self.0.len());
        self.0.push(address);
    }
}
