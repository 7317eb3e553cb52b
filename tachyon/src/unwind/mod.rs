//! `.eh_frame` -> compact tables for the kernel side, shared by all processes that map the same file.
//!
//! In: processes, whose ELF files are untrusted. Out: sorted rows ([`compile()`]), and which addresses of a process they
//! cover ([`UnwindTables`]). `tachyon_common::unwind`, which runs in the kernel, searches and follows them; this module
//! knows nothing about BPF and reads no process's memory, only its mappings and the files behind them.

mod compile;
mod generated;
mod part;
mod sparse;
mod store;
mod trampoline;

pub use compile::{MAX_ROWS, Refusal, Slice, Table, Windows, compile, compile_vdso, is_outermost, rules_len};
pub use generated::{Generated, GeneratedRules};
pub use part::{TablePart, parts};
pub use sparse::{RuleAt, SparseRules};
pub use store::{Identities, NoRoom, TableMemory, UnwindTables, Wanted, tables_made};
pub use trampoline::{ARENA, PREFIX, trampolines};
