//! Allocates and frees stretches of indices in a memory that is one long array.

/// Which parts of a memory are free.
#[derive(Debug)]
pub(super) struct Room {
    pub(super) size: u32,
    /// First index and length of each free part, sorted, with something used between any two.
    pub(super) free: Vec<(u32, u32)>,
    pub(super) used: u32,
    /// Each allocation lies within one of the chunks of this length.
    chunk: u32,
}

impl Room {
    pub(super) fn new(size: u32, chunk: u32) -> Self {
        Self { size, free: vec![(0, size)], used: 0, chunk: chunk.max(1) }
    }

    /// Allocates from the first free part in which that many lie in one chunk.
    pub(super) fn take(&mut self, count: u32) -> Option<u32> {
        let (at, taken) = self.free.iter().enumerate().find_map(|(at, part)| Some((at, self.within(*part, count)?)))?;
        let (first, len) = self.free[at];
        let before = (first, taken - first);
        let behind = (taken + count, first + len - taken - count);
        self.free.splice(at..=at, [before, behind].into_iter().filter(|(_, len)| *len > 0));
        self.used += count;
        Some(taken)
    }

    /// The first index in a free part from which that many lie in one chunk.
    fn within(&self, (first, len): (u32, u32), count: u32) -> Option<u32> {
        let left = self.chunk - first % self.chunk;
        let skipped = if count <= left { 0 } else { left };
        (count <= self.chunk && u64::from(skipped) + u64::from(count) <= u64::from(len)).then(|| first + skipped)
    }

    /// Frees a part, and joins it with its neighbours.
    pub(super) fn give_back(&mut self, first: u32, count: u32) {
        self.used -= count;
        let at = self.free.partition_point(|(start, _)| *start < first);
        self.free.insert(at, (first, count));
        let mut joined: Vec<(u32, u32)> = Vec::with_capacity(self.free.len());
        for &(start, len) in &self.free {
            match joined.last_mut() {
                Some((before, before_len)) if *before + *before_len == start => *before_len += len,
                _ if len == 0 => {}
                _ => joined.push((start, len)),
            }
        }
        self.free = joined;
    }
}
