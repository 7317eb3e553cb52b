//! A made-up program with asyncio tasks: its memory, its types, and where they keep what.

use std::cell::Cell;
use std::collections::BTreeMap;
use tachyon_common::layout::Layout;
use tachyon_common::walk::{Unreadable, UserMemory};
use tachyon_common::whose::Asyncio;

/// As many bytes as a mask has bits.
const CHUNK: u64 = 64;

/// Words and bytes at addresses; the read with this number fails.
#[derive(Default)]
pub struct Memory {
    /// By [`CHUNK`]: the bytes, and which of them there are. (Under Miri a map of single bytes takes minutes.)
    chunks: BTreeMap<u64, ([u8; CHUNK as usize], u64)>,
    pub reads: Cell<usize>,
    pub fails: Option<usize>,
}

impl UserMemory for Memory {
    fn read(&self, addr: u64, into: &mut [u8]) -> Result<(), Unreadable> {
        let number = self.reads.replace(self.reads.get() + 1);
        if self.fails == Some(number) {
            return Err(Unreadable);
        }
        let mut at = 0;
        while at < into.len() {
            let addr = addr.wrapping_add(at as u64);
            let (first, len) = ((addr % CHUNK) as usize, (into.len() - at).min((CHUNK - addr % CHUNK) as usize));
            let (bytes, there) = self.chunks.get(&(addr / CHUNK)).ok_or(Unreadable)?;
            if (there >> first).trailing_ones() < len as u32 {
                return Err(Unreadable);
            }
            into[at..at + len].copy_from_slice(&bytes[first..first + len]);
            at += len;
        }
        Ok(())
    }
}

impl Memory {
    pub fn put(&mut self, addr: u64, bytes: &[u8]) {
        for (addr, byte) in (addr..).zip(bytes) {
            let (chunk, there) = self.chunks.entry(addr / CHUNK).or_insert(([0; CHUNK as usize], 0));
            chunk[(addr % CHUNK) as usize] = *byte;
            *there |= 1 << (addr % CHUNK);
        }
    }

    pub fn word(&mut self, addr: u64, word: u64) {
        self.put(addr, &word.to_ne_bytes());
    }

    pub fn object(&mut self, addr: u64, bytes: u64, type_: u64) {
        (0..bytes / 8).for_each(|word| self.word(addr + word * 8, 0));
        self.word(addr + 8, type_);
    }
}

pub const LAYOUT: Layout = {
    // Not all fields have a constant default.
    // SAFETY: integers only.
    let mut layout: Layout = unsafe { std::mem::zeroed() };
    layout.ob_type = 8;
    layout.unicode_length = 16;
    layout.unicode_state = 32;
    layout.unicode_ascii_size = 40;
    layout.unicode_compact_size = 56;
    layout.unicode_kind_shift = 2;
    layout.unicode_compact_bit = 1 << 5;
    layout.unicode_ascii_bit = 1 << 6;
    layout.stackref_tag_mask = 1;
    layout
};

pub const ASYNCIO: Asyncio = Asyncio {
    thread_running_task: 64,
    task_size: 160,
    future_size: 110,
    task_name: 136,
    task_coro: 128,
    task_is_task: 108,
    task_awaited_by: 96,
    task_awaited_by_is_set: 109,
    coro_frame: 72,
    coro_state: 67,
    coro_awaits: [-1, -1],
    coro_executing: 0,
    awaited_below: 8,
    frame_stackpointer: 64,
    set_table: 40,
    set_mask: 32,
    type_flags: 168,
    type_basicsize: 32,
    long_tag: 16,
    long_digits: 24,
    dict_used: 16,
    keys_nentries: 24,
    keys_indices: 32,
    coro_points: 0,
};

pub const TSTATE: u64 = 0x1000;
pub const TASK_TYPE: u64 = 0x2000;
pub const STR_TYPE: u64 = 0x2200;
pub const INT_TYPE: u64 = 0x2400;
pub const CORO_TYPE: u64 = 0x2600;

/// A program with a thread and its types.
pub fn program() -> Memory {
    let mut memory = Memory::default();
    memory.object(TSTATE, 128, 0);
    for (type_, size, of) in
        [(TASK_TYPE, 168, 0), (STR_TYPE, 40, 1 << 28), (INT_TYPE, 24, 1 << 24), (CORO_TYPE, 200, 0)]
    {
        memory.object(type_, 200, 0);
        memory.word(type_ + 32, size);
        memory.word(type_ + 168, of);
    }
    memory
}

/// A task, its name behind it, its coroutines behind that: `depth` of them.
pub fn task(memory: &mut Memory, addr: u64, name: &str, depth: u64) {
    memory.object(addr, 168, TASK_TYPE);
    memory.put(addr + 108, &[1]);
    memory.word(addr + 136, addr + 0x100);
    memory.object(addr + 0x100, 48, STR_TYPE);
    memory.word(addr + 0x110, name.len() as u64);
    memory.put(addr + 0x120, &u32::to_ne_bytes(1 << 2 | 1 << 5 | 1 << 6));
    memory.put(addr + 0x128, name.as_bytes());
    for number in 0..depth {
        let coro = addr + 0x400 + number * 0x100;
        memory.object(coro, 0x100, CORO_TYPE);
        // The stack's top is the frame's own last word.
        memory.word(coro + 72 + 64, coro + 0xf8);
        // Suspended by a `yield`, or awaiting.
        memory.put(coro + 67, &[0xfe]);
        if number + 1 < depth {
            memory.put(coro + 67, &[0xff]);
            memory.word(coro + 0xf0, (coro + 0x100) | 1);
        }
    }
    memory.word(addr + 128, if depth > 0 { addr + 0x400 } else { 0 });
}
