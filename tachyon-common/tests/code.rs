//! What tells code objects apart, over made-up memory.

#[allow(dead_code, reason = "the tests of the walk use all of it")]
mod image;

use image::{Family, Image};
use std::collections::BTreeSet;
use tachyon_common::limits::{FIRST_OF_TABLE, FIRST_OF_TEXT, HASH_PIECE, HASH_PIECES_PER_SAMPLE, MAX_LINETABLE_BYTES};
use tachyon_common::walk::{CodeBuffer, CodeIdentity, TextHash, code_identity, lacks, linetable_len};

fn identity(image: &Image, code: u64) -> CodeIdentity {
    let (buffer, file) = (&mut CodeBuffer::default(), &mut TextHash::default());
    code_identity(&image.memory, &image.layout, 1, code, buffer, file).expect("it is readable")
}

/// A code object's strings, by another text each.
fn renamed(image: &mut Image, code: u64, name: &str, filename: &str) {
    let [name, filename] = [name, filename].map(|text| image.text(text));
    image.memory.put_u64(code, image.layout.code_qualname, name);
    image.memory.put_u64(code, image.layout.code_filename, filename);
}

/// Lengths around every bound of a read or of a hash's block.
fn lengths(first: u32) -> impl Iterator<Item = usize> {
    let (first, piece) = (first as usize, HASH_PIECE);
    [0, 1, 7, 8, 31, 32, 33, first - 1, first, first + 1, first + 33, first + piece, first + piece + 1, 3 * piece]
        .into_iter()
}

/// Each byte of a table of any length enters, and so does the length.
#[test]
#[cfg_attr(miri, ignore = "hashes a table for each of its bytes")]
fn whole_line_tables_enter_the_identity() {
    let families: &[Family] = if cfg!(miri) { &[Family::CFrame] } else { &Family::ALL };
    for &family in families {
        let mut prints = BTreeSet::new();
        let mut tables = 0;
        for len in lengths(FIRST_OF_TABLE) {
            let mut image = Image::new(family);
            let code = image.code(1, &vec![7; len]);
            let known = identity(&image, code);
            assert_eq!(linetable_len(&image.memory, &image.layout, known.linetable), len as u64, "{family:?}");
            assert_eq!(known.lacks, 0);
            prints.insert(known.fingerprint);
            tables += 1;
            let step = if cfg!(miri) { 301 } else { 1 };
            for at in (0..len).step_by(step).chain(len.checked_sub(1)) {
                let at = image.layout.bytes_sval + at as u32;
                image.memory.put(known.linetable, at, &[8]);
                assert_ne!(identity(&image, code).fingerprint, known.fingerprint, "{family:?}: byte {at} of {len}");
                image.memory.put(known.linetable, at, &[7]);
            }
        }
        assert_eq!(prints.len(), tables, "{family:?}");
    }
}

/// Each character of a name of any length enters, whichever the width of its characters.
#[test]
#[cfg_attr(miri, ignore = "hashes a name for each of its characters")]
fn whole_names_enter_the_identity() {
    for family in [Family::FrameObjects, Family::CFrame, Family::FreeThreaded] {
        for len in lengths(FIRST_OF_TEXT) {
            let mut image = Image::new(family);
            let code = image.code(1, b"12345678");
            let long = "n".repeat(len);
            renamed(&mut image, code, &long, &long);
            let known = identity(&image, code);
            assert_eq!(known.lacks, 0);
            let step = if cfg!(miri) { 301 } else { 1 };
            for object in [known.qualname, known.filename] {
                for at in (0..len).step_by(step) {
                    let at = image.layout.unicode_ascii_size + at as u32;
                    image.memory.put(object, at, b"m");
                    assert_ne!(identity(&image, code).fingerprint, known.fingerprint, "{family:?}: byte {at} of {len}");
                    image.memory.put(object, at, b"n");
                }
            }
            renamed(&mut image, code, &long, &(long.clone() + "n"));
            let longer = identity(&image, code).fingerprint;
            renamed(&mut image, code, &(long.clone() + "n"), &long);
            assert_eq!(BTreeSet::from([known.fingerprint, longer, identity(&image, code).fingerprint]).len(), 3);
        }
        // Two bytes a character, behind a larger head.
        let mut image = Image::new(family);
        let code = image.code(1, b"12345678");
        let wide = image.alloc(image.layout.unicode_compact_size as usize + 2 * 150);
        image.memory.put_u64(wide, image.layout.unicode_length, 150);
        let state = image.layout.unicode_compact_bit | 2 << image.layout.unicode_kind_shift;
        image.memory.put_u32(wide, image.layout.unicode_state, state);
        image.memory.put_u64(code, image.layout.code_qualname, wide);
        let known = identity(&image, code);
        assert_eq!(known.lacks, 0);
        for at in [0, 1, 149, 298, 299] {
            image.memory.put(wide, image.layout.unicode_compact_size + at, &[1]);
            assert_ne!(identity(&image, code).fingerprint, known.fingerprint, "{family:?}: byte {at}");
            image.memory.put(wide, image.layout.unicode_compact_size + at, &[0]);
        }
    }
}

