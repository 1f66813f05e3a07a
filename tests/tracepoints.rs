//! The notes in this test program by which tracing tools find the tracepoints.

use object::Endianness;
use object::elf::FileHeader64;
use object::read::elf::{FileHeader, SectionHeader};

use crate::common::prelude::*;

/// Returns the provider, name and arguments of a SystemTap SDT note: three strings that follow three
/// addresses.
fn texts_of(note: &[u8]) -> Vec<String> {
    let texts = note[3 * size_of::<u64>()..].split(|byte| *byte == 0);
    texts.take(3).map(|text| String::from_utf8_lossy(text).into_owned()).collect()
}

#[test]
fn the_program_has_notes_of_malloc_with_four_arguments_and_of_free_with_one() {
    // Makes the linker include the strategies, whose code contains the tracepoints.
    for conf in ["backend:native", "backend:cudaMallocAsync", "backend:cpu"] {
        let config = config(conf);
        let device = std::sync::Arc::new(Sim::new(Default::default()));
        let allocator = registry::build(&config, device, BuildOptions::default()).unwrap();
        allocator.give(allocator.take(512));
    }
    let program = std::fs::read(std::env::current_exe().unwrap()).unwrap();
    let program = &*program;
    let file = FileHeader64::<Endianness>::parse(program).unwrap();
    let endian = file.endian().unwrap();
    let sections = file.sections(endian, program).unwrap();
    let (_, section) = sections.section_by_name(endian, b".note.stapsdt").expect("notes");
    let mut notes = section.notes(endian, program).unwrap().expect("a section of notes");
    let mut counts = std::collections::BTreeMap::new();
    while let Some(note) = notes.next().unwrap() {
        let found = texts_of(note.desc());
        if note.name() == b"stapsdt" && found[0] == "stratalloc" {
            *counts.entry((found[1].clone(), found[2].split(' ').count())).or_insert(0) += 1;
        }
    }
    let kinds: Vec<_> = counts.keys().map(|(name, count)| (name.as_str(), *count)).collect();
    assert_eq!(kinds, [("free", 1), ("malloc", 4)]);
}
