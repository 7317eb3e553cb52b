//! Symbols that a file exports, found by name through its hash tables.

use object::elf;
use object::endian::LittleEndian as LE;
use object::pod::from_bytes;

use super::{Dynamic, Elf, ElfError, MAX_NAME, ReadAt, Symbol};

/// Most symbols compared with one name: hash chains of real files hold a handful.
const MAX_CHAIN: u32 = 4096;

/// A defined symbol of the dynamic table.
#[derive(Clone, Copy, Debug)]
pub(super) struct DynamicSymbol {
    /// Its number in the table, by which relocations name it.
    pub index: u32,
    /// `STT_FUNC` and so on.
    pub kind: u8,
    pub symbol: Symbol,
}

impl<R: ReadAt> Elf<R> {
    /// A defined symbol: of the dynamic table, found through its hash table.
    ///
    /// # Errors
    /// When the table makes no sense.
    pub fn dynamic_symbol(&self, name: &str) -> Result<Option<Symbol>, ElfError> {
        Ok(self.exported(name)?.map(|found| found.symbol))
    }

    pub(super) fn exported(&self, name: &str) -> Result<Option<DynamicSymbol>, ElfError> {
        match &self.dynamic {
            Some(dynamic) if dynamic.gnu_hash != 0 => self.find_by_gnu_hash(dynamic, name),
            Some(dynamic) if dynamic.hash != 0 => self.find_by_hash(dynamic, name),
            _ => Ok(None),
        }
    }

    /// Looks a name up in `.gnu.hash` (glibc, `elf/dl-lookup.c`, `do_lookup_x`).
    fn find_by_gnu_hash(&self, dynamic: &Dynamic, name: &str) -> Result<Option<DynamicSymbol>, ElfError> {
        let table = dynamic.gnu_hash;
        let [buckets, first, bloom_words, _shift] = self.words::<4>(Some(table))?;
        if buckets == 0 {
            return Ok(None);
        }
        let hash = elf::gnu_hash(name.as_bytes());
        // After the four words come the bloom filter (64-bit words), the buckets and the chains.
        let at = |words: u64| table.checked_add(16 + u64::from(bloom_words) * 8 + words * 4);
        let [mut index] = self.words::<1>(at(u64::from(hash % buckets)))?;
        if index < first {
            return Ok(None);
        }
        for _ in 0..MAX_CHAIN {
            let [chained] = self.words::<1>(at(u64::from(buckets) + u64::from(index - first)))?;
            if chained | 1 == hash | 1
                && let Some(symbol) = self.dynamic_symbol_at(dynamic, index, name)?
            {
                return Ok(Some(symbol));
            }
            if chained & 1 != 0 {
                return Ok(None);
            }
            index = index.checked_add(1).ok_or(ElfError::Malformed("hash table"))?;
        }
        Err(ElfError::Malformed("hash table"))
    }

    /// Looks a name up in `.hash` (System V ABI, "Hash Table").
    fn find_by_hash(&self, dynamic: &Dynamic, name: &str) -> Result<Option<DynamicSymbol>, ElfError> {
        let table = dynamic.hash;
        let [buckets, _chains] = self.words::<2>(Some(table))?;
        if buckets == 0 {
            return Ok(None);
        }
        let at = |words: u64| table.checked_add(8 + words * 4);
        let [mut index] = self.words::<1>(at(u64::from(elf::hash(name.as_bytes()) % buckets)))?;
        for _ in 0..MAX_CHAIN {
            if index == 0 {
                return Ok(None);
            }
            if let Some(symbol) = self.dynamic_symbol_at(dynamic, index, name)? {
                return Ok(Some(symbol));
            }
            [index] = self.words::<1>(at(u64::from(buckets) + u64::from(index)))?;
        }
        Err(ElfError::Malformed("hash table"))
    }

    /// The dynamic symbol with this index, if it is defined and has this name.
    fn dynamic_symbol_at(&self, dynamic: &Dynamic, index: u32, name: &str) -> Result<Option<DynamicSymbol>, ElfError> {
        let vaddr = dynamic.symtab.checked_add(u64::from(index) * 24).ok_or(ElfError::Malformed("symbol table"))?;
        let mut bytes = [0; 24];
        self.read_vaddr(vaddr, &mut bytes)?;
        let (symbol, _) = from_bytes::<elf::Sym64<LE>>(&bytes).map_err(|()| ElfError::Malformed("symbol table"))?;
        if symbol.st_shndx.get(LE) == elf::SHN_UNDEF {
            return Ok(None);
        }
        let text = dynamic.strtab.checked_add(u64::from(symbol.st_name.get(LE)));
        let mut found = [0; MAX_NAME];
        let found = found.get_mut(..=name.len()).ok_or(ElfError::Malformed("symbol name"))?;
        self.read_vaddr(text.ok_or(ElfError::Malformed("symbol name"))?, found)?;
        let same = found.strip_suffix(b"\0") == Some(name.as_bytes());
        let found = Symbol { vaddr: symbol.st_value.get(LE), size: symbol.st_size.get(LE) };
        Ok(same.then_some(DynamicSymbol { index, kind: symbol.st_info & 0xf, symbol: found }))
    }
}
