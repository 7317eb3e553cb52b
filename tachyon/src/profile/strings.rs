//! Strings stored once.

use std::collections::HashMap;
use std::sync::Arc;

/// Index of a string in a [`StringTable`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct StrId(pub u32);

/// Interned strings in order of first use.
#[derive(Clone, Debug, Default)]
pub struct StringTable {
    strings: Vec<Arc<str>>,
    ids: HashMap<Arc<str>, StrId>,
    bytes: usize,
}

impl StringTable {
    /// The handle of `text`, which is stored if it is new.
    ///
    /// # Panics
    /// After 2^32 different strings.
    pub fn intern(&mut self, text: &str) -> StrId {
        if let Some(&id) = self.ids.get(text) {
            return id;
        }
        let id = StrId(u32::try_from(self.strings.len()).expect("fewer than 2^32 strings fit in memory"));
        let text: Arc<str> = Arc::from(text);
        self.bytes += text.len();
        self.strings.push(Arc::clone(&text));
        self.ids.insert(text, id);
        id
    }

    /// The string behind a handle.
    ///
    /// # Panics
    /// When the handle is of another table.
    #[must_use]
    pub fn get(&self, id: StrId) -> &str {
        &self.strings[id.0 as usize]
    }

    /// All strings, in order of their handles.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = &str> {
        self.strings.iter().map(|text| &**text)
    }

    /// Bytes of all of them.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// How many strings there are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.strings.len()
    }

    /// Whether there is none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.strings.is_empty()
    }
}
