//! A wrapper that makes shared types usable as map values.

/// A type of `tachyon-common` as the value of a BPF map.
#[derive(Clone, Copy, Debug, Default)]
#[repr(transparent)]
pub struct Pod<T>(pub T);

impl<T> Pod<T>
where
    Self: aya::Pod,
{
    /// The value as it is in memory.
    pub(super) fn bytes(&self) -> &[u8] {
        // SAFETY: as many bytes as the value has, for as long as it is borrowed; none of them is padding, see the types below.
        unsafe { std::slice::from_raw_parts(std::ptr::from_ref(self).cast(), size_of::<Self>()) }
    }

    /// The value that is these bytes in memory; `None`: they are too few or too many.
    pub(super) fn of_bytes(bytes: &[u8]) -> Option<Self> {
        // SAFETY: as many bytes as are read, at any alignment; they are valid whatever they are, see the types below.
        (bytes.len() == size_of::<Self>()).then(|| unsafe { bytes.as_ptr().cast::<Self>().read_unaligned() })
    }
}

macro_rules! pod {
    ($($shared:ty),* $(,)?) => {
        $(
            // SAFETY: `repr(C)`, integers only, all padding spelled out as fields (see the type).
            unsafe impl aya::Pod for Pod<$shared> {}
        )*
    };
}

pod!(
    tachyon_common::config::Config,
    tachyon_common::event::Counters,
    tachyon_common::event::WaitCounters,
    tachyon_common::layout::Layout,
    tachyon_common::process::Life,
    tachyon_common::process::ProcessEntry,
    tachyon_common::unwind::Space,
    tachyon_common::wait::SeenThread,
    tachyon_common::whose::Asyncio,
    tachyon_common::whose::Greenlets,
    tachyon_common::whose::ThreadLocal,
    FileKey,
);

/// Key of the map of executables: device and inode as the kernel numbers them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[repr(C)]
pub struct FileKey {
    /// `super_block.s_dev`: major in the upper bits, minor in the lower 20.
    pub dev: u64,
    /// `inode.i_ino`.
    pub inode: u64,
}

impl FileKey {
    /// The key of a file whose device number is `stat`'s: the kernel packs major and minor differently (`MKDEV`).
    #[must_use]
    pub fn of_stat(dev: u64, inode: u64) -> Self {
        let (major, minor) = (nix::sys::stat::major(dev), nix::sys::stat::minor(dev));
        Self { dev: (major << 20) | (minor & 0xf_ffff), inode }
    }
}
