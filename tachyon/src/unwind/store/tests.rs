use super::gone::REST;
use super::*;
use crate::types::Pid;
use crate::unwind::{ARENA, Generated};
use std::sync::Arc;
use tachyon_common::stop::StopReason;

/// Tables in plain memory.
#[derive(Default)]
struct Memory {
    rows: Vec<Row>,
    ranges: Vec<Range>,
    spaces: Vec<Space>,
}

fn put<T: Copy>(into: &mut Vec<T>, first: u32, what: &[T], filler: T) {
    let end = first as usize + what.len();
    if into.len() < end {
        into.resize(end, filler);
    }
    into[first as usize..end].copy_from_slice(what);
}

impl TableMemory for Memory {
    fn write_rows(&mut self, first: u32, rows: &[Row]) -> bool {
        put(&mut self.rows, first, rows, Row(0));
        true
    }

    fn read_rows(&self, first: u32, count: u32) -> Option<Vec<Row>> {
        Some(self.rows.get(first as usize..)?.get(..count as usize)?.to_vec())
    }

    fn write_ranges(&mut self, first: u32, ranges: &[Range]) {
        put(&mut self.ranges, first, ranges, Range::default());
    }

    fn spaces(&self) -> Vec<Space> {
        self.spaces.clone()
    }
}

fn maps() -> Vec<Mapping> {
    own().maps().expect("own mappings")
}

fn own() -> RemoteProcess {
    RemoteProcess::at(Pid(std::process::id()))
}

#[test]
#[cfg_attr(miri, ignore = "reads the machine's own files")]
fn every_executable_byte_of_a_process_is_in_one_range() {
    let mut memory = Memory::default();
    let mut tables = UnwindTables::new(1 << 22, 1 << 12);
    let space = tables.map(&own(), &maps(), 7, &mut memory).expect("own mappings");
    assert_eq!(space.image, 7);
    let ranges = &memory.ranges[space.first as usize..][..space.count as usize];
    assert!(ranges.is_sorted_by(|a, b| a.end <= b.start), "{ranges:?}");
    for mapping in own().maps().expect("own mappings").iter().filter(|mapping| mapping.executable) {
        let inside = ranges.iter().filter(|range| range.start >= mapping.start && range.end <= mapping.end);
        let covered: u64 = inside.clone().map(|range| range.end - range.start).sum();
        assert_eq!(covered, mapping.end - mapping.start, "{mapping:?}");
        let vdso = mapping.path == MappedPath::Special(b"[vdso]".to_vec());
        if vdso || mapping.file_path().is_some() {
            assert!(inside.clone().any(|range| range.rows > 0), "{mapping:?} has a table");
        }
    }
    let rows = tables.rows_used();
    tables.map(&own(), &maps(), 8, &mut memory).expect("own mappings");
    assert_eq!(tables.rows_used(), rows, "a second process shares the tables");
}

/// Row by row, and where the kernel side looks for them.
#[test]
#[cfg_attr(miri, ignore = "reads the machine's own files")]
fn rules_that_are_kept_are_those_that_were_made() {
    let folder = tempfile::tempdir().expect("a folder");
    let cache = crate::kept::SymbolCache::at(folder.path().join("kept"));
    let folder = Arc::new(cache.open().expect("it is ours"));
    let unkept = |tables: &UnwindTables| {
        let placed = tables.known.values().filter_map(|known| match known {
            Known::Placed(placed) => placed.unkept.as_ref(),
            _ => None,
        });
        placed.count()
    };
    let record = || {
        let (mut memory, mut tables) = (Memory::default(), UnwindTables::new(1 << 22, 1 << 12).keeping(Some(&folder)));
        tables.map(&own(), &maps(), 7, &mut memory).expect("own mappings");
        let made = unkept(&tables);
        // Each time at least one.
        while unkept(&tables) > 0 {
            tables.keep(&memory);
        }
        (memory, tables.take_assembly(), made)
    };
    let (first, assembly, made) = record();
    assert!(made > 0 && !assembly.is_empty(), "{made} tables, {assembly:?}: the C library's, at least");
    let (second, assembly_kept, made) = record();
    assert_eq!((made, assembly_kept), (0, assembly));
    assert!(first.rows == second.rows && first.ranges == second.ranges);
}

