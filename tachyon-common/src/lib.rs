//! What the kernel side (`tachyon-ebpf`) and the user side (`tachyon`) must agree on: records on the ring
//! buffer, values of BPF maps, limits, and the walk over a CPython process's memory.
//!
//! `no_std`, no dependencies, no `unsafe` beyond plain-data casts: the same code runs inside the kernel,
//! in tests over recorded memory, and over `process_vm_readv`. Every `#[repr(C)]` type here spells out its
//! padding and has its size asserted at compile time.
#![no_std]
#![cfg_attr(target_arch = "bpf", feature(asm_experimental_arch))]

pub mod budget;
pub mod codes;
pub mod config;
pub mod event;
pub mod layout;
pub mod limits;
pub mod opaque;
pub mod process;
pub mod segment;
pub mod stop;
pub mod unwind;
pub mod verdicts;
pub mod wait;
pub mod walk;
pub mod whose;
