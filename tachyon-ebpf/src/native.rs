//! The native stack of a sample: tables behind the common walk, and where its addresses go.

use crate::interrupt::Interrupt;
use crate::maps::{FoundRule, GOES_ON, RANGES, ROWS, RULES, SCRATCH_BYTES, SPACES, config, repair};
use crate::memory::{CurrentProcess, masked};
use crate::sample::Scratch;
use aya_ebpf::cty::c_void;
use aya_ebpf::helpers::generated::bpf_map_lookup_elem;
use core::ptr::NonNull;
use tachyon_common::config::machine;
use tachyon_common::event::{RawFrame, SampleRecord};
use tachyon_common::limits::{NATIVE_FRAMES_PER_CALL, NATIVE_FRAMES_PER_STEP, ROWS_PER_CHUNK, RULE_SLOTS};
use tachyon_common::opaque;
use tachyon_common::stop::StopReason;
use tachyon_common::unwind::{AddressSink, NativeWalk, Range, Row, Rule, Space, Tables};
use tachyon_common::walk::mix;

/// The tables in their maps.
struct MapTables;

impl Tables for MapTables {
    #[inline(always)]
    fn range(&self, index: u32) -> Option<Range> {
        RANGES.get(index).copied()
    }

    #[inline(always)]
    fn range_start(&self, index: u32) -> Option<u64> {
        RANGES.get(index).map(|range| range.start)
    }

    type Chunk = NonNull<c_void>;

    #[inline(always)]
    fn chunk(&self, index: u32) -> Option<NonNull<c_void>> {
        let chunk = index / ROWS_PER_CHUNK;
        // SAFETY: what the loader puts in the place of `ROWS` is an array of maps with keys like this one.
        NonNull::new(unsafe { bpf_map_lookup_elem((&raw const ROWS).cast_mut().cast(), (&raw const chunk).cast()) })
    }

    #[inline(always)]
    fn row(&self, chunk: NonNull<c_void>, index: u32) -> Option<Row> {
        let within = index % ROWS_PER_CHUNK;
        // SAFETY: each of those is an array map with keys like this one.
        let row = NonNull::new(unsafe { bpf_map_lookup_elem(chunk.as_ptr(), (&raw const within).cast()) })?;
        // SAFETY: a value of those maps is one word.
        Some(Row(unsafe { row.cast::<u64>().read() }))
    }

    #[inline(always)]
    fn remembered(&self, version: u32, at: u64) -> Option<Rule> {
        // SAFETY: a pointer into a map value, checked by the lookup; what racing writers tear is a miss.
        let found = unsafe { core::ptr::read_volatile(rule_slot(version, at)?) };
        let holds = found.address ^ mix(0, found.rule) == at && (found.rule >> 32) as u32 == version;
        holds.then_some(Rule(found.rule as u32))
    }

    #[inline(always)]
    fn remember(&self, version: u32, at: u64, rule: Rule) {
        let Some(slot) = rule_slot(version, at) else { return };
        let rule = u64::from(version) << 32 | u64::from(rule.0);
        // SAFETY: as above.
        unsafe { core::ptr::write_volatile(slot, FoundRule { address: at ^ mix(0, rule), rule }) };
    }

    #[inline(always)]
    fn find(&self, walk: &mut NativeWalk, _space: &Space, at: u64) {
        // Both are those of this CPU's scratch, which the function looks up itself: the compiler must not think that they do not
        // change.
        let walk = opaque::place(walk);
        let _zero = find_rule(at);
        let _same = opaque::place(walk);
    }

    #[inline(always)]
    fn machine(&self) -> u32 {
        config!(machine)
    }

    #[inline(always)]
    fn code_mask(&self) -> u64 {
        config!(code_mask)
    }

    #[inline(always)]
    fn hide(&self, mut word: u64) -> u64 {
        // SAFETY: no instruction at all.
        unsafe {
            core::arch::asm!("/* {0} */", inout(reg) word, options(pure, nomem, nostack));
        }
        word
    }
}

/// [`NativeWalk::find`] of this CPU's scratch. A global function, as `sample::frames::walk_python_frames` is. Always 0.
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn find_rule(at: u64) -> u64 {
    let Some(state) = Scratch::state() else { return 0 };
    state.native.find(&MapTables, &state.space, at);
    0
}

#[inline(always)]
fn rule_slot(version: u32, at: u64) -> Option<*mut FoundRule> {
    RULES.get_ptr_mut((mix(u64::from(version), at) as u32) & (RULE_SLOTS - 1))
}

