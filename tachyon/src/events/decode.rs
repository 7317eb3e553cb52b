//! Bytes -> records. Every length is checked; nothing here trusts the writer.

use tachyon_common::event::{
    CodeRecord, ProcessRecord, RawFrame, RecordHeader, SampleRecord, StackRecord, WaitFacts, kind,
};
use tachyon_common::whose::{Task, Whose};

/// One record.
#[derive(Clone, Copy, Debug)]
pub enum Event<'a> {
    /// A sample.
    Sample(SampleRecord, Frames<'a>),
    /// The stack of a thread whose wait is over.
    Wait(SampleRecord, Frames<'a>, WaitFacts),
    /// The stack of a thread whose wait begins.
    WaitBegin(SampleRecord, Frames<'a>, WaitFacts),
    /// The end of a wait whose stack came before.
    WaitEnd(SampleRecord, WaitFacts),
    /// The stack of a thread that ends another one's wait.
    Waker(SampleRecord, Frames<'a>, WaitFacts),
    /// A part of the stack of a thread whose sample follows, with its bytes.
    Stack(StackRecord, &'a [u8]),
    /// A code object, with its payload: qualified name, file name, line table.
    Code(CodeRecord, &'a [u8]),
    /// A process event; its kind is in the header.
    Process(ProcessRecord),
}

/// Python frames of a sample, leaf first.
#[derive(Clone, Copy, Debug)]
pub struct Frames<'a> {
    bytes: &'a [u8],
    /// Frames of the thread that held the GIL.
    holder: &'a [u8],
    native: &'a [u8],
    kernel: &'a [u8],
    /// Whose work it was; empty if that is not known.
    whose: &'a [u8],
    greenlets: Others<'a>,
    awaiting: Others<'a>,
}

/// The running greenlet and its parents, or the tasks that await the running one, and their frames.
#[derive(Clone, Copy, Debug)]
struct Others<'a> {
    tasks: &'a [u8],
    frames: &'a [u8],
}

impl<'a> Others<'a> {
    fn each(self) -> impl Iterator<Item = (Task, impl Iterator<Item = RawFrame>)> {
        let Self { tasks, mut frames } = self;
        tasks_of(tasks).map(move |task| {
            let bytes = usize::from(task.frames) * size_of::<RawFrame>();
            let (own, rest) = frames.split_at(bytes.min(frames.len()));
            frames = rest;
            (task, own.chunks_exact(size_of::<RawFrame>()).map_while(read::<RawFrame>))
        })
    }

    /// Splits their frames, which come last, off those of a record.
    fn split(record: &mut SampleRecord, frames: &'a [u8], tasks: &'a [u8]) -> (&'a [u8], Self) {
        let theirs = tasks_of(tasks).map(|task| usize::from(task.frames)).sum();
        // No more than there are, whatever it says.
        let own = (frames.len() / size_of::<RawFrame>()).saturating_sub(theirs);
        record.python_frames = own as u16;
        let (own, theirs) = frames.split_at(own * size_of::<RawFrame>());
        (own, Self { tasks, frames: theirs })
    }
}

fn tasks_of(bytes: &[u8]) -> impl Iterator<Item = Task> {
    bytes.chunks_exact(size_of::<Task>()).map_while(read::<Task>)
}

impl Frames<'_> {
    /// The same sample without its Python frames.
    #[must_use]
    pub const fn without_python(self) -> Self {
        Self { bytes: &[], ..self }
    }

    /// How many there are.
    #[must_use]
    pub const fn len(&self) -> usize {
        self.bytes.len() / size_of::<RawFrame>()
    }

    /// Whether there is none.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// Addresses of native frames, leaf first, as used to look up their names: a caller's address lies inside its call.
    pub fn native(&self) -> impl ExactSizeIterator<Item = u64> {
        addresses(self.native)
    }

    /// Addresses in the kernel, leaf first: the interrupted one, then return addresses.
    pub fn kernel(&self) -> impl ExactSizeIterator<Item = u64> {
        addresses(self.kernel)
    }

    /// For a wait for the GIL, the innermost Python frame of the thread that held it.
    #[must_use]
    pub fn holder(&self) -> Option<RawFrame> {
        read(self.holder)
    }

    /// Whose work it was, as far as the kernel side has read it.
    #[must_use]
    pub fn whose(&self) -> Option<Whose> {
        whose_of(self.whose)
    }

    /// The greenlet that runs, without frames: the thread's are its own; then its parent with the frames that it has left, innermost
    /// first, and so on. Empty: the thread's main greenlet runs, as far as is known.
    pub fn greenlets(&self) -> impl Iterator<Item = (Task, impl Iterator<Item = RawFrame>)> {
        self.greenlets.each()
    }

    /// The tasks that await the running one, each with its frames, innermost first: each awaits the one before.
    pub fn awaiting(&self) -> impl Iterator<Item = (Task, impl Iterator<Item = RawFrame>)> {
        self.awaiting.each()
    }

    /// The frames, leaf first.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = RawFrame> + DoubleEndedIterator {
        self.bytes.chunks_exact(size_of::<RawFrame>()).map(|bytes| read(bytes).expect("a chunk has this size"))
    }
}

fn addresses(bytes: &[u8]) -> impl ExactSizeIterator<Item = u64> {
    bytes.chunks_exact(8).map(|bytes| u64::from_ne_bytes(bytes.try_into().expect("a chunk has this size")))
}

/// A malformed record.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadRecord {
    /// Shorter than its header says or than its kind requires.
    #[error("a record of {len} bytes, of which {have} are there")]
    Short {
        /// Bytes it should have.
        len: usize,
        /// Bytes there are.
        have: usize,
    },
    /// A kind this version does not know.
    #[error("a record of unknown kind {0}")]
    UnknownKind(u16),
}

