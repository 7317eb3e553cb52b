//! What tells code objects apart, over made-up memory.

#[allow(dead_code, reason = "the tests of the walk use all of it")]
mod image;

use image::{Family, Image};
use std::collections::BTreeSet;
use tachyon_common::layout::Layout;
use tachyon_common::limits::TEXT_READ;
use tachyon_common::walk::{CodeBuffer, CodeIdentity, TextHash, code_identity, linetable_len};

fn identity(image: &Image, code: u64) -> CodeIdentity {
    let (buffer, file) = (&mut CodeBuffer::default(), &mut TextHash::default());
    code_identity(&image.memory, &image.layout, 1, code, buffer, file).expect("it is readable")
}

/// Tables that end with their page, are shorter than what is hashed, or lie about their length.
#[test]
fn line_tables_enter_the_identity() {
    for family in Family::ALL {
        let mut image = Image::new(family);
        let tables: [&[u8]; 5] = [b"", b"12345678", b"12345678a", &[1; 40], &[2; 40]];
        let codes = tables.map(|table| image.code(1, table));
        let prints: BTreeSet<u64> = codes.iter().map(|&code| identity(&image, code).fingerprint).collect();
        assert_eq!(prints.len(), tables.len(), "{family:?}");
        let len = |image: &Image, table| linetable_len(&image.memory, &image.layout, table);
        for (code, table) in codes.into_iter().zip(tables) {
            assert_eq!(len(&image, identity(&image, code).linetable), table.len() as u64, "{family:?}");
        }
        // The bytes are part of it where they are whole words of the table; the length always is.
        let known = identity(&image, codes[3]);
        image.memory.put_u64(known.linetable, image.layout.ob_size, 1 << 40);
        let claimed = identity(&image, codes[3]);
        assert_eq!(len(&image, known.linetable), 1 << 40, "a claim, not a promise");
        assert_ne!(claimed.fingerprint, known.fingerprint);
        image.memory.pieces.remove(&known.linetable);
        assert_ne!(identity(&image, codes[3]).fingerprint, known.fingerprint, "{family:?}: one without its table");
        assert_eq!(len(&image, known.linetable), 0);
    }
}

/// A code object that lies where another lay, with all of its strings and its line table where that one's lay.
#[test]
fn a_recycled_code_object_is_another() {
    for family in Family::ALL {
        let mut image = Image::new(family);
        let code = image.code(1, b"12345678");
        let first = identity(&image, code);
        assert_eq!(identity(&image, code), first, "{family:?}");
        if Layout::present(image.layout.code_version) {
            image.memory.put_u32(code, image.layout.code_version, 77);
            let numbered = identity(&image, code);
            assert_ne!(numbered.fingerprint, first.fingerprint, "{family:?}");
            image.memory.put(first.filename, image.layout.unicode_ascii_size, b"h");
            assert_ne!(identity(&image, code).fingerprint, numbered.fingerprint, "{family:?}: a forked process's");
            image.memory.put_u32(code, image.layout.code_version, 78);
            assert_ne!(identity(&image, code).fingerprint, numbered.fingerprint, "{family:?}");
            image.memory.put_u32(code, image.layout.code_version, 0);
        }
        for string in [first.qualname, first.filename] {
            let before = identity(&image, code).fingerprint;
            image.memory.put(string, image.layout.unicode_ascii_size, b"g");
            assert_ne!(identity(&image, code).fingerprint, before, "{family:?}: same length, another text");
            let before = identity(&image, code).fingerprint;
            image.memory.put_u64(string, image.layout.unicode_length + 8, 77);
            assert_ne!(identity(&image, code).fingerprint, before, "{family:?}: another hash");
        }
    }
}

/// What lies behind a name is not the name's, and may not be there.
#[test]
fn a_name_at_the_end_of_a_page_is_the_same_name() {
    for family in Family::ALL {
        let mut image = Image::new(family);
        let code = image.code(1, b"12345678");
        let alone = identity(&image, code);
        for string in [alone.qualname, alone.filename] {
            let block = image.memory.pieces.get_mut(&string).expect("it lies there");
            let len = block.len();
            assert!(len < image.layout.unicode_length as usize + TEXT_READ, "{family:?}: {len} bytes are one read");
            block.resize(len + TEXT_READ, 0xaa);
        }
        assert_eq!(identity(&image, code), alone, "{family:?}");
    }
}