/// Puts addresses behind the Python frames of a sample.
struct SampleAddresses<'a> {
    sample: *mut u8,
    at: u32,
    evaluator: (u64, u64),
    evaluators: &'a mut u32,
    caller_sp: &'a mut u64,
    entered_at: u64,
    entered: &'a mut u32,
}

impl AddressSink for SampleAddresses<'_> {
    #[inline(always)]
    fn store(&mut self, index: usize, address: u64) {
        let at = masked::<{ SCRATCH_BYTES as u32 - 8 }>(self.at as usize + index * 8);
        // SAFETY: masked to a word of the scratch value, which is `SCRATCH_BYTES` long.
        let word = unsafe { self.sample.add(at) }.cast::<u64>();
        // SAFETY: as above.
        unsafe { word.write(address) };
    }

    #[inline(always)]
    fn arrived(&mut self, address: u64, sp: u64) {
        // 1 where the stack pointer is not above it, else 0: no branch, for the verifier would follow each.
        let above = opaque::word(self.entered_at.wrapping_sub(sp) >> 63);
        *self.entered += 1 - above as u32;
        if address >= self.evaluator.0 && address < self.evaluator.1 && *self.evaluators < 2 {
            *self.evaluators += 1;
            *self.caller_sp = sp;
        }
    }
}

/// Starts the walk, or goes on with it: [`GOES_ON`], or the number of the [`StopReason`] why it cannot be walked.
#[inline(always)]
pub fn begin<C: Interrupt>(ctx: &C) -> u64 {
    let Some((sample, state)) = Scratch::sample_and_state() else { return StopReason::TailCallFailed as u64 };
    if state.native_at != 0 {
        return u64::from(GOES_ON);
    }
    let record = &mut sample.record;
    let frames = masked::<0x7ff>(state.walk.stored as usize);
    state.native_at = (size_of::<SampleRecord>() + frames * size_of::<RawFrame>()) as u32;
    state.native = NativeWalk::start(record.user_ip, record.user_sp, record.user_fp);
    state.entered = 0;
    if state.entered_at == 0 {
        state.entered_at = state.walk.entry_frame;
    }
    if !state.own_stack.has(state.entered_at) {
        // What is not on this stack is above no frame of it.
        state.entered_at = 0;
    }
    if record.user_sp == 0 {
        return StopReason::NoRegisters as u64;
    }
    if config!(machine) == machine::ARM64 {
        state.native.link = ctx.link();
    } else {
        state.native.leaf_known = u32::from(ctx.others(&mut state.native.leaf));
    }
    // SAFETY: a live map value, copied; one that is replaced meanwhile belongs to another image.
    match unsafe { SPACES.get(&record.tgid) } {
        Some(space) if space.image == record.image => state.space = *space,
        _ => return StopReason::NoUnwindTables as u64,
    }
    u64::from(GOES_ON)
}

/// Walks a part of the native stack. Gives the number of the [`StopReason`], or [`GOES_ON`]: call again.
#[inline(always)]
pub fn step() -> u64 {
    let mut steps = 0;
    let mut ended = u64::from(GOES_ON);
    while steps < NATIVE_FRAMES_PER_STEP / NATIVE_FRAMES_PER_CALL && ended == u64::from(GOES_ON) {
        steps += 1;
        ended = walk_native_frames();
    }
    ended
}

/// Walks [`NATIVE_FRAMES_PER_CALL`] frames, and gives the number of the reason why the walk has ended, or [`GOES_ON`]. A
/// global function, as `sample::frames::walk_python_frames` is.
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn walk_native_frames() -> u64 {
    let Some((sample, state)) = Scratch::sample_and_state() else { return u64::from(GOES_ON) };
    let end = if state.repair == repair::WANTED { state.process.evaluator_end } else { 0 };
    let mut addresses = SampleAddresses {
        sample: (&raw mut *sample).cast(),
        at: state.native_at,
        evaluator: (state.process.evaluator_start, end),
        evaluators: &mut state.evaluators,
        caller_sp: &mut state.caller_sp,
        entered_at: state.entered_at,
        entered: &mut state.entered,
    };
    let ended = state.native.frames::<NATIVE_FRAMES_PER_CALL, _, _, _>(
        &CurrentProcess,
        &MapTables,
        state.space,
        &mut state.stack_buffer,
        &mut addresses,
    );
    u64::from(ended.map_or(GOES_ON, |reason| reason as u32))
}
