//! Whole-program tests: the committed BPF object, the real profiler, live interpreters.

mod account;
mod cli;
mod collector;
mod dump;
mod embedded;
mod endings;
mod entering;
mod faults;
mod filters;
mod free_threaded;
mod gil;
mod hostile;
mod identity;
mod interpreters;
mod jit;
mod namespaces;
mod opcodes;
mod oracle;
mod privileges;
mod processes;
mod shares;
mod stacks;
mod threads;