/// It is what is shown, wherever it lies: what is compiled again and again is one.
#[test]
fn equal_content_is_equal() {
    for family in Family::ALL {
        let mut image = Image::new(family);
        let codes = [image.code(1, &[3; 400]), image.code(1, &[3; 400])];
        let [first, second] = codes.map(|code| identity(&image, code));
        assert_ne!(first.linetable, second.linetable);
        assert_eq!(first.fingerprint, second.fingerprint, "{family:?}");
        let other = image.code(2, &[3; 400]);
        assert_ne!(identity(&image, other).fingerprint, first.fingerprint, "{family:?}: another first line");
        renamed(&mut image, codes[0], "f.py", "f");
        assert_ne!(identity(&image, codes[0]).fingerprint, first.fingerprint, "{family:?}: names exchanged");
    }
}

/// What lies behind a string or a table is not its own, and may not be there.
#[test]
fn how_it_was_read_does_not_matter() {
    let families: &[Family] = if cfg!(miri) { &[Family::CFrame] } else { &Family::ALL };
    for &family in families {
        for len in lengths(FIRST_OF_TABLE) {
            let mut image = Image::new(family);
            let code = image.code(1, &vec![9; len]);
            renamed(&mut image, code, &"n".repeat(len), "f.py");
            let alone = identity(&image, code);
            for object in [alone.qualname, alone.filename, alone.linetable] {
                let block = image.memory.pieces.get_mut(&object).expect("it lies there");
                let len = block.len();
                block.resize(len + 1_024, 0xaa);
            }
            assert_eq!(identity(&image, code), alone, "{family:?}: {len} bytes");
        }
    }
}

/// What is not there has no part in the identity, which says so.
#[test]
fn what_is_missing_is_told() {
    for family in Family::ALL {
        let mut image = Image::new(family);
        let code = image.code(1, &[5; 4_000]);
        let whole = identity(&image, code);
        let mut prints = BTreeSet::from([whole.fingerprint]);
        for (object, bit) in
            [(whole.qualname, lacks::QUALNAME), (whole.filename, lacks::FILENAME), (whole.linetable, lacks::LINETABLE)]
        {
            let piece = image.memory.pieces.remove(&object).expect("it lies there");
            let lacking = identity(&image, code);
            assert_eq!(lacking.lacks, bit, "{family:?}");
            assert!(prints.insert(lacking.fingerprint), "{family:?}");
            // Half of a table is none.
            if bit == lacks::LINETABLE {
                image.memory.pieces.insert(object, piece[..2_000].to_vec());
                assert_eq!(identity(&image, code).lacks, bit, "{family:?}");
            }
            image.memory.pieces.insert(object, piece);
        }
        image.memory.put_u32(whole.qualname, image.layout.unicode_state, 0);
        assert_eq!(identity(&image, code).lacks, lacks::QUALNAME, "{family:?}: a string in two pieces");
    }
}

/// Of a table beyond all bounds what is shown enters, and its length; and a sample's reads are bounded.
#[test]
#[cfg_attr(miri, ignore = "hashes two megabytes")]
fn the_bounds_hold() {
    let mut image = Image::new(Family::CurrentFrame);
    let len = MAX_LINETABLE_BYTES as usize + 500;
    let code = image.code(1, &vec![7; len]);
    let known = identity(&image, code);
    assert_eq!(known.lacks, 0);
    let at = |at: u32| image.layout.bytes_sval + at;
    let [last, behind, size] = [at(MAX_LINETABLE_BYTES - 1), at(MAX_LINETABLE_BYTES), image.layout.ob_size];
    image.memory.put(known.linetable, behind, &[8]);
    assert_eq!(identity(&image, code), known, "it is not shown");
    image.memory.put(known.linetable, last, &[8]);
    assert_ne!(identity(&image, code).fingerprint, known.fingerprint);
    image.memory.put(known.linetable, last, &[7]);
    image.memory.put_u64(known.linetable, size, len as u64 - 1);
    assert_ne!(identity(&image, code).fingerprint, known.fingerprint);
    image.memory.put_u64(known.linetable, size, len as u64);

    let mut buffer = CodeBuffer::default();
    buffer.content.refill();
    let mut found = Vec::new();
    for _ in 0..3 {
        let file = &mut TextHash::default();
        let one = code_identity(&image.memory, &image.layout, 1, code, &mut buffer, file).expect("readable");
        found.push(one.lacks);
    }
    assert_eq!(found, [0, 0, lacks::LINETABLE], "{HASH_PIECES_PER_SAMPLE} pieces are two such tables and a bit");
    buffer.content.refill();
    let again = code_identity(&image.memory, &image.layout, 1, code, &mut buffer, &mut TextHash::default());
    assert_eq!(again.map(|again| again.fingerprint), Ok(known.fingerprint), "the next sample");
}
