//! Machine code of evaluators, and where it enters a frame.

use super::*;

const OFFSETS: CframeOffsets =
    CframeOffsets { tstate_cframe: 0x38, current_frame: 8, previous: 8, is_entry: None, owner: 70 };

fn find(code: &[u8]) -> Result<Range<u64>, EnteringError> {
    window(code).map(|window| window.addresses)
}

fn window(code: &[u8]) -> Result<EnteringWindow, EnteringError> {
    entering_window(0x1000..0x1000 + code.len() as u64, OFFSETS, |vaddr, into| {
        let start = vaddr.checked_sub(0x1000).and_then(|start| usize::try_from(start).ok());
        let there = start.and_then(|start| code.get(start..)).filter(|there| !there.is_empty());
        let Some(there) = there else { return false };
        into.fill(0xcc);
        let len = there.len().min(into.len());
        into[..len].copy_from_slice(&there[..len]);
        true
    })
}

// push rbp; mov rbp, rsp; sub rsp, 0x40; lea rax, [rbp-0x30]; mov [rdi+0x38], rax: 0x10 bytes.
const PUBLISH: &[u8] =
    &[0x55, 0x48, 0x89, 0xe5, 0x48, 0x83, 0xec, 0x40, 0x48, 0x8d, 0x45, 0xd0, 0x48, 0x89, 0x47, 0x38];
// mov [rsp+0x18], rsi: the same slot as [rbp-0x28].
const FILL: &[u8] = &[0x48, 0x89, 0x74, 0x24, 0x18];

#[test]
fn found_across_frame_and_stack_pointer() {
    assert_eq!(find(&[PUBLISH, FILL].concat()), Ok(0x1010..0x1015));
    // mov [rsp+0x10], rsi fills another slot; movups [rsp+0x10], xmm0 fills both.
    let other = [0x48, 0x89, 0x74, 0x24, 0x10];
    assert_eq!(find(&[PUBLISH, &other, FILL].concat()), Ok(0x1010..0x101a));
    assert_eq!(find(&[PUBLISH, &[0x0f, 0x11, 0x44, 0x24, 0x10]].concat()), Ok(0x1010..0x1015));
}

#[test]
fn where_the_evaluator_keeps_its_cframe_is_told() {
    // At rbp - 0x30, while the stack pointer is at rbp - 0x40.
    let found = window(&[PUBLISH, FILL].concat()).expect("found");
    assert_eq!((found.cframe_offset, found.evaluator), (Some(0x10), 0x1000..0x1015));
    // After `and rsp, -32` the distance from anything computed before is unknown: lea first, then the alignment.
    let aligned = [&PUBLISH[..12], &[0x48, 0x83, 0xe4, 0xe0], &PUBLISH[12..], &[0x48, 0x89, 0x75, 0xd8]].concat();
    assert_eq!(window(&aligned).expect("found").cframe_offset, None);
}

#[test]
fn unoptimized_code_keeps_tstate_in_memory() {
    // push rbp; mov rbp, rsp; sub rsp, 0x40; mov [rbp-0x38], rdi; mov rax, [rbp-0x38]; lea rdx, [rbp-0x30];
    // mov [rax+0x38], rdx; mov rdx, [rbp-0x40]; mov [rbp-0x28], rdx
    let code = [
        &PUBLISH[..8],
        &[0x48, 0x89, 0x7d, 0xc8, 0x48, 0x8b, 0x45, 0xc8, 0x48, 0x8d, 0x55, 0xd0, 0x48, 0x89, 0x50, 0x38],
        &[0x48, 0x8b, 0x55, 0xc0, 0x48, 0x89, 0x55, 0xd8],
    ];
    assert_eq!(find(&code.concat()), Ok(0x1018..0x1020));
}

#[test]
fn a_branch_before_is_followed_one_inside_is_refused() {
    // test rdi, rdi; je +1; ret; then the window: only the detour reaches it.
    let code = [&[0x48, 0x85, 0xff, 0x74, 0x01, 0xc3][..], PUBLISH, FILL].concat();
    assert_eq!(find(&code), Ok(0x1016..0x101b));
    let code = [PUBLISH, &[0x74, 0x01], FILL].concat();
    assert_eq!(find(&code), Err(EnteringError::Branches(0x1010)));
    let code = [PUBLISH, &[0xe8, 0, 0, 0, 0], FILL].concat();
    assert_eq!(find(&code), Err(EnteringError::Branches(0x1010)));
}

#[test]
fn code_without_the_stores_is_refused_in_bounded_time() {
    assert_eq!(find(&[]), Err(EnteringError::NotPublished));
    assert_eq!(find(&[0xc3]), Err(EnteringError::NotPublished));
    assert_eq!(find(&[0xeb, 0xfe]), Err(EnteringError::NotPublished), "jumps to itself");
    assert_eq!(find(&[0x74, 0xfe].repeat(1000)), Err(EnteringError::NotPublished), "branches to itself");
    assert_eq!(find(PUBLISH), Err(EnteringError::NotFilled(0x1010)));
    // The slot was already stored to: mov [rbp-0x28], rsi, then the lea and the publishing store.
    let code = [&PUBLISH[..8], &[0x48, 0x89, 0x75, 0xd8], &PUBLISH[8..], FILL].concat();
    assert_eq!(find(&code), Err(EnteringError::FilledBefore));
}