/// Iterates over the records that lie one after another in a batch. Ends after the first malformed one that leaves no
/// way to find where the next starts.
#[derive(Debug)]
pub struct Events<'a> {
    rest: &'a [u8],
}

impl<'a> Events<'a> {
    /// The records in `bytes`.
    #[must_use]
    pub const fn new(bytes: &'a [u8]) -> Self {
        Self { rest: bytes }
    }

    /// What kind of record comes next ([`kind`]), according to its header; `None` at the end.
    #[must_use]
    pub fn next_kind(&self) -> Option<u16> {
        read::<RecordHeader>(self.rest).map(|header| header.kind)
    }

    /// What has not been decoded yet.
    #[must_use]
    pub const fn rest(&self) -> &'a [u8] {
        self.rest
    }
}

impl<'a> Iterator for Events<'a> {
    type Item = Result<Event<'a>, BadRecord>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.rest.is_empty() {
            return None;
        }
        let have = self.rest.len();
        let Some(header) = read::<RecordHeader>(self.rest) else {
            self.rest = &[];
            return Some(Err(BadRecord::Short { len: size_of::<RecordHeader>(), have }));
        };
        let len = header.len as usize;
        if len < size_of::<RecordHeader>() || len > have {
            self.rest = &[];
            return Some(Err(BadRecord::Short { len, have }));
        }
        let (record, rest) = self.rest.split_at(len);
        self.rest = rest;
        Some(decode(header.kind, record))
    }
}

fn decode(kind: u16, bytes: &[u8]) -> Result<Event<'_>, BadRecord> {
    let short = |len| BadRecord::Short { len, have: bytes.len() };
    match kind {
        kind::SAMPLE | kind::WAIT | kind::WAIT_BEGIN | kind::WAIT_END | kind::WAKER => {
            let mut record: SampleRecord = read(bytes).ok_or(short(size_of::<SampleRecord>()))?;
            let body = &bytes[size_of::<SampleRecord>()..];
            let len = usize::from(record.python_frames) * size_of::<RawFrame>();
            let native = usize::from(record.native_frames) * size_of::<u64>();
            let kernel = usize::from(record.kernel_frames) * size_of::<u64>();
            let all = len + native + kernel;
            let frames = body.get(..all).ok_or(short(size_of::<SampleRecord>() + all))?;
            let Behind { whose, greenlets, tasks, facts } = Behind::of(&record, &body[all..])?;
            let (bytes, rest) = frames.split_at(len);
            let (native, kernel) = rest.split_at(native);
            if kind == kind::SAMPLE {
                let (bytes, awaiting) = Others::split(&mut record, bytes, tasks);
                let (bytes, greenlets) = Others::split(&mut record, bytes, greenlets);
                let frames = Frames { bytes, holder: &[], native, kernel, whose, greenlets, awaiting };
                return Ok(Event::Sample(record, frames));
            }
            let facts: WaitFacts =
                read(facts).ok_or(short(size_of::<SampleRecord>() + all + size_of::<WaitFacts>()))?;
            // No more than there are, whatever it says.
            let own = record.python_frames.saturating_sub(facts.holder_frames.min(u32::from(u16::MAX)) as u16);
            record.python_frames = own;
            let (bytes, holder) = bytes.split_at(usize::from(own) * size_of::<RawFrame>());
            let (bytes, awaiting) = Others::split(&mut record, bytes, tasks);
            let (bytes, greenlets) = Others::split(&mut record, bytes, greenlets);
            let frames = Frames { bytes, holder, native, kernel, whose, greenlets, awaiting };
            Ok(match kind {
                kind::WAIT_BEGIN => Event::WaitBegin(record, frames, facts),
                kind::WAIT_END => Event::WaitEnd(record, facts),
                kind::WAKER => Event::Waker(record, frames, facts),
                _ => Event::Wait(record, frames, facts),
            })
        }
        kind::STACK => {
            let record: StackRecord = read(bytes).ok_or(short(size_of::<StackRecord>()))?;
            let len = size_of::<StackRecord>().saturating_add(record.bytes as usize);
            Ok(Event::Stack(record, bytes.get(size_of::<StackRecord>()..len).ok_or(short(len))?))
        }
        kind::CODE => {
            let record: CodeRecord = read(bytes).ok_or(short(size_of::<CodeRecord>()))?;
            let payload = &bytes[size_of::<CodeRecord>()..];
            let len = [record.qualname_bytes, record.filename_bytes, record.linetable_bytes]
                .into_iter()
                .try_fold(0_usize, |sum, part| sum.checked_add(part as usize))
                .ok_or(short(usize::MAX))?;
            let payload = payload.get(..len).ok_or(short(len))?;
            Ok(Event::Code(record, payload))
        }
        kind::EXEC | kind::FORK | kind::EXIT | kind::UNKNOWN | kind::FREE | kind::THREAD => {
            read(bytes).map(Event::Process).ok_or(short(size_of::<ProcessRecord>()))
        }
        other => Err(BadRecord::UnknownKind(other)),
    }
}

