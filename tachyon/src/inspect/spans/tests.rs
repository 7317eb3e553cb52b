//! Tests over made-up memory: what the linkers of both architectures leave that leads to the variable, and hostile words and
//! messages. Real programs are in the live tests.

use std::cell::Cell;
use std::collections::HashMap;

use prost::Message as _;
use tachyon_common::walk::{Unreadable, UserMemory};

use super::process_context::{self, Context, KeyValue, Resource, Text, Texts, Value};
use super::thread_local::{Arch, Libc, of_executable, of_library};
use super::*;
use crate::remote::elf::{Slot, SlotKind, TlsSegment, TlsSymbol};
use crate::types::{Pid, RemoteAddr};

/// Words at addresses, and nothing else.
#[derive(Default)]
struct Words(HashMap<u64, u64>);

impl<const N: usize> From<[(u64, u64); N]> for Words {
    fn from(words: [(u64, u64); N]) -> Self {
        Self(words.into())
    }
}

impl UserMemory for Words {
    fn read(&self, addr: u64, into: &mut [u8]) -> Result<(), Unreadable> {
        for (chunk, at) in into.chunks_mut(8).zip((addr..).step_by(8)) {
            let word = self.0.get(&at).ok_or(Unreadable)?.to_le_bytes();
            chunk.copy_from_slice(&word[..chunk.len()]);
        }
        Ok(())
    }
}

const BIAS: u64 = 0x7f00_0000_0000;
const HEAP: u64 = 0x5555_0000_1000;

fn symbol(slots: &[(u64, SlotKind, u64)]) -> TlsSymbol {
    let slots = slots.iter().map(|&(vaddr, kind, within)| Slot { vaddr, kind, within }).collect();
    TlsSymbol { offset: 0x110, segment: TlsSegment { vaddr: 0x3000, mem_size: 0x400, align: 16 }, slots }
}

/// The fields that matter for a place in a block of its own.
fn module(place: ThreadLocal) -> (i64, u32, u32, i64) {
    (place.offset, place.module, place.entry_size, place.vector_at)
}

fn found(
    slots: &[(u64, SlotKind, u64)],
    words: impl Into<Words>,
    libc: Option<Libc>,
    arch: Arch,
) -> Result<(i64, u32, u32, i64), NoThreadLocal> {
    of_library(&symbol(slots), BIAS, libc, arch, &words.into()).map(module)
}

#[test]
fn an_executable_has_its_block_beside_the_thread_pointer() {
    let place = |vaddr, mem_size, align, arch| {
        let symbol = TlsSymbol { offset: 8, segment: TlsSegment { vaddr, mem_size, align }, slots: Vec::new() };
        of_executable(&symbol, arch).offset
    };
    assert_eq!(place(0x3000, 16, 8, Arch::X86_64), -8);
    assert_eq!(place(0x3000, 17, 64, Arch::X86_64), 8 - 64);
    // A segment that does not start at its own alignment.
    assert_eq!(place(0x3010, 16, 64, Arch::X86_64), 8 - 48);
    assert_eq!(place(0x3000, 16, 8, Arch::Arm64), 24);
    assert_eq!(place(0x3000, 16, 64, Arch::Arm64), 72);
    assert_eq!(place(0x3010, 16, 64, Arch::Arm64), 24);
}

