//! A made-up stack and its tables, for the tests of the native walk.

use std::cell::Cell;
use std::collections::BTreeMap;
use tachyon_common::limits::{MAX_NATIVE_FRAMES, NATIVE_FRAMES_PER_STEP};
use tachyon_common::stop::StopReason;
use tachyon_common::unwind::{AddressSink, NativeWalk, Range, Row, Rule, Space, Tables, pages};
use tachyon_common::walk::{Unreadable, UserMemory};

/// Memory by the word, and tables.
#[derive(Default)]
pub struct Machine {
    pub words: BTreeMap<u64, u64>,
    pub ranges: Vec<Range>,
    pub rows: Vec<Row>,
    pub reads: Cell<usize>,
    /// Number of the read that fails.
    pub failing: Option<usize>,
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
    pub fn finish(&self, mut walk: NativeWalk) -> (StopReason, NativeWalk, Vec<u64>) {
        let mut addresses = Addresses::default();
        let space = Space { image: 1, first: 0, count: self.ranges.len() as u32 };
        let most = MAX_NATIVE_FRAMES / NATIVE_FRAMES_PER_STEP + 1;
        let stop = (0..most).find_map(|_| walk.step(self, self, space, &mut addresses));
        (stop.expect("a walk ends within its steps"), walk, addresses.0)
    }
}

impl UserMemory for Machine {
    fn read(&self, addr: u64, into: &mut [u8]) -> Result<(), Unreadable> {
        let number = self.reads.replace(self.reads.get() + 1);
        if self.failing == Some(number) {
            return Err(Unreadable);
        }
        into.copy_from_slice(&self.words.get(&addr).ok_or(Unreadable)?.to_ne_bytes());
        Ok(())
    }
}

impl Tables for Machine {
    type Chunk = ();

    fn range(&self, index: u32) -> Option<Range> {
        self.ranges.get(index as usize).copied()
    }

    fn chunk(&self, _: u32) -> Option<()> {
        Some(())
    }

    fn row(&self, (): (), index: u32) -> Option<Row> {
        self.rows.get(index as usize).copied()
    }

    fn machine(&self) -> u32 {
        self.processor
    }
}

/// The addresses of a walk.
#[derive(Default)]
struct Addresses(Vec<u64>);

impl AddressSink for Addresses {
    fn store(&mut self, index: usize, address: u64) {
        assert!(index < MAX_NATIVE_FRAMES && index == self.0.len());
        self.0.push(address);
    }
}