/// This very stack, from here to where the thread was started, by the walk over this process's own memory.
#[test]
#[cfg(target_arch = "x86_64")]
#[cfg_attr(miri, ignore = "reads registers")]
fn own_stack_is_walked_to_its_end() {
    use tachyon_common::config::machine;
    use tachyon_common::unwind::{AddressSink, NativeWalk, Slices, StackBuffer};
    #[derive(Default)]
    struct Addresses(Vec<u64>);
    impl AddressSink for Addresses {
        fn store(&mut self, index: usize, address: u64) {
            assert_eq!(index, self.0.len());
            self.0.push(address);
        }
    }
    let mut memory = Memory::default();
    let mut tables = UnwindTables::new(1 << 22, 1 << 12);
    let space = tables.map(&own(), &maps(), 7, &mut memory).expect("own mappings");
    let (ip, sp, fp): (u64, u64, u64);
    // SAFETY: copies three registers and changes nothing else.
    unsafe {
        std::arch::asm!("lea {ip}, [rip]", "mov {sp}, rsp", "mov {fp}, rbp", ip = out(reg) ip, sp = out(reg) sp, fp = out(reg) fp);
    }
    let mut walk = NativeWalk::start(ip, sp, fp);
    let mut addresses = Addresses::default();
    let slices = Slices { ranges: &memory.ranges, rows: &memory.rows, machine: machine::X86_64 };
    let mut stack = StackBuffer::default();
    let stop = (0..20).find_map(|_| walk.step(&own(), &slices, space, &mut stack, &mut addresses));
    let names = std::backtrace::Backtrace::force_capture().to_string();
    let frames =
        names.lines().filter(|line| line.trim_start().split(": ").next().is_some_and(|n| n.parse::<u32>().is_ok()));
    assert_eq!(stop, Some(StopReason::Complete), "{:x?}\n{names}", addresses.0);
    assert!(addresses.0.len() > 5 && frames.count() >= 5, "{:x?}\n{names}", addresses.0);
    assert_eq!(addresses.0[0], ip);
}

#[test]
#[cfg_attr(miri, ignore = "reads the machine's own files")]
fn what_does_not_fit_stops_a_walk_and_is_told() {
    let mut memory = Memory::default();
    let mut tables = UnwindTables::new(64, 1 << 12);
    let space = tables.map(&own(), &maps(), 7, &mut memory).expect("own mappings");
    let ranges = &memory.ranges[space.first as usize..][..space.count as usize];
    assert!(ranges.iter().any(|range| range.rows == 0 && range.first_row == no_table::STOP));
    assert_eq!(tables.without_room(), 0, "no sample has asked for any");
    let here = what_does_not_fit_stops_a_walk_and_is_told as *const () as u64;
    let maps_now = maps();
    let mapping = maps_now.iter().find(|mapping| mapping.contains(here)).expect("this test's code");
    assert!(
        !tables.meet(&own(), mapping, here, space.version, &Identities::new(), &mut memory),
        "there is no room for it"
    );
    assert_eq!(tables.without_room(), 1, "{tables:?}");
    let mut enough = UnwindTables::new((tables.bytes_wanted() / 8) as u32, 1 << 12);
    let nothing = Wanted { image: 7, allowance: Some(0), ..Wanted::default() };
    let (space, more) = enough.map_some(&own(), &maps(), &nothing, &mut memory).expect("own mappings");
    assert!(more, "the allowance was too small");
    assert!(
        enough.meet(&own(), mapping, here, space.version, &Identities::new(), &mut memory),
        "what was told to do does"
    );
    assert!(
        enough.meet(&own(), mapping, here, space.version, &Identities::new(), &mut memory),
        "the process does not have it yet"
    );
    let (space, _) = enough.map_some(&own(), &maps(), &nothing, &mut memory).expect("own mappings");
    let ranges = &memory.ranges[space.first as usize..][..space.count as usize];
    let range = ranges.iter().find(|range| (range.start..range.end).contains(&here)).expect("covered");
    assert!(range.rows > 0 && range.end - range.start <= 1 << 20, "{range:?}: one window of a large file");
    assert!(!enough.meet(&own(), mapping, here, space.version, &Identities::new(), &mut memory), "now it has");
    // Adjacent code in the same file is made without being asked for, as far as there is room.
    let mut roomy = UnwindTables::new(enough.rows.size * 8, 1 << 12);
    roomy.map_some(&own(), &maps(), &nothing, &mut memory).expect("own mappings");
    assert_eq!(
        roomy.make_more(&own(), &maps_now, &Identities::new(), &mut memory),
        (false, false),
        "no sample was met anywhere"
    );
    assert!(roomy.meet(&own(), mapping, here, 0, &Identities::new(), &mut memory));
    let before = roomy.rows_used();
    while let (true, true) = roomy.make_more(&own(), &maps_now, &Identities::new(), &mut memory) {}
    assert!(
        roomy.rows_used() > before && !roomy.make_more(&own(), &maps_now, &Identities::new(), &mut memory).1,
        "{before}"
    );
    let mut none = UnwindTables::new(64, 1);
    assert!(matches!(none.map(&own(), &maps(), 7, &mut memory), Err(NoRoom(_))));
}