#[test]
fn a_descriptor_tells_a_distance_or_a_module() {
    let slots = [(0x8, SlotKind::Descriptor, 0x110)];
    let at = BIAS + 8;
    let negative = (-0x500_i64).cast_unsigned();
    let fixed = found(&slots, [(at, 1), (at + 8, negative)], None, Arch::X86_64);
    assert_eq!(fixed, Ok((-0x500, 0, 16, 0)));
    let fixed = found(&slots, [(at, 1), (at + 8, 0x250)], None, Arch::Arm64);
    assert_eq!(fixed, Ok((0x250, 0, 16, 0)));
    for (libc, arch, place) in [
        (Libc::Glibc, Arch::X86_64, (0x110, 3, 16, 8)),
        (Libc::Glibc, Arch::Arm64, (0x110, 3, 16, 0)),
        (Libc::Musl, Arch::X86_64, (0x110, 3, 8, 8)),
        (Libc::Musl, Arch::Arm64, (0x110, 3, 8, -8)),
    ] {
        let words = [(at, 1), (at + 8, HEAP), (HEAP, 3), (HEAP + 8, 0x110)];
        assert_eq!(found(&slots, words, Some(libc), arch), Ok(place));
    }
    let words = [(at, 1), (at + 8, HEAP), (HEAP, 3), (HEAP + 8, 0x110)];
    assert_eq!(found(&slots, words, None, Arch::X86_64), Err(NoThreadLocal::UnknownLibc));
}

#[test]
fn what_is_not_linked_yet_is_asked_again() {
    let at = BIAS + 8;
    let descriptor = [(0x8, SlotKind::Descriptor, 0x110)];
    // Bound at first use: the argument leads to the relocation.
    let lazy = [(at, 1), (at + 8, HEAP), (HEAP, 0x8), (HEAP + 8, 0x7_0000_0024)];
    for words in [Words::from([(at, 0), (at + 8, 0)]), Words::from([(at, 1), (at + 8, 0)]), lazy.into()] {
        let place = of_library(&symbol(&descriptor), BIAS, Some(Libc::Glibc), Arch::X86_64, &words);
        assert_eq!(place, Err(NoThreadLocal::NotYet));
    }
    for kind in [SlotKind::Module, SlotKind::Offset] {
        let place = found(&[(0x8, kind, 0)], [(at, 0)], Some(Libc::Glibc), Arch::X86_64);
        assert_eq!(place, Err(NoThreadLocal::NotYet));
    }
    // A module's number alone is not enough if a descriptor may still say that the block has a fixed distance.
    let both = [(0x8, SlotKind::Module, 0), (0x20, SlotKind::Descriptor, 0x110)];
    let words = [(at, 3), (BIAS + 0x20, 0), (BIAS + 0x28, 0)];
    assert_eq!(found(&both, words, Some(Libc::Glibc), Arch::X86_64), Err(NoThreadLocal::NotYet));
    let words = [(at, 3), (BIAS + 0x20, 1), (BIAS + 0x28, (-0x500_i64).cast_unsigned())];
    assert_eq!(found(&both, words, None, Arch::X86_64), Ok((-0x500, 0, 16, 0)));
}

#[test]
fn words_that_make_no_sense_are_refused() {
    let at = BIAS + 8;
    let odd = |slots: &[(u64, SlotKind, u64)], words: Words, arch| {
        let place = of_library(&symbol(slots), BIAS, Some(Libc::Glibc), arch, &words);
        assert!(matches!(place, Err(NoThreadLocal::Odd(_))), "{place:?}");
    };
    for value in [1 << 20, u64::MAX - 8, 1 << 63, HEAP] {
        odd(&[(0x8, SlotKind::Offset, 0x110)], [(at, value)].into(), Arch::X86_64);
        odd(&[(0x8, SlotKind::Module, 0)], [(at, value)].into(), Arch::X86_64);
    }
    for value in [8, 1 << 63, HEAP] {
        odd(&[(0x8, SlotKind::Offset, 0)], [(at, value)].into(), Arch::Arm64);
    }
    // A distance at which the block would reach across the thread pointer.
    odd(&[(0x8, SlotKind::Descriptor, 0)], [(at, 1), (at + 8, (-0x3ff_i64).cast_unsigned())].into(), Arch::X86_64);
    // A pointer to nowhere, and a number that no module has.
    odd(&[(0x8, SlotKind::Descriptor, 0)], [(at, 1), (at + 8, HEAP)].into(), Arch::X86_64);
    let words = [(at, 1), (at + 8, HEAP), (HEAP, 1 << 40), (HEAP + 8, 0)];
    odd(&[(0x8, SlotKind::Descriptor, 0)], words.into(), Arch::X86_64);
    // Not mapped.
    odd(&[(0x8, SlotKind::Module, 0)], Words::default(), Arch::X86_64);
    // Two that contradict each other.
    let two = [(0x8, SlotKind::Module, 0), (0x10, SlotKind::Module, 0)];
    odd(&two, [(at, 3), (at + 8, 4)].into(), Arch::X86_64);
    assert_eq!(found(&[], Words::default(), Some(Libc::Glibc), Arch::X86_64), Err(NoThreadLocal::NoRelocation));
}

