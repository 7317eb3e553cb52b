//! Names for native functions that no symbol table names: the object they are in and where they start.

/// The name for a function that starts at this address of its file.
#[must_use]
pub fn name_of_address(vaddr: u64) -> String {
    format!("0x{vaddr:x}")
}

/// Object and address from such a name in a frame: `object!0x4a3c0`.
#[must_use]
pub fn address_of_name(shown: &str) -> Option<(&str, u64)> {
    let (object, digits) = shown.rsplit_once("!0x")?;
    // Only as written here: `0X`, signs and leading zeros belong to some function's real name.
    let vaddr = u64::from_str_radix(digits, 16).ok().filter(|vaddr| format!("{vaddr:x}") == digits)?;
    Some((object, vaddr))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_leads_back_to_its_address() {
        let shown = format!("etree.so!{}", name_of_address(0x4_a3c0));
        assert_eq!((shown.as_str(), address_of_name(&shown)), ("etree.so!0x4a3c0", Some(("etree.so", 0x4_a3c0))));
        for other in ["etree.so!parse", "etree.so!0x", "etree.so!0x04", "etree.so!0x4A", "0x4a", "a!0x+4", "a!0xzz"] {
            assert_eq!(address_of_name(other), None, "{other}");
        }
    }
}
