use super::*;
use crate::hash::{FrameHash, stack_id};
use crate::rows::{FrameRow, Labels};
use std::collections::BTreeMap;
use std::sync::Arc;

/// Ten processes with a hundred stacks each, some of which they share.
fn segment() -> Segment {
    let mut segment = Segment {
        name: "h-20261122T190113Z-000000".into(),
        slice_ms: 60_000,
        interval_ns: 10_000_000,
        ..Segment::default()
    };
    for process in 0..10 {
        let labels = Arc::new(Labels { pid: Some(process), comm: Some("python3".into()), ..Labels::default() });
        for number in 0..100 {
            let of = if number < 50 { 0 } else { process };
            let frames: Vec<FrameHash> = (0..1 + number % 7)
                .map(|depth| {
                    let (function, build_id) = (format!("f{of}.{number}.{depth}"), (depth == 3).then_some("9f"));
                    let kind = if build_id.is_some() { "native" } else { "python" };
                    let hash = FrameHash::new(kind, &function, "/srv/app.py", Some(7), build_id);
                    segment.frames.insert(
                        hash.frame_id(),
                        FrameRow {
                            frame_id: hash.frame_id(),
                            function: function.into(),
                            file: "/srv/app.py".into(),
                            line: Some(7),
                            kind: kind.into(),
                            build_id: build_id.map(Into::into),
                        },
                    );
                    hash
                })
                .collect();
            let id = stack_id(&frames);
            segment.stacks.insert(id, frames.iter().map(FrameHash::frame_id).collect());
            segment.samples.push(SampleRow {
                service: "web".into(),
                slice_start_ms: 1_795_374_073_000,
                stack_id: id,
                labels: Arc::clone(&labels),
                host: "h".into(),
                on_cpu_ns: 20_000_000,
                waiting_ns: 10_000_000,
                samples: 3,
            });
        }
    }
    segment
}

/// Names of a stack's functions.
fn functions(dictionary: &proto::ProfilesDictionary, stack: i32) -> Vec<&str> {
    let at = |index: i32| usize::try_from(index).unwrap();
    let locations = dictionary.stack_table[at(stack)].location_indices.iter();
    locations
        .map(|&location| {
            let line = &dictionary.location_table[at(location)].lines[0];
            let function = &dictionary.function_table[at(line.function_index)];
            dictionary.string_table[at(function.name_strindex)].as_str()
        })
        .collect()
}

#[test]
fn messages_are_as_small_as_servers_want_them_and_nothing_is_lost() {
    let segment = segment();
    for (limit, expected) in [(usize::MAX, 1), (40_000, 3)] {
        let messages = messages(&segment, limit);
        assert!(messages.len() >= expected, "{}", messages.len());
        assert_eq!(messages.iter().map(|message| message.samples).sum::<u64>(), 3_000);
        let mut counts: BTreeMap<(i64, Vec<String>, String), i64> = BTreeMap::new();
        let mut ids = std::collections::BTreeSet::new();
        for message in &messages {
            assert!(message.request.encoded_len() <= limit, "{}", message.request.encoded_len());
            let dictionary = message.request.dictionary.as_ref().unwrap();
            for resource in &message.request.resource_profiles {
                let pid =
                    resource.resource.as_ref().unwrap().attributes.iter().find(|it| it.key == "process.pid").unwrap();
                let Some(Value::IntValue(pid)) = pid.value.clone().unwrap().value else { panic!("a number") };
                for profile in &resource.scope_profiles[0].profiles {
                    assert!(ids.insert(profile.profile_id.clone()), "each profile has an id of its own");
                    let name = profile.sample_type.unwrap().type_strindex;
                    let name = dictionary.string_table[usize::try_from(name).unwrap()].clone();
                    for sample in &profile.samples {
                        let stack: Vec<String> =
                            functions(dictionary, sample.stack_index).into_iter().map(str::to_owned).collect();
                        *counts.entry((pid, stack, name.clone())).or_default() += sample.values[0];
                    }
                }
            }
        }
        assert_eq!(counts.len(), 3 * 1000);
        for ((_, _, name), value) in counts {
            assert_eq!(
                value,
                match name.as_str() {
                    "samples" => 3,
                    "cpu" => 20_000_000,
                    "off_cpu" => 10_000_000,
                    _ => 0,
                }
            );
        }
    }
}

#[test]
fn dictionaries_begin_with_nothing_and_have_nothing_twice() {
    let messages = messages(&segment(), usize::MAX);
    let dictionary = messages[0].request.dictionary.as_ref().unwrap();
    assert_eq!(dictionary.stack_table[0], proto::Stack::default());
    assert_eq!(dictionary.location_table[0], proto::Location::default());
    assert_eq!(dictionary.string_table[0], "");
    let once = |texts: Vec<String>| texts.iter().collect::<std::collections::BTreeSet<_>>().len() == texts.len();
    assert!(once(dictionary.string_table.clone()));
    assert!(once(dictionary.stack_table.iter().map(|it| format!("{it:?}")).collect()));
    assert!(once(dictionary.location_table.iter().map(|it| format!("{it:?}")).collect()));
    assert!(once(dictionary.function_table.iter().map(|it| format!("{it:?}")).collect()));
    // Only objects with a build id have a mapping.
    assert_eq!(dictionary.mapping_table.len(), 2);
    let mapping = &dictionary.mapping_table[1];
    let attribute = &dictionary.attribute_table[usize::try_from(mapping.attribute_indices[0]).unwrap()];
    assert_eq!(
        dictionary.string_table[usize::try_from(attribute.key_strindex).unwrap()],
        "process.executable.build_id.gnu"
    );
}

#[test]
fn the_same_segment_gives_the_same_messages() {
    let (segment, other) = (segment(), segment());
    assert_eq!(messages(&segment, 40_000), messages(&other, 40_000));
}
