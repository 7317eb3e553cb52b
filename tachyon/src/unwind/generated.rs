//! Rules of code that was generated at run time and is in no file: those of trampolines
//! ([`trampolines`](super::trampolines)), and those that a just-in-time compiler wrote for a debugger ([`GeneratedRules`]).

use super::Table;
use super::compile::{rules_in_memory, table_of};
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;
use tachyon_common::unwind::Rule;

/// Most rules of one process's generated code.
const MAX_RULES: usize = 1 << 17;

/// The table for a mapping of such code; its addresses are relative to the mapping.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Generated {
    pub table: Arc<Table>,
    /// The table covers this many bytes, and repeats for each such stretch up to the mapping's end.
    pub len: u64,
}

/// Rules of one process's generated code, by address in that process.
#[derive(Clone, Debug, Default)]
pub struct GeneratedRules {
    /// By start: end and rule.
    rules: BTreeMap<u64, (u64, Rule)>,
}

impl GeneratedRules {
    /// Adds the rules of an `.eh_frame` section with these bytes at an address of the process. What makes no sense is left out.
    pub fn add(&mut self, address: u64, bytes: &[u8]) {
        for (start, end, rule) in rules_in_memory(bytes, address) {
            if self.rules.len() < MAX_RULES {
                self.rules.insert(start, (end, rule));
            }
        }
    }

    /// The table for a mapping; `None`: nothing is known about it.
    #[must_use]
    pub fn table(&self, mapping: Range<u64>) -> Option<Generated> {
        let within = self.rules.range(mapping.clone()).filter(|(_, (end, _))| *end <= mapping.end);
        let pieces = within.map(|(&start, &(end, rule))| (start - mapping.start, end - mapping.start, rule));
        let table = table_of(pieces);
        (!table.rows.is_empty()).then(|| Generated { table: Arc::new(table), len: mapping.end - mapping.start })
    }

    /// Approximate number of bytes that are kept.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.rules.len() * 40
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.rules.is_empty()
    }
}

#[cfg(all(test, target_arch = "x86_64"))]
mod tests {
    use super::*;
    use tachyon_common::unwind::{kind, saved};

    /// `.eh_frame` of one function: `push rbp` at its start, `pop rbp` before its last byte, as LLVM writes it.
    fn section(at: u64, function: u64, len: u32) -> Vec<u8> {
        let mut bytes =
            vec![0x14, 0, 0, 0, 0, 0, 0, 0, 1, b'z', b'R', 0, 1, 0x78, 16, 1, 0x1b, 0x0c, 7, 8, 0x90, 1, 0, 0];
        let begin = (function as i64 - (at as i64 + bytes.len() as i64 + 8)) as i32;
        bytes.extend([0x14, 0, 0, 0, 0x1c, 0, 0, 0]);
        bytes.extend(begin.to_le_bytes());
        bytes.extend(len.to_le_bytes());
        // DW_CFA_advance_loc 1, def_cfa_offset 16, offset rbp at 2; advance to the last byte, def_cfa_offset 8.
        bytes.extend([0, 0x41, 0x0e, 16, 0x86, 2, 0x40 | (len as u8 - 2), 0x0e]);
        bytes.extend([8, 0, 0, 0]);
        let rest = bytes.len() - 24 - 4;
        bytes[24] = rest as u8;
        bytes.extend([0; 4]);
        bytes
    }

    #[test]
    fn rules_of_memory_are_found_by_mapping() {
        let mut rules = GeneratedRules::default();
        rules.add(0x7000_2000, &section(0x7000_2000, 0x7000_0010, 32));
        rules.add(0x7000_2100, &section(0x7000_2100, 0x7000_0100, 16));
        let found = rules.table(0x7000_0000..0x7000_1000).expect("two functions");
        assert_eq!(found.len, 0x1000);
        let sp = |cfa, fp| Rule::new(kind::SP, cfa, fp).unwrap();
        let all = [0, 0x10, 0x11, 0x2f, 0x30, 0x100, 0x101, 0x110].map(|at| found.table.rule(at));
        let (first, pushed) = (sp(8, saved::UNCHANGED), sp(16, 2));
        assert_eq!(all, [Rule::GAP, first, pushed, sp(8, 2), Rule::GAP, first, pushed, Rule::GAP]);
        assert_eq!(rules.table(0x7000_1000..0x7000_2000), None);
    }

    #[test]
    fn what_makes_no_sense_is_left_out() {
        let whole = section(0x2000, 0x1000, 32);
        for cut in 0..whole.len() {
            let mut rules = GeneratedRules::default();
            rules.add(0x2000, &whole[..cut]);
            for at in 0..cut {
                let mut bytes = whole[..cut].to_vec();
                bytes[at] ^= 0xff;
                rules.add(0x2000, &bytes);
            }
            let _any = rules.table(0..u64::MAX);
        }
    }
}
