use super::*;
use crate::kernel::{Options, Waits};
use aya_obj::generated::{bpf_attr, bpf_cmd};
use tachyon_common::whose::{Asyncio, Greenlets};

fn options(made_for: Option<MadeFor>) -> Options {
    Options { unwind_memory: Some(1 << 20), made_for, ..Options::default() }
}

/// The layout of some version: what it has is somewhere.
fn some_layout() -> Layout {
    Layout { version_hex: 0x030d_00f0, tstate_frame: 72, frame_code: 0, frame_previous: 8, ..Layout::default() }
        .complete()
}

fn alone() -> MadeFor {
    MadeFor { layout: some_layout(), greenlets: false, tasks: false }
}

/// How many instructions of the programs with this name the verifier has looked at, for each time that it was loaded.
fn verified(kernel: &Kernel, program: &str) -> Vec<u32> {
    let counts = kernel.verified_instructions();
    counts.into_iter().filter(|(name, _)| name == program).filter_map(|(_, count)| count).collect()
}

#[test]
fn what_is_loaded_is_made_for_more_where_more_is_met() {
    let other = Layout { version_hex: 0x0308_00f0, ..some_layout() };
    type Meets = fn(&mut Kernel, &Layout);
    let meets: [Meets; 3] = [
        |kernel, other| assert_eq!(kernel.layout_number(other).expect("there is room"), 1),
        |kernel, _| assert_eq!(kernel.greenlets_number(&Greenlets::default()).expect("they are loaded"), Some(1)),
        |kernel, _| assert_eq!(kernel.asyncio_number(&Asyncio::default()).expect("they are loaded"), Some(1)),
    ];
    for meet in meets {
        let mut kernel = Kernel::load(&options(Some(alone()))).expect("needs root and BPF");
        assert_eq!(kernel.layout_number(&some_layout()).expect("it is there"), 0);
        assert!(kernel.is_narrow(), "it is what they were made for");
        let narrow = verified(&kernel, "walk_frames");
        meet(&mut kernel, &other);
        assert!(!kernel.is_narrow());
        match (narrow[..].first(), &verified(&kernel, "walk_frames")[..]) {
            (Some(narrow), [before, wide]) => assert!(before == narrow && narrow < wide, "{narrow} and {wide}"),
            // The kernel does not count them (before 5.16).
            (None, []) => {}
            counts => panic!("{counts:?}"),
        }
        // More of it takes no other programs.
        meet(&mut kernel, &other);
    }
}

/// What the first programs already have needs no others.
#[test]
fn what_was_there_at_the_start_is_in_the_first_programs() {
    let made_for = MadeFor { greenlets: true, tasks: true, ..alone() };
    let mut kernel = Kernel::load(&options(Some(made_for))).expect("needs root and BPF");
    assert_eq!(kernel.greenlets_number(&Greenlets::default()).expect("there is room"), Some(1));
    assert_eq!(kernel.asyncio_number(&Asyncio::default()).expect("there is room"), Some(1));
    assert!(kernel.is_narrow());
}

#[test]
fn more_may_be_met_while_the_verifier_is_busy() {
    let mut kernel = Kernel::open(&options(Some(alone()))).expect("needs root and BPF");
    let verifying = kernel.verify().expect("a thread can be made");
    assert_eq!(kernel.greenlets_number(&Greenlets::default()).expect("they are loaded"), Some(1));
    kernel.add_samplers(verifying.wait().expect("the verifier is content")).expect("the table takes them");
    let (table, wide) = (stages(), kernel.wide.as_ref().expect("they are loaded"));
    for (index, name) in (0_u32..).zip(STAGES) {
        let loaded = wide.iter().find(|(loaded, _)| loaded == name).map(|(_, info)| info.id());
        assert_eq!(loaded.is_some(), kernel.samplers.contains(&name), "{name}");
        assert_eq!(stage(table, index), loaded, "{name}");
    }
}

/// The table for programs of perf events (`BPF_PROG_TYPE_PERF_EVENT`), the only one of this process.
fn stages() -> RawFd {
    let entries = std::fs::read_dir("/proc/self/fdinfo").expect("it is there");
    let is_it = |path: &std::path::Path| {
        std::fs::read_to_string(path).is_ok_and(|text| text.lines().any(|line| line == "owner_prog_type:\t7"))
    };
    let found = entries.filter_map(Result::ok).find(|entry| is_it(&entry.path())).expect("it is open");
    found.file_name().to_str().and_then(|name| name.parse().ok()).expect("a number")
}

/// The id of the program at this place of the table.
fn stage(table: RawFd, index: u32) -> Option<u32> {
    let mut id = 0_u32;
    // SAFETY: all zeros are a valid `bpf_attr`.
    let mut attr: bpf_attr = unsafe { std::mem::zeroed() };
    // SAFETY: the member of the union that `BPF_MAP_LOOKUP_ELEM` reads; its fields are plain numbers.
    let lookup = unsafe { &mut attr.__bindgen_anon_2 };
    lookup.map_fd = table.cast_unsigned();
    lookup.key = std::ptr::from_ref(&index).addr() as u64;
    lookup.__bindgen_anon_1.value = std::ptr::from_mut(&mut id).addr() as u64;
    let command = bpf_cmd::BPF_MAP_LOOKUP_ELEM as libc::c_long;
    // SAFETY: the map's keys and values have four bytes, and all three outlive the call.
    let found = unsafe { libc::syscall(libc::SYS_bpf, command, &raw const attr, size_of::<bpf_attr>()) };
    (found == 0).then_some(id)
}

/// What a target claims of its layout is not trusted, and whatever it is, the verifier has to be content.
#[test]
fn the_verifier_accepts_programs_for_any_layout() {
    const FIELDS: usize = size_of::<Layout>() / 4;
    let mut random = fastrand::Rng::with_seed(22);
    for absent in [0, 1, 5, 9, 10] {
        let fields: Vec<u8> = (0..FIELDS)
            .flat_map(|_| if random.u32(0..10) < absent { Layout::ABSENT } else { random.u32(..) }.to_ne_bytes())
            .collect();
        let layout = Pod::<Layout>::of_bytes(&fields).expect("as many bytes as it has").0;
        for layout in [layout, Layout { flags: layout.flags & 0xff, ..layout }.complete()] {
            let made_for = MadeFor { layout, greenlets: true, tasks: true };
            Kernel::load(&options(Some(made_for))).unwrap_or_else(|error| panic!("{error}: {layout:?}"));
        }
    }
}

#[test]
fn waits_and_chosen_events_have_programs_for_everything() {
    assert!(options(Some(alone())).made_for().is_some());
    assert!(Options { waits: Waits::Too, ..options(Some(alone())) }.made_for().is_none());
}