#[test]
fn only_what_no_process_has_is_evicted_the_oldest_first() {
    let mut memory = Memory::default();
    // Ten rows and their index each.
    let mut tables = UnwindTables::new(33, 10);
    let table = |base| Table { base, rows: vec![Row(0); 10], ..Table::default() };
    let source = |inode| Source::File(FileIdentity { dev: 1, inode, mtime_ns: 0, size: 0 });
    for inode in 1..=3 {
        tables.calls += 1;
        let placed = tables.place(&table(inode), u64::MAX, &HashSet::new(), &mut memory).expect("fits");
        let placed = Placed::whole(placed, 0, Vec::new(), tables.calls);
        tables.known.insert(source(inode), Known::Placed(placed));
    }
    // The oldest is in use: by a process, then by the one at hand.
    tables.blocks.push(Block { first: 0, count: 1, sources: HashSet::from([source(1)]), unused: None });
    assert!(tables.place(&table(4), u64::MAX, &HashSet::from([source(2)]), &mut memory).is_some());
    let left: Vec<u64> = [1, 2, 3].into_iter().filter(|inode| tables.known.contains_key(&source(*inode))).collect();
    assert_eq!(left, [1, 2]);
    let all = HashSet::from([source(2)]);
    assert!(tables.place(&table(5), u64::MAX, &all, &mut memory).is_none(), "everything is in use");
}

#[test]
fn ranges_rest_before_they_are_used_again() {
    let mut memory = Memory::default();
    let mut tables = UnwindTables::new(1, 4);
    let first = tables.ranges.take(4).expect("free");
    tables.blocks.push(Block { first, count: 4, sources: HashSet::new(), unused: None });
    memory.spaces.push(Space { image: 1, first, count: 4, ..Space::default() });
    tables.sweep(&memory);
    assert!(tables.blocks[0].unused.is_none(), "a process has it");
    memory.spaces.clear();
    tables.sweep(&memory);
    assert!(tables.blocks[0].unused.is_some() && tables.ranges.take(1).is_none(), "a walk may still read it");
    tables.blocks[0].unused = Instant::now().checked_sub(REST);
    tables.sweep(&memory);
    assert!(tables.blocks.is_empty());
    assert_eq!(tables.ranges.take(4), Some(0));
}

