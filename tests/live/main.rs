//! Whole-program tests: the committed BPF object, the real profiler, live interpreters.

mod account;
mod cli;
mod dump;
mod endings;
mod entering;
mod exports;
mod faults;
mod filters;
mod gil;
mod hostile;
mod identity;
mod mixed;
mod namespaces;
mod native;
mod oracle;
mod privileges;
mod processes;
mod shares;
mod split;
mod stacks;
mod threads;