fn attribute(key: &str, text: &str) -> KeyValue {
    KeyValue { key: key.into(), value: Some(Value { string: Some(text.into()), array: None }) }
}

/// A process's memory with a context; `moments` are the publishing times that the header shows, one per look.
struct Publishing {
    payload: Vec<u8>,
    moments: Vec<u64>,
    looks: Cell<usize>,
    signature: [u8; 8],
    version: u32,
    size: u32,
}

impl Publishing {
    fn of(context: &Context, moments: &[u64]) -> Self {
        let payload = context.encode_to_vec();
        let size = u32::try_from(payload.len()).expect("small");
        Self { payload, moments: moments.to_vec(), looks: Cell::new(0), signature: *b"OTEL_CTX", version: 2, size }
    }

    fn read(&self) -> Result<ProcessContext, NoProcessContext> {
        process_context::read_at(0x1000, |at, into| {
            let bytes = if at == 0x1000 {
                let look = self.looks.replace(self.looks.get() + 1);
                let moment = self.moments[look.min(self.moments.len() - 1)];
                let head = [self.version.to_le_bytes(), self.size.to_le_bytes()].concat();
                [&self.signature[..], &head, &moment.to_le_bytes(), &0x2000_u64.to_le_bytes()].concat()
            } else {
                self.payload.clone()
            };
            let gone = || RemoteError::NoSuchProcess(Pid(1));
            into.copy_from_slice(bytes.get(..into.len()).ok_or_else(gone)?);
            Ok(())
        })
    }
}

fn shop() -> Context {
    let resource = Resource {
        attributes: vec![attribute("service.name", "shop"), attribute("service.version", ""), attribute("x", "y")],
    };
    let text = |text: &str| Text { string: Some(text.into()) };
    let keys = Value { string: None, array: Some(Texts { values: vec![text("route"), text("user")] }) };
    let keys = KeyValue { key: "threadlocal.attribute_key_map".into(), value: Some(keys) };
    Context {
        resource: Some(resource),
        attributes: vec![attribute("threadlocal.schema_version", "tlsdesc_v1_dev"), keys],
    }
}

#[test]
fn a_context_is_read_when_it_stands_still() {
    let read = Publishing::of(&shop(), &[7]).read().expect("a good one");
    let expected = ProcessContext {
        service: Some("shop".into()),
        thread_schema: Some("tlsdesc_v1_dev".into()),
        attribute_keys: vec!["route".into(), "user".into()],
        published_ns: 7,
        header: 0x1000,
        ..ProcessContext::default()
    };
    assert_eq!(read, expected);
    // Being written, then rewritten while it was read, then stable.
    let moving = Publishing::of(&shop(), &[0, 7, 8, 8, 8]);
    assert_eq!(moving.read().map(|context| (context.published_ns, moving.looks.get())), Ok((8, 5)));
    let restless = Publishing::of(&shop(), &(1..100).collect::<Vec<_>>());
    assert_eq!(restless.read(), Err(NoProcessContext::BeingWritten));
    assert!(restless.looks.get() < 10, "bounded");
    assert_eq!(Publishing::of(&shop(), &[0]).read(), Err(NoProcessContext::BeingWritten));
}