#[test]
fn what_is_unused_is_looked_for_now_and_then_and_when_room_is_needed() {
    let memory = Memory::default();
    let mut tables = UnwindTables::new(2, 4);
    let (first, unused) = (tables.ranges.take(1).expect("free"), Instant::now().checked_sub(REST));
    let block = || Block { first, count: 1, sources: HashSet::new(), unused };
    tables.swept = Some(Instant::now());
    tables.blocks.push(block());
    tables.sweep_if_due(&memory);
    assert_eq!(tables.blocks.len(), 1, "it was done just now, and there is room");
    assert_eq!(tables.ranges.take(2), Some(1));
    tables.sweep_if_due(&memory);
    assert!(tables.blocks.is_empty(), "more than half is in use");
    assert_eq!(tables.ranges.take(1), Some(0));
    tables.ranges.give_back(1, 2);
    tables.blocks.push(block());
    tables.swept = None;
    tables.sweep_if_due(&memory);
    assert!(tables.blocks.is_empty(), "it was never done");
    assert_eq!((tables.ranges.take(1), tables.rows.take(2)), (Some(0), Some(0)));
    tables.blocks.push(block());
    tables.sweep_if_due(&memory);
    assert!(tables.blocks.is_empty(), "the room of tables is needed");
}

#[test]
fn room_is_joined_again() {
    let mut room = Room::new(10, 10);
    let parts: Vec<u32> = (0..5).map(|_| room.take(2).expect("free")).collect();
    assert_eq!((parts.as_slice(), room.take(1)), (&[0, 2, 4, 6, 8][..], None));
    for part in [2, 6, 4] {
        room.give_back(part, 2);
    }
    assert_eq!((room.free.as_slice(), room.used), (&[(2, 6)][..], 4));
    assert_eq!(room.take(7), None);
    assert_eq!(room.take(6), Some(2));
}

/// An allocation never straddles two chunks, and the room skipped for that goes to smaller ones.
#[test]
fn what_is_taken_lies_in_one_chunk() {
    let mut room = Room::new(25, 10);
    assert_eq!(
        [6, 7, 4, 10, 3, 5].map(|count| room.take(count)),
        [Some(0), Some(10), Some(6), None, Some(17), Some(20)]
    );
    assert_eq!(room.free, []);
    room.give_back(10, 7);
    room.give_back(17, 3);
    assert_eq!((room.take(11), room.take(10), room.used), (None, Some(10), 25));
}

/// Arenas of trampolines that lie side by side are one mapping, and share one table.
#[test]
#[cfg(target_arch = "x86_64")]
fn each_arena_of_trampolines_has_the_same_rules() {
    let copy = [0x48, 0x83, 0xec, 8, 0xff, 0xd1, 0x48, 0x83, 0xc4, 8, 0xc3, 0, 0, 0, 0, 0];
    let bytes = copy.repeat(crate::unwind::PREFIX / 16);
    let table = crate::unwind::trampolines(gimli::EndianSlice::new(&bytes, gimli::LittleEndian)).expect("they are");
    let path = MappedPath::Anonymous;
    let mapping = Mapping { start: 0x7000_0000, end: 0x7000_0000 + 2 * ARENA, path, ..maps()[0].clone() };
    let mapping = Mapping { executable: true, offset: 0, ..mapping };
    let generated = HashMap::from([(mapping.start, Generated { table: Arc::new(table), len: ARENA })]);
    let mut memory = Memory::default();
    let mut tables = UnwindTables::new(1 << 18, 1 << 12);
    let wanted = Wanted { image: 7, generated: Some(&generated), ..Wanted::default() };
    let (space, more) = tables.map_some(&own(), &[mapping], &wanted, &mut memory).expect("room");
    assert_eq!((space.count, more), (2, false));
    let rule = |at: u64| {
        use tachyon_common::unwind::Slices;
        let tables = Slices { ranges: &memory.ranges, rows: &memory.rows, machine: 0 };
        let range = memory.ranges.iter().find(|range| (range.start..range.end).contains(&at)).expect("covered");
        let rows = &tables.rows[range.first_row as usize..][..usize::from(range.rows)];
        let pc = (at - range.bias) as u32;
        rows[rows.partition_point(|row| row.pc() <= pc) - 1].rule()
    };
    let inside = Rule::new(tachyon_common::unwind::kind::SP, 16, 0).expect("compact");
    assert!([5, 16 + 5, 0x8005, ARENA + 5, ARENA + 0x1005].iter().all(|at| rule(0x7000_0000 + at) == inside));
}