/// The record that begins a sample, a wait or a waker.
#[must_use]
pub fn head(bytes: &[u8]) -> Option<SampleRecord> {
    let kind = read::<RecordHeader>(bytes)?.kind;
    let has_frames = matches!(kind, kind::SAMPLE | kind::WAIT | kind::WAIT_BEGIN | kind::WAKER);
    if has_frames { read(bytes) } else { None }
}

/// The bytes of the same record with another head and these native frames in place of its own, leaf first. `None`: it is malformed.
#[must_use]
pub fn with_native(bytes: &[u8], record: &SampleRecord, native: &[u64]) -> Option<Vec<u8>> {
    let before = head(bytes)?;
    let (head, body) = bytes.split_at(size_of::<SampleRecord>());
    let (python, rest) = body.split_at_checked(usize::from(before.python_frames) * size_of::<RawFrame>())?;
    let (_, rest) = rest.split_at_checked(usize::from(before.native_frames) * size_of::<u64>())?;
    let len = head.len() + python.len() + size_of_val(native) + rest.len();
    let header = RecordHeader { len: u32::try_from(len).ok()?, ..record.header };
    let record = SampleRecord { header, native_frames: u16::try_from(native.len()).ok()?, ..*record };
    let mut bytes = Vec::with_capacity(len);
    bytes.extend_from_slice(bytes_of(&record));
    bytes.extend_from_slice(python);
    native.iter().for_each(|address| bytes.extend_from_slice(&address.to_ne_bytes()));
    bytes.extend_from_slice(rest);
    Some(bytes)
}

/// What follows a record's frames.
struct Behind<'a> {
    /// Whose work it was, if that is there.
    whose: &'a [u8],
    /// The running greenlet and its parents.
    greenlets: &'a [u8],
    /// The tasks that await the running one.
    tasks: &'a [u8],
    /// The rest.
    facts: &'a [u8],
}

impl<'a> Behind<'a> {
    fn of(record: &SampleRecord, bytes: &'a [u8]) -> Result<Self, BadRecord> {
        if record.whose == 0 {
            return Ok(Self { whose: &[], greenlets: &[], tasks: &[], facts: bytes });
        }
        let have = record.header.len as usize;
        let short = BadRecord::Short { len: have + size_of::<Whose>(), have };
        let whose = whose_of(bytes).ok_or(short)?;
        let (own, rest) = bytes.split_at(Whose::bytes(whose.flags));
        let bytes = |count: u16| usize::from(count) * size_of::<Task>();
        let (greenlets, rest) = rest.split_at_checked(bytes(whose.greenlets)).ok_or(short)?;
        let (tasks, facts) = rest.split_at_checked(bytes(whose.awaiting)).ok_or(short)?;
        Ok(Self { whose: own, greenlets, tasks, facts })
    }
}

