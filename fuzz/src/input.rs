//! Dice, and what they do to a seed.

/// Numbers that decoders stumble over.
const ODD: [u64; 20] = [
    0,
    1,
    7,
    8,
    0x7f,
    0x80,
    0xff,
    0x7fff,
    0x8000,
    0xffff,
    0x7fff_ffff,
    0x8000_0000,
    0xffff_fff8,
    0xffff_ffff,
    1 << 40,
    0x7fff_ffff_ffff,
    0x7fff_ffff_ffff_ffff,
    1 << 63,
    u64::MAX - 7,
    u64::MAX,
];

/// splitmix64 (Steele, Lea, Flood: "Fast splittable pseudorandom number generators", 2014).
#[derive(Debug)]
pub struct Rng(u64);

impl Rng {
    /// The dice of one execution.
    #[must_use]
    pub fn new(seed: u64, number: u64) -> Self {
        let mut rng = Self(seed.rotate_left(32) ^ number.wrapping_mul(0xd134_2543_de82_ef95));
        rng.next();
        rng
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// A number below `bound`; 0 if that is 0.
    pub(crate) fn below(&mut self, bound: usize) -> usize {
        usize::try_from(self.next() % (bound.max(1) as u64)).expect("it is below a usize")
    }

    /// One of these.
    pub(crate) fn of<'a, T>(&mut self, from: &'a [T]) -> &'a T {
        &from[self.below(from.len())]
    }

    /// A number that is unusual more often than not.
    pub(crate) fn odd(&mut self) -> u64 {
        match self.below(3) {
            0 => self.next() >> self.below(64),
            _ => *self.of(&ODD),
        }
    }

    /// Bytes without meaning.
    pub(crate) fn bytes(&mut self, most: usize) -> Vec<u8> {
        let len = self.below(most + 1);
        (0..len).map(|_| (self.next() & 0xff) as u8).collect()
    }

    /// A seed with some changes; now and then without any, or bytes without meaning.
    pub fn mutated(&mut self, seeds: &[Vec<u8>]) -> Vec<u8> {
        if self.below(50) == 0 {
            return self.bytes(512);
        }
        let mut bytes = self.of(seeds).clone();
        let most = if self.below(4) == 0 { 32 } else { 4 };
        for _ in 0..self.below(most) {
            self.change(&mut bytes, seeds);
        }
        bytes
    }

    fn change(&mut self, bytes: &mut Vec<u8>, seeds: &[Vec<u8>]) {
        let at = self.below(bytes.len());
        match self.below(8) {
            0 if !bytes.is_empty() => bytes[at] ^= 1 << self.below(8),
            1 if !bytes.is_empty() => bytes[at] = (self.next() & 0xff) as u8,
            2 | 3 => {
                // A number of 1 to 8 bytes, usually aligned.
                let width = *self.of(&[1_usize, 2, 4, 8]);
                let at = if self.below(4) == 0 { at } else { at / width * width };
                let number = self.odd().to_le_bytes();
                for (byte, new) in bytes.iter_mut().skip(at).zip(&number[..width]) {
                    *byte = *new;
                }
            }
            4 => bytes.truncate(at),
            5 => {
                let to = (at + self.below(64)).min(bytes.len());
                bytes.drain(at..to);
            }
            6 if bytes.len() < 1 << 18 => {
                let to = (at + self.below(256)).min(bytes.len());
                let part = bytes[at..to].to_vec();
                bytes.splice(at..at, part);
            }
            _ if bytes.len() < 1 << 18 => {
                let other = self.of(seeds);
                let from = self.below(other.len());
                let to = (from + self.below(256)).min(other.len());
                bytes.splice(at..at, other[from..to].iter().copied());
            }
            _ => {}
        }
    }
}
