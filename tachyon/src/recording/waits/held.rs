//! Records that wait for another one: the stack of a wait that has begun, or of the thread that ends one, until the
//! wait is over.
//!
//! They are kept as they came: they are decoded only once they are known to be wanted, for whichever profile is then
//! current.

use std::collections::HashMap;

/// Most bytes that are held: of 1,000 waiting threads with 100 frames each 2.6 MB.
const MOST_BYTES: usize = 64 << 20;

/// Records by thread, one for each.
#[derive(Debug, Default)]
pub(in crate::recording) struct Held {
    records: HashMap<u32, (u64, Box<[u8]>)>,
    bytes: usize,
}

impl Held {
    /// Holds the record of a thread's wait that began at `left_ns`, replacing any other record of that thread.
    pub fn hold(&mut self, tid: u32, left_ns: u64, record: &[u8]) {
        self.remove(tid);
        if self.bytes + record.len() > MOST_BYTES {
            // Drops records of ended threads, and some more: the waits of those get no stack.
            self.records.clear();
            self.bytes = 0;
        }
        self.bytes += record.len();
        self.records.insert(tid, (left_ns, record.into()));
    }

    /// The record of that wait, if there is one. Afterwards nothing is held for the thread.
    pub fn take(&mut self, tid: u32, left_ns: u64) -> Option<Box<[u8]>> {
        let (of, record) = self.remove(tid)?;
        (of == left_ns).then_some(record)
    }

    fn remove(&mut self, tid: u32) -> Option<(u64, Box<[u8]>)> {
        let removed = self.records.remove(&tid);
        self.bytes -= removed.as_ref().map_or(0, |(_, record)| record.len());
        removed
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_is_of_one_wait() {
        let mut held = Held::default();
        held.hold(5, 100, b"first");
        held.hold(5, 200, b"second");
        held.hold(6, 100, b"other");
        assert_eq!(held.take(5, 100), None, "that wait is over");
        assert_eq!(held.take(5, 200), None, "nothing is held of it any more");
        assert_eq!(held.take(6, 100).as_deref(), Some(&b"other"[..]));
        assert_eq!(held.bytes, 0);
    }

    #[test]
    fn memory_is_bounded() {
        let mut held = Held::default();
        let record = vec![0; 1 << 20];
        for tid in 0..200 {
            held.hold(tid, 1, &record);
            assert!(held.bytes <= MOST_BYTES && held.records.len() << 20 == held.bytes);
        }
        assert!(held.take(199, 1).is_some());
    }
}