/// Whose work it was, at the start of `bytes`: without a task, only its head is there.
fn whose_of(bytes: &[u8]) -> Option<Whose> {
    let mut whole = [0; size_of::<Whose>()];
    whole.get_mut(..Whose::HEAD)?.copy_from_slice(bytes.get(..Whose::HEAD)?);
    let whose: Whose = read(&whole)?;
    if Whose::bytes(whose.flags) == Whose::HEAD { Some(Whose { task: Task::NONE, ..whose }) } else { read(bytes) }
}

/// Types for which any bytes of their size are valid.
///
/// # Safety
/// `repr(C)`, integers only, no padding that is not a field.
unsafe trait Plain: Copy {}
// SAFETY: `repr(C)`, two u16 and a u32, which leave no gap.
unsafe impl Plain for RecordHeader {}
// SAFETY: `repr(C)`, integers and arrays of them, padding spelled out; its size is asserted beside it.
unsafe impl Plain for SampleRecord {}
// SAFETY: as of `SampleRecord`.
unsafe impl Plain for CodeRecord {}
// SAFETY: as of `SampleRecord`.
unsafe impl Plain for WaitFacts {}
// SAFETY: as of `SampleRecord`.
unsafe impl Plain for ProcessRecord {}
// SAFETY: as of `SampleRecord`; so is the walk in it.
unsafe impl Plain for StackRecord {}
// SAFETY: as of `SampleRecord`.
unsafe impl Plain for RawFrame {}
// SAFETY: as of `SampleRecord`.
unsafe impl Plain for Whose {}
// SAFETY: as of `SampleRecord`.
unsafe impl Plain for Task {}

fn read<T: Plain>(bytes: &[u8]) -> Option<T> {
    let bytes = bytes.get(..size_of::<T>())?;
    // SAFETY: the slice has the type's size, and any bytes are a valid `Plain` value.
    Some(unsafe { std::ptr::read_unaligned(bytes.as_ptr().cast()) })
}

