//! Tags whose backups are files in a directory, and tags that keep their free memory.

use super::*;
use crate::common::folder::Folder;

fn on_disk(folder: &Folder) -> TagOptions {
    TagOptions { directory: Some(folder.0.clone()), ..TagOptions::host("weights") }
}

fn bytes_in(folder: &Folder) -> u64 {
    let size = |name: &String| std::fs::metadata(folder.path(name)).expect("it is there").len();
    folder.names().iter().map(size).sum()
}

#[test]
fn contents_pass_through_files_that_the_resume_removes() {
    for conf in BOTH {
        let folder = Folder::new("tag-files");
        let host = host();
        let allocator = built(conf, host.clone());
        create(&allocator, on_disk(&folder));
        let sizes = [30 * MIB, 512, 3 * MIB + 512, 700];
        let blocks = sizes.map(|bytes| allocator.take_in(TAG, bytes, HOME));
        let freed = allocator.take_in(TAG, 5 * MIB, HOME);
        blocks.iter().for_each(|b| write(&*host, b.address(), b.size_bytes(), 3, HOME));
        for _ in 0..3 {
            let paused = sleeping(&allocator).pause(TAG, &PauseOptions::default()).unwrap();
            let live = info(&allocator).live_bytes;
            assert_eq!((paused.copied_bytes, bytes_in(&folder)), (live, live));
            assert!(folder.names().len() >= 2, "a file for each kind of block");
            assert_eq!(info(&allocator).backed_bytes, live);
            let mut bytes = vec![0; 9 << 20];
            let first = blocks[0].address();
            sleeping(&allocator).read_backup(first + 5, &mut bytes).unwrap();
            assert_eq!(bytes, pattern(first, 30 * MIB, 3)[5..5 + bytes.len()]);
            let resumed = sleeping(&allocator).resume(TAG).unwrap();
            assert_eq!((resumed.copied_bytes, folder.names().len()), (live, 0));
            for block in &blocks {
                assert!(holds(&*host, block.address(), block.size_bytes(), 3, HOME));
            }
        }
        sleeping(&allocator).pause(TAG, &PauseOptions::default()).unwrap();
        allocator.give(freed);
        blocks.into_iter().for_each(|block| allocator.give(block));
        assert_eq!(folder.names().len(), 0, "no block is left");
    }
}

#[test]
fn a_directory_that_is_not_there_leaves_the_tag_awake() {
    let folder = Folder::new("tag-no-files");
    let host = host();
    let allocator = built("", host.clone());
    let directory = folder.0.join("missing");
    let mut options = TagOptions { directory: Some(directory.clone()), ..on_disk(&folder) };
    options.keep_backup = true;
    create(&allocator, options);
    let block = allocator.take_in(TAG, 3 * MIB, HOME);
    write(&*host, block.address(), 3 * MIB, 3, HOME);
    let tags = sleeping(&allocator);
    let pause = || tags.pause(TAG, &PauseOptions::default());
    match pause() {
        Err(SleepError::Disk { directory: named, size_bytes, source, .. }) => {
            assert_eq!((named, size_bytes), (directory, 3 * MIB));
            let text = source.to_string();
            assert!(text.ends_with(": No such file or directory (code 2)"), "{text}");
        }
        other => panic!("{other:?}"),
    }
    assert_eq!(info(&allocator).state, TagState::Awake);
    assert!(holds(&*host, block.address(), 3 * MIB, 3, HOME));
    // The next pauses save to another directory, and in host memory.
    tags.set_directory(TAG, Some(&folder.0)).unwrap();
    pause().unwrap();
    assert_eq!(bytes_in(&folder), 3 * MIB);
    tags.set_directory(TAG, None).unwrap();
    tags.resume(TAG).unwrap();
    pause().unwrap();
    assert_eq!(folder.names().len(), 0);
    tags.resume(TAG).unwrap();
    assert!(holds(&*host, block.address(), 3 * MIB, 3, HOME));
    // The pinned memory of the last pause does not have the contents of the next one.
    write(&*host, block.address(), 3 * MIB, 4, HOME);
    tags.set_directory(TAG, Some(&folder.0)).unwrap();
    pause().unwrap();
    assert_eq!((folder.names().len(), info(&allocator).kept_backup_bytes), (1, 3 * MIB));
    let copies = host.calls("copy_in");
    tags.resume(TAG).unwrap();
    assert_eq!(host.calls("copy_in"), copies + 1);
    assert!(holds(&*host, block.address(), 3 * MIB, 4, HOME));
    allocator.give(block);
    let unknown = PoolId { user: 999, ..TAG };
    tags.set_directory(unknown, None).unwrap_err();
}

