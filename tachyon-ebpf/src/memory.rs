//! The target's memory, as the helpers give it.

use crate::layouts::layout_of;
use crate::maps::config;
use crate::sample::Scratch;
use aya_ebpf::helpers::generated::bpf_probe_read_user;
use tachyon_common::layout::Layout;
use tachyon_common::opaque;
use tachyon_common::unwind::{NativeWalk, StackBuffer};
use tachyon_common::walk::{CodeBuffer, Content, FrameWalk, Identified, OwnStack, StackScan, Unreadable, UserMemory};

/// Memory of the interrupted process. Pages that are not present are unreadable: no helper may fault here.
pub struct CurrentProcess;

impl UserMemory for CurrentProcess {
    #[inline(always)]
    fn read(&self, addr: u64, into: &mut [u8]) -> Result<(), Unreadable> {
        // SAFETY: `into` is valid for writes of its length; the helper checks `addr` itself.
        let result = unsafe { bpf_probe_read_user(into.as_mut_ptr().cast(), into.len() as u32, addr as *const _) };
        if result == 0 { Ok(()) } else { Err(Unreadable) }
    }

    #[inline(always)]
    fn read_or_zero(&self, addr: u64, into: &mut [u8]) {
        // The helper zeroes what it cannot fill (`bpf_probe_read_user_common`, kernel/trace/bpf_trace.c).
        // SAFETY: as above.
        unsafe { bpf_probe_read_user(into.as_mut_ptr().cast(), into.len() as u32, addr as *const _) };
    }

    #[inline(always)]
    fn identify(&self, walk: &mut FrameWalk, _layout: &Layout, _seed: u64, code: u64, buffer: &mut CodeBuffer) -> bool {
        // Both are those of this CPU's scratch, which the functions look up themselves: the compiler must not think that they
        // do not change.
        let (walk, buffer) = (opaque::place(walk), opaque::place(buffer));
        let identified = identify_code(code);
        if identified == Identified::OfAnotherFile as u64 {
            let _zero = identify_file();
        }
        if identified != Identified::Unreadable as u64 {
            let _zero = identify_table();
        }
        let _same = (opaque::place(walk), opaque::place(buffer));
        identified != Identified::Unreadable as u64
    }

    #[inline(always)]
    fn look_at_eight(&self, scan: &mut StackScan, _stack: OwnStack, _buffer: &StackBuffer, eight: u32) {
        // As above.
        let scan = opaque::place(scan);
        let _zero = look_at_eight(eight);
        let _same = opaque::place(scan);
    }

    #[inline(always)]
    fn load(&self, walk: &mut NativeWalk, stack: &mut StackBuffer, address: u64) -> u64 {
        // As above.
        let (walk, stack) = (opaque::place(walk), opaque::place(stack));
        let loaded = load_word(address);
        let _same = (opaque::place(walk), opaque::place(stack));
        loaded
    }

    #[inline(always)]
    fn hash_pieces(&self, content: &mut Content) {
        // As above.
        let content = opaque::place(content);
        let _zero = hash_pieces();
        let _same = opaque::place(content);
    }

    #[inline(always)]
    fn hash_some_pieces(&self, content: &mut Content) -> bool {
        // As above.
        let content = opaque::place(content);
        let more = hash_some_pieces();
        let _same = opaque::place(content);
        more != 0
    }

    #[inline(always)]
    fn hash_piece(&self, content: &mut Content) -> bool {
        // As above.
        let content = opaque::place(content);
        let more = hash_piece();
        let _same = opaque::place(content);
        more != 0
    }
}

/// [`FrameWalk::identify`] of this CPU's scratch. A global function, as [`crate::sample::walk_python_frames`] is.
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn identify_code(code: u64) -> u64 {
    let Some(state) = Scratch::state() else { return Identified::Unreadable as u64 };
    let Some(layout) = layout_of(state.process.layout) else { return Identified::Unreadable as u64 };
    state.walk.identify(&CurrentProcess, layout, config!(seed), code, &mut state.code_buffer) as u64
}

/// [`FrameWalk::identify_file`] of this CPU's scratch, likewise. Always 0.
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn identify_file() -> u64 {
    let Some(state) = Scratch::state() else { return 0 };
    let Some(layout) = layout_of(state.process.layout) else { return 0 };
    state.walk.identify_file(&CurrentProcess, layout, &mut state.code_buffer);
    0
}

/// [`FrameWalk::identify_table`] of this CPU's scratch, likewise. Always 0.
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn identify_table() -> u64 {
    let Some(state) = Scratch::state() else { return 0 };
    let Some(layout) = layout_of(state.process.layout) else { return 0 };
    state.walk.identify_table(&CurrentProcess, layout, &mut state.code_buffer);
    0
}

/// [`StackScan::look_at_eight`] of this CPU's scratch, likewise. Always 0.
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn look_at_eight(eight: u32) -> u64 {
    let Some(state) = Scratch::state() else { return 0 };
    state.search.scan.look_at_eight(state.own_stack, &state.stack_buffer, eight);
    0
}

/// [`NativeWalk::load`] of this CPU's scratch, likewise: 1 or 0.
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn load_word(address: u64) -> u64 {
    let Some(state) = Scratch::state() else { return 0 };
    state.native.load(&CurrentProcess, &mut state.stack_buffer, address)
}

/// [`Content::pieces`] of this CPU's scratch, likewise. Always 0.
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn hash_pieces() -> u64 {
    let Some(state) = Scratch::state() else { return 0 };
    state.code_buffer.content.pieces(&CurrentProcess);
    0
}

/// [`Content::some_pieces`] of this CPU's scratch, likewise: 1 or 0.
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn hash_some_pieces() -> u64 {
    let Some(state) = Scratch::state() else { return 0 };
    u64::from(state.code_buffer.content.some_pieces(&CurrentProcess))
}

/// [`Content::piece`] of this CPU's scratch, likewise: 1 or 0.
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn hash_piece() -> u64 {
    let Some(state) = Scratch::state() else { return 0 };
    u64::from(state.code_buffer.content.piece(&CurrentProcess))
}

/// `value & MASK`, done where it stands: the compiler may neither drop the mask nor move it away from its use, and so
/// the verifier sees the bound.
#[inline(always)]
pub fn masked<const MASK: u32>(value: usize) -> usize {
    let mut value = value as u64;
    // SAFETY: one arithmetic instruction on a register.
    unsafe {
        core::arch::asm!("{value} &= {mask}", value = inout(reg) value, mask = const MASK, options(pure, nomem, nostack));
    }
    value as usize
}