fn bytes_of<T: Plain>(value: &T) -> &[u8] {
    // SAFETY: a `Plain` value is its bytes.
    unsafe { std::slice::from_raw_parts(std::ptr::from_ref(value).cast(), size_of::<T>()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(frames: u16) -> Vec<u8> {
        let len = size_of::<SampleRecord>() + usize::from(frames) * size_of::<RawFrame>();
        let header = RecordHeader { kind: kind::SAMPLE, bank: 0, event: 0, len: u32::try_from(len).unwrap() };
        let mut bytes = bytes_of(&SampleRecord { header, python_frames: frames, ..SampleRecord::default() }).to_vec();
        for code in 0..u64::from(frames) {
            bytes.extend(bytes_of(&RawFrame { code, ..RawFrame::default() }));
        }
        bytes
    }

    #[test]
    fn records_follow_one_another() {
        let mut bytes = sample(2);
        bytes.extend(sample(0));
        let found: Vec<usize> = Events::new(&bytes)
            .map(|event| match event {
                Ok(Event::Sample(_, frames)) => frames.iter().count(),
                other => panic!("not a sample: {other:?}"),
            })
            .collect();
        assert_eq!(found, [2, 0]);
    }

    #[test]
    fn frames_of_parents_and_of_those_that_await_are_theirs() {
        let tasks = [0, 3, 2, 1].map(|frames| Task { frames, ..Task::NONE });
        let whose = Whose { greenlets: 2, awaiting: 2, flags: 1, ..Whose::NOBODY };
        let mut bytes = sample(8);
        let len = bytes.len() + size_of::<Whose>() + 4 * size_of::<Task>();
        let header = RecordHeader { kind: kind::SAMPLE, bank: 0, event: 0, len: u32::try_from(len).unwrap() };
        let record = SampleRecord { header, python_frames: 8, whose: 1, ..SampleRecord::default() };
        bytes[..size_of::<SampleRecord>()].copy_from_slice(bytes_of(&record));
        bytes.extend(bytes_of(&whose));
        tasks.iter().for_each(|task| bytes.extend(bytes_of(task)));
        let Some(Ok(Event::Sample(record, frames))) = Events::new(&bytes).next() else { panic!("a sample") };
        assert_eq!((record.python_frames, frames.len(), frames.whose()), (2, 2, Some(whose)));
        let codes: Vec<Vec<u64>> =
            frames.greenlets().map(|(_, frames)| frames.map(|frame| frame.code).collect()).collect();
        assert_eq!(codes, [vec![], vec![2, 3, 4]]);
        let codes: Vec<Vec<u64>> =
            frames.awaiting().map(|(_, frames)| frames.map(|frame| frame.code).collect()).collect();
        assert_eq!(codes, [vec![5, 6], vec![7]]);
        for cut in 1..bytes.len() {
            let found: Vec<_> = Events::new(&bytes[..cut]).collect();
            assert!(matches!(found[..], [Err(BadRecord::Short { .. })]), "cut at {cut}: {found:?}");
        }
    }

    #[test]
    fn every_cut_is_told() {
        let bytes = sample(3);
        for cut in 1..bytes.len() {
            let found: Vec<_> = Events::new(&bytes[..cut]).collect();
            assert!(matches!(found[..], [Err(BadRecord::Short { .. })]), "cut at {cut}: {found:?}");
        }
    }

    #[test]
    fn frames_beyond_the_record_are_refused() {
        let mut bytes = sample(1);
        let at = std::mem::offset_of!(SampleRecord, python_frames);
        bytes[at..at + 2].copy_from_slice(&9_u16.to_ne_bytes());
        assert!(matches!(Events::new(&bytes).next(), Some(Err(BadRecord::Short { .. }))));
    }

    #[test]
    fn the_last_frames_of_a_wait_may_be_of_another_thread() {
        let wait = |frames: u16, holder_frames| {
            let mut bytes = sample(frames);
            bytes.extend(bytes_of(&WaitFacts { holder_frames, ..WaitFacts::default() }));
            let len = u32::try_from(bytes.len()).unwrap();
            let header = RecordHeader { kind: kind::WAIT, bank: 2, event: 0, len };
            bytes[..size_of::<RecordHeader>()].copy_from_slice(bytes_of(&header));
            let Some(Ok(Event::Wait(record, frames, _))) = Events::new(&bytes).next() else { panic!("no wait") };
            assert_eq!(usize::from(record.python_frames), frames.len());
            (frames.len(), frames.holder().map(|frame| frame.code))
        };
        assert_eq!(wait(5, 2), (3, Some(3)));
        assert_eq!(wait(5, 0), (5, None));
        assert_eq!(wait(2, 7), (0, Some(0)));
    }

    #[test]
    fn an_unknown_kind_does_not_hide_the_next_record() {
        let mut bytes = bytes_of(&RecordHeader { kind: 99, bank: 0, event: 0, len: 16 }).to_vec();
        bytes.extend([0; 8]);
        bytes.extend(sample(0));
        let found: Vec<_> = Events::new(&bytes).collect();
        assert!(matches!(found[..], [Err(BadRecord::UnknownKind(99)), Ok(Event::Sample(..))]), "{found:?}");
    }

    #[test]
    fn a_part_of_a_stack_has_as_many_bytes_as_it_says() {
        let part = |bytes: u32, behind: usize| {
            let len = size_of::<StackRecord>() + behind;
            let header = RecordHeader { kind: kind::STACK, bank: 1, event: 0, len: u32::try_from(len).unwrap() };
            let mut all = bytes_of(&StackRecord { header, tid: 5, bytes, ..StackRecord::default() }).to_vec();
            all.extend((0..behind).map(|at| at as u8));
            all
        };
        let bytes = part(16, 16);
        let Some(Ok(Event::Stack(record, stack))) = Events::new(&bytes).next() else { panic!("a part of a stack") };
        assert_eq!((record.tid, stack), (5, &bytes[size_of::<StackRecord>()..]));
        assert!(matches!(Events::new(&part(24, 16)).next(), Some(Err(BadRecord::Short { .. }))));
        assert!(matches!(Events::new(&part(u32::MAX, 16)).next(), Some(Err(BadRecord::Short { .. }))));
    }

    #[test]
    fn other_native_frames_leave_the_rest_of_a_record_as_it_is() {
        let with = |native: &[u64]| {
            let (python, kernel) = (2_u16, [7_u64, 8]);
            let mut bytes = sample(python);
            native.iter().chain(&kernel).for_each(|address| bytes.extend(address.to_ne_bytes()));
            let header =
                RecordHeader { kind: kind::SAMPLE, bank: 0, event: 0, len: u32::try_from(bytes.len()).unwrap() };
            let native_frames = u16::try_from(native.len()).unwrap();
            let record =
                SampleRecord { header, python_frames: python, native_frames, kernel_frames: 2, ..Default::default() };
            bytes[..size_of::<SampleRecord>()].copy_from_slice(bytes_of(&record));
            bytes
        };
        let before = with(&[1, 2]);
        let record = head(&before).expect("a sample");
        for native in [&[][..], &[1], &[1, 2, 3, 4]] {
            assert_eq!(with_native(&before, &record, native), Some(with(native)));
        }
        assert_eq!(with_native(&before[..size_of::<SampleRecord>() + 8], &record, &[1]), None);
        assert!(head(bytes_of(&RecordHeader { kind: kind::CODE, bank: 0, event: 0, len: 16 })).is_none());
    }
}
