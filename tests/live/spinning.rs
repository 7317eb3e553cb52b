//! A program that stays in one instruction: after some identical samples, gdb finds the same frames.
//!
//! Not in a chroot: gdb does not find the C libraries' rules there.

use super::native::{Sampling, by_gdb};
use std::time::{Duration, Instant};
use tachyon_common::stop::StopReason;
use tachyon_tests::{Interpreter, SharedLibrary, Target, on_each_interpreter};

on_each_interpreter!(on [pyenv_3_13 debian_3_11] long [pyenv_3_8 pyenv_3_11]: gdb_finds_the_same_frames);

/// Samples in a row that must be the same.
const SAME: usize = 10;

/// Makes gdb go on past the instruction, which is two bytes long and jumps to itself.
const GO_ON: &str = "set $pc = $pc + 2";

/// Waits until the program's last samples are all the same, and not at `last`.
fn one_stack(sampling: &mut Sampling, last: Option<u64>) -> (Vec<u64>, StopReason) {
    let deadline = Instant::now() + Duration::from_secs(60);
    let mut stacks = Vec::new();
    loop {
        std::thread::sleep(Duration::from_millis(30));
        stacks.extend(sampling.take());
        let Some(stack) = stacks.last() else { continue };
        let same = stacks.iter().rev().take_while(|other| *other == stack).count();
        if same >= SAME && stack.addresses.first().copied() != last {
            return (stack.addresses.clone(), stack.stop);
        }
        assert!(Instant::now() < deadline, "the program does not stay in one instruction: {stack:x?}");
    }
}

fn gdb_finds_the_same_frames(python: &Interpreter) {
    let library = SharedLibrary::compile("spinning", python);
    let target = Target::start_with(python, "spinning.py", &[library.text()]);
    let positions = target.facts["positions"].as_array().expect("told").clone();
    assert!(positions.len() >= 8, "with four interpreters that is 32");
    let mut sampling = Sampling::start(target.pid());
    let mut last = None;
    for position in &positions {
        let (ours, stop) = one_stack(&mut sampling, last);
        let gdb = by_gdb(target.pid(), GO_ON);
        println!("{} {position}: {} frames, gdb {}", python.name, ours.len(), gdb.len());
        // For a caller the profiler has an address within its call, and gdb the one after it; for code that a signal
        // interrupted, both have the instruction.
        let same = |(our, gdb): (&u64, &u64)| our == gdb || our + 1 == *gdb;
        assert!(
            ours.len() == gdb.len() && ours.iter().zip(&gdb).all(same) && stop == StopReason::Complete,
            "{} {position}: {stop:?} {ours:x?}\ngdb: {gdb:x?}",
            python.name
        );
        last = ours.first().copied();
    }
}