#[test]
fn a_tag_is_found_again_after_its_directory_changed() {
    let folder = Folder::new("tag-found");
    let handle = stratalloc::build("backend:native", host()).unwrap();
    let tag = handle.tag(TagOptions::host("weights")).unwrap();
    let sleeping = handle.control().sleeping.expect("native has tags");
    sleeping.set_directory(tag.pool(), Some(&folder.0)).unwrap();
    for same in [TagOptions::host("weights"), on_disk(&folder)] {
        assert_eq!(handle.tag(same).unwrap().pool(), tag.pool());
    }
    let directory = Some(folder.0.join("other"));
    for other in [TagOptions { directory, ..on_disk(&folder) }, TagOptions::dropped("weights")] {
        assert!(matches!(handle.tag(other), Err(SleepError::OtherOptions { .. })));
    }
}

#[test]
fn an_allocator_that_ends_removes_its_files() {
    let folder = Folder::new("tag-end");
    let allocator = built("", host());
    create(&allocator, on_disk(&folder));
    let _block = allocator.take_in(TAG, 3 * MIB, HOME);
    sleeping(&allocator).pause(TAG, &PauseOptions::default()).unwrap();
    assert_eq!(folder.names().len(), 1);
    drop(allocator);
    assert_eq!(folder.names().len(), 0);
}

#[test]
fn free_memory_is_mapped_again_if_the_tag_keeps_it() {
    for conf in BOTH {
        let host = host();
        let allocator = built(conf, host.clone());
        create(&allocator, TagOptions { keep_free: true, ..TagOptions::host("weights") });
        let block = allocator.take_in(TAG, 30 * MIB, HOME);
        write(&*host, block.address(), 30 * MIB, 3, HOME);
        allocator.give(allocator.take_in(TAG, 60 * MIB, HOME));
        let (before, mapped) = (host.used_bytes(), info(&allocator).mapped_bytes);
        assert!(mapped >= 90 * MIB);
        for _ in 0..2 {
            let paused = sleeping(&allocator).pause(TAG, &PauseOptions::default()).unwrap();
            assert_eq!((paused.copied_bytes, paused.unmapped_bytes), (30 * MIB, mapped));
            assert_eq!((host.used_bytes(), info(&allocator).mapped_bytes), (before - mapped, 0));
            let resumed = sleeping(&allocator).resume(TAG).unwrap();
            assert_eq!((resumed.mapped_bytes, host.used_bytes()), (mapped, before));
        }
        let calls = host.calls("create");
        allocator.give(allocator.take_in(TAG, 60 * MIB, HOME));
        assert_eq!(host.calls("create"), calls, "it is served from the cache");
        assert!(holds(&*host, block.address(), 30 * MIB, 3, HOME));
        allocator.give(block);
    }
}

#[test]
fn free_memory_is_given_up_if_the_device_is_short() {
    for conf in BOTH {
        let host = Arc::new(Host::with_bytes(128 * MIB));
        let allocator = built(conf, host.clone());
        create(&allocator, TagOptions { keep_free: true, ..TagOptions::host("weights") });
        let block = allocator.take_in(TAG, 20 * MIB, HOME);
        write(&*host, block.address(), 20 * MIB, 3, HOME);
        allocator.give(allocator.take_in(TAG, 60 * MIB, HOME));
        sleeping(&allocator).pause(TAG, &PauseOptions::default()).unwrap();
        let other = allocator.take(80 * MIB);
        let resumed = sleeping(&allocator).resume(TAG).unwrap();
        assert!((20 * MIB..=40 * MIB).contains(&resumed.mapped_bytes), "{resumed:?}");
        assert!(holds(&*host, block.address(), 20 * MIB, 3, HOME));
        allocator.give(block);
        allocator.give(other);
    }
}
