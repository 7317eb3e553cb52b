//! Removes what the linker leaves in an object for debuggers.

use anyhow::{Context, Result, ensure};
use object::build::elf::{Builder, SectionData};

/// Bytes of the header of `.BTF.ext` (`struct btf_ext_header`) that are used here.
const HEADER: usize = 24;

/// The object without DWARF and without line numbers.
///
/// Its types are needed: they distinguish global functions from others, and a global function is verified separately.
/// `.BTF.ext`, which names them, is needed, too, but not the line numbers in it: the loader cannot place those of
/// functions that begin with inlined code.
pub(super) fn slim(bytes: &[u8]) -> Result<Vec<u8>> {
    let mut builder = Builder::read(bytes).context("the linked object cannot be read")?;
    let mut functions = false;
    for section in &mut builder.sections {
        let name = section.name.to_string();
        if name.starts_with(".debug_") || name.starts_with(".rel.debug_") || name.starts_with(".rel.BTF") {
            section.delete = true;
        } else if name == ".BTF.ext" {
            let SectionData::Data(data) = &mut section.data else { continue };
            *data = without_lines(data.as_slice())?.into();
            functions = true;
        }
    }
    ensure!(functions, "the linked object has no section `.BTF.ext`");
    builder.delete_orphans();
    // LLVM names sections and symbols in one table, which the library does not support.
    let names = builder.sections.add();
    names.name = ".shstrtab".into();
    names.sh_type = object::elf::SHT_STRTAB;
    names.sh_addralign = 1;
    names.data = SectionData::SectionString;
    let mut slim = Vec::new();
    builder.write(&mut slim).context("the object cannot be written")?;
    Ok(slim)
}

/// `.BTF.ext` with only its functions: they follow the header, lines follow them.
fn without_lines(data: &[u8]) -> Result<Vec<u8>> {
    let word = |at: usize| Some(u32::from_le_bytes(data.get(at..at + 4)?.try_into().ok()?) as usize);
    let words = || Some((word(4)?, word(8)?, word(12)?, word(16)?));
    let (header, start, len, lines) = words().context("`.BTF.ext` is shorter than its header")?;
    ensure!(start == 0 && lines == len && header >= HEADER, "`.BTF.ext` does not begin with its functions");
    let mut kept = data.get(..header + len).context("`.BTF.ext` is shorter than its header says")?.to_vec();
    // No lines, and no relocations (if the header has them): both empty, after the functions.
    kept[20..24].fill(0);
    if header >= HEADER + 8 {
        kept[24..28].copy_from_slice(&(len as u32).to_le_bytes());
        kept[28..32].fill(0);
    }
    Ok(kept)
}
