//! Names of frames and stacks that are the same on every host: digests of what a frame says.
//!
//! SHA-256, because names come from the profiled programs: nobody can make two stacks share an id on purpose.

use sha2::{Digest as _, Sha256};

/// A frame's identity.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FrameHash([u8; 32]);

/// Id of a stack: the first 128 bits of a digest.
pub type StackId = [u8; 16];

impl FrameHash {
    /// From what is known about a frame. Each text is preceded by its length, so that no two frames give the same text.
    #[must_use]
    pub fn new(kind: &str, function: &str, file: &str, line: Option<i32>, build_id: Option<&str>) -> Self {
        let mut digest = Sha256::new();
        for text in [kind, function, file, build_id.unwrap_or_default()] {
            digest.update((text.len() as u64).to_le_bytes());
            digest.update(text);
        }
        digest.update(line.unwrap_or(-1).to_le_bytes());
        Self(digest.finalize().into())
    }

    /// Its id in tables: 64 bits, signed because some engines have no unsigned numbers. Among ten million frames, two have the
    /// same one with a probability of 3 in a million.
    #[must_use]
    pub fn frame_id(&self) -> i64 {
        let [a, b, c, d, e, f, g, h, ..] = self.0;
        i64::from_le_bytes([a, b, c, d, e, f, g, h])
    }
}

/// The id of a stack, innermost frame first. It is made from whole digests, so colliding frame ids do not make stacks collide.
#[must_use]
pub fn stack_id<'a>(frames: impl IntoIterator<Item = &'a FrameHash>) -> StackId {
    let mut digest = Sha256::new();
    for frame in frames {
        digest.update(frame.0);
    }
    let digest: [u8; 32] = digest.finalize().into();
    *digest.first_chunk().expect("32 bytes begin with 16")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_what_tables_elsewhere_have() {
        // Tables of all hosts and versions are joined by these numbers: they must never change. From Python's hashlib and struct,
        // as docs/fleet.md describes them.
        let f = FrameHash::new("python", "main", "/srv/app.py", Some(7), None);
        let g = FrameHash::new("native", "deflate", "libz.so.1", None, None);
        assert_eq!(f.frame_id(), 3_522_907_631_219_236_289);
        assert_eq!(u128::from_be_bytes(stack_id([&g, &f])), 0x21c0f6ce_ce3d0d25_45678268_81c39045);
        assert_ne!(stack_id([&g, &f]), stack_id([&f, &g]));
    }

    #[test]
    fn everything_that_is_told_counts() {
        let base = FrameHash::new("python", "ab", "c", Some(1), None);
        for other in [
            FrameHash::new("native", "ab", "c", Some(1), None),
            FrameHash::new("python", "a", "bc", Some(1), None),
            FrameHash::new("python", "ab", "c", Some(2), None),
            FrameHash::new("python", "ab", "c", None, None),
            FrameHash::new("python", "ab", "c", Some(1), Some("9f")),
        ] {
            assert_ne!(base, other);
        }
    }
}