#[test]
fn a_context_is_known_by_the_name_of_its_mapping() {
    let is_context = |line: &str| {
        let maps = crate::remote::parse_maps(format!("7f46b8131000-7f46b8132000 {line}\n").as_bytes());
        process_context::is_context(&maps.expect("a line as the kernel writes it")[0])
    };
    for name in ["[anon_shmem:OTEL_CTX]", "[anon:OTEL_CTX]", "/memfd:OTEL_CTX (deleted)", "/memfd:OTEL_CTX"] {
        assert!(is_context(&format!("rw-p 00000000 00:01 25                         {name}")), "{name}");
        assert!(!is_context(&format!("r-xp 00000000 00:01 25                         {name}")), "code is none");
        assert!(
            !is_context(&format!("---p 00000000 00:01 25                         {name}")),
            "nor what cannot be read"
        );
    }
    for name in ["[anon:OTEL_CTXX]", "/tmp/memfd:OTEL_CTX", "OTEL_CTX", "[heap]", ""] {
        assert!(!is_context(&format!("rw-p 00000000 00:01 25                         {name}")), "{name}");
    }
}

#[test]
fn a_hostile_context_is_refused() {
    let good = || Publishing::of(&shop(), &[7]);
    let refused = |publishing: Publishing| publishing.read().expect_err("refused");
    assert_eq!(refused(Publishing { signature: *b"OTEL_CTY", ..good() }), NoProcessContext::NoHeader);
    assert_eq!(refused(Publishing { signature: [0; 8], ..good() }), NoProcessContext::BeingWritten);
    assert_eq!(refused(Publishing { version: 3, ..good() }), NoProcessContext::Version(3));
    for size in [0, u32::MAX, 65537] {
        assert_eq!(refused(Publishing { size, ..good() }), NoProcessContext::Size(size));
    }
    let short = refused(Publishing { size: 60_000, ..good() });
    assert!(matches!(short, NoProcessContext::Unreadable(_)), "{short:?}");
    let whole = shop().encode_to_vec();
    for at in 0..whole.len() {
        for value in [0, 1, 0x7f, 0x80, 0xff] {
            let mut payload = whole.clone();
            payload[at] = value;
            let _either = Publishing { payload, ..good() }.read();
        }
        let _cut = Publishing { size: u32::try_from(at).expect("small"), ..good() }.read();
    }
    let long = Context {
        resource: Some(Resource { attributes: vec![attribute("service.name", &"ä".repeat(1000))] }),
        attributes: Vec::new(),
    };
    let context = Publishing::of(&long, &[7]).read().expect("a good one");
    assert_eq!(context.service.map(|service| service.len()), Some(256));
}

/// This process, which has no context and no variable; and one that has ended.
#[test]
fn a_process_without_any_says_so() {
    let process = RemoteProcess::open(Pid(std::process::id())).expect("it runs");
    let maps = process.maps().expect("own maps");
    let mut spans = Spans::new();
    for _ in 0..2 {
        let published = spans.look(&process, &maps, Instant::now());
        assert_eq!(published.thread, Err(NoThreadLocal::NotDefined));
        assert_eq!(published.process, Err(NoProcessContext::NotPublished));
        assert!(published.is_none() && !published.is_current(&process));
        let seconds = [0, 7, 1000].map(|quiet| published.again_after(Duration::from_secs(quiet)).as_secs_f64());
        assert_eq!(seconds.map(|seconds| seconds.to_string()), ["0.1", "7", "300"]);
    }
    // The C library is not a dynamic linker: nothing has to be asked when another process maps it.
    let libc = maps.iter().find(|mapping| mapping.name() == "libc.so.6").expect("the tests are linked with it");
    let path = libc.file_path().expect("a file").as_os_str();
    let now = Instant::now();
    assert!(spans.is_known(libc.dev, libc.inode, path, now));
    assert!(!spans.is_known(libc.dev, libc.inode, OsStr::new("/another"), now));
    assert!(!spans.is_known(libc.dev, libc.inode, path, now + KNOWN_FOR));
    assert!(process.read_u64(RemoteAddr(8)).is_err());
}
