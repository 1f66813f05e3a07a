//! Typed buffers: their contents, the calls that they refuse, and when their memory is freed.

#[cfg(target_os = "linux")]
mod copies;
#[cfg(all(feature = "cudarc", target_os = "linux"))]
mod cudarc;
#[cfg(target_os = "linux")]
mod dlpack;
mod lent;

use stratalloc::handle::{BufferError, DeviceVec, Released};

use crate::common::prelude::*;

#[cfg(target_os = "linux")]
use crate::common::machine::HostMachine;

const ON: StreamId = StreamId::DEFAULT;
/// Strategies whose blocks are memory of the device.
const DEVICE_CONFS: [&str; 3] =
    ["backend:native", "backend:native,expandable_segments:True", "backend:cudaMallocAsync"];

const CONFS: [&str; 8] = [
    "backend:native",
    "backend:native,expandable_segments:True",
    "backend:cudaMallocAsync",
    "backend:cpu",
    "backend:pinned",
    "backend:cpu,layers:[front,statistics]",
    "backend:cpu,layers:[align:4KiB,limit:1GiB]",
    "backend:native,layers:[front,track]",
];

fn handle(machine: &impl Machine, conf: &str) -> Handle {
    let config = config(conf);
    Handle::build(&config, machine.driver()).expect("the machine can")
}

fn live_blocks(handle: &Handle) -> i64 {
    handle.stats().allocation.all.current
}

#[cfg(target_os = "linux")]
#[test]
fn values_come_back_as_they_went() {
    for conf in CONFS {
        let machine = HostMachine::new(256 * MIB);
        let handle = handle(&machine, conf);
        let values: Vec<u32> = (0..100_000).collect();
        let vec = handle.from_slice(&values, ON).unwrap();
        assert_eq!((vec.len(), vec.size_bytes(), vec.is_empty()), (100_000, 400_000, false));
        assert_eq!(vec.to_vec().unwrap(), values);
        let zeros = handle.zeroed::<[f64; 2]>(333, ON).unwrap();
        assert_eq!(zeros.to_vec().unwrap(), vec![[0.0; 2]; 333]);
        let mut copy = handle.uninit::<u32>(100_000, ON).unwrap();
        copy.view_mut().copy_from(&vec.view()).unwrap();
        assert_eq!(copy.to_vec().unwrap(), values);
        drop((vec, copy));
        assert_eq!(live_blocks(&handle), 1);
    }
}

/// Writes, reads, copies and fills buffers of a handle.
fn use_buffers(handle: &Handle, stores_bytes: bool, what: &str) {
    let values: Vec<u32> = (1..=3000).collect();
    let mut vec = handle.from_slice(&values, ON).unwrap_or_else(|error| panic!("{what}: {error}"));
    let zeros = handle.zeroed::<u32>(3000, ON).unwrap_or_else(|error| panic!("{what}: {error}"));
    let mut copy = handle.uninit::<u32>(3000, ON).expect(what);
    copy.view_mut().copy_from(&vec.view()).expect(what);
    let [read, copied] = [vec.to_vec().expect(what), copy.to_vec().expect(what)];
    assert_eq!(zeros.to_vec().expect(what), vec![0; 3000], "{what}");
    vec.slice_mut(1..).expect(what).fill_zero().expect(what);
    let first = vec.slice(..2).expect(what).to_vec().expect(what);
    if stores_bytes {
        assert_eq!((&read, &copied), (&values, &values), "{what}");
        assert_eq!(first, [1, 0], "{what}");
    }
}

#[test]
fn buffers_of_every_strategy_can_be_used_on_a_device_without_bytes() {
    for conf in CONFS {
        let machine = SimMachine::new(256 * MIB);
        let handle = handle(&machine, conf);
        use_buffers(&handle, false, conf);
        assert_eq!(handle.lost_blocks(), 0, "{conf}");
        // The layer `front` keeps freed blocks, which are live for the allocator below.
        assert!(live_blocks(&handle) == 0 || conf.contains("front"), "{conf}");
    }
}

#[cfg(target_os = "linux")]
#[test]
fn buffers_of_functions_of_the_user_can_be_used() {
    let machine = HostMachine::new(256 * MIB);
    let (gets, frees) = (machine.driver(), machine.driver());
    let callbacks = Callbacks::new(
        move |bytes, _, _| gets.allocate(bytes.next_multiple_of(512)).ok(),
        move |address, bytes: u64, _, _| {
            frees.free(address, bytes.next_multiple_of(512)).expect("it was allocated so");
        },
    );
    registry::register_callbacks("buffers_own", callbacks).unwrap();
    use_buffers(&handle(&machine, "backend:buffers_own"), true, "own functions");
}

#[cfg(target_os = "linux")]
#[test]
fn buffers_keep_their_contents_through_switches_and_are_copied_between_strategies() {
    let machine = HostMachine::new(256 * MIB);
    let values: Vec<u16> = (0..5000).collect();
    for from in CONFS {
        let handle = handle(&machine, from);
        let before = handle.from_slice(&values, ON).unwrap();
        for to in CONFS {
            let what = format!("{from} to {to}");
            handle.switch(to).unwrap();
            use_buffers(&handle, true, &what);
            assert_eq!(before.to_vec().unwrap(), values, "{what}");
            let mut after = handle.uninit::<u16>(5000, ON).unwrap();
            after.view_mut().copy_from(&before.view()).unwrap();
            assert_eq!(after.to_vec().unwrap(), values, "{what}");
            let mut back = handle.zeroed::<u16>(4000, ON).unwrap();
            back.view_mut().copy_from(&after.slice(1000..).unwrap()).unwrap();
            assert_eq!(back.to_vec().unwrap(), values[1000..], "{what}");
        }
        drop(before);
        assert_eq!(handle.lost_blocks(), 0, "{from}");
    }
}

#[test]
fn host_memory_that_was_freed_by_its_address_is_not_accessed() {
    let machine = SimMachine::new(64 * MIB);
    let handle = handle(&machine, "backend:cpu");
    let mut vec = handle.from_slice(&[7u8; 100], ON).unwrap();
    handle.free_raw(vec.address()).unwrap();
    let reused = handle.zeroed::<u8>(100, ON).unwrap();
    assert_eq!(reused.address(), vec.address());
    assert!(matches!(vec.to_vec(), Err(BufferError::Handle(HandleError::Stale { .. }))));
    assert!(vec.view_mut().copy_from_host(&[1; 100]).is_err());
    assert_eq!(reused.to_vec().unwrap(), [0; 100]);
}

#[cfg(target_os = "linux")]
#[test]
fn parts_are_read_and_written_where_they_lie() {
    for conf in CONFS {
        write_parts(conf);
    }
}

#[cfg(target_os = "linux")]
fn write_parts(conf: &str) {
    let machine = HostMachine::new(64 * MIB);
    let handle = handle(&machine, conf);
    let mut vec = handle.from_slice(&[0u16, 1, 2, 3, 4, 5, 6, 7], ON).expect(conf);
    assert_eq!(vec.slice(2..5).expect(conf).to_vec().expect(conf), [2, 3, 4]);
    assert_eq!(vec.slice(..=1).expect(conf).slice(1..).expect(conf).to_vec().expect(conf), [1]);
    vec.slice_mut(6..).expect(conf).copy_from_host(&[60, 70]).expect(conf);
    let (mut front, mut back) = vec.view_mut().split_at_mut(4).expect(conf);
    back.slice_mut(..2).expect(conf).fill_zero().expect(conf);
    front.copy_from(&back.as_view()).expect(conf);
    assert_eq!(vec.to_vec().expect(conf), [0, 0, 60, 70, 0, 0, 60, 70]);
    let (a, b) = vec.view().split_at(0).expect(conf);
    assert!(a.is_empty() && b.len() == 8);
    assert_eq!(a.to_vec().expect(conf), [0u16; 0]);
}

#[test]
fn what_does_not_lie_inside_is_refused() {
    let machine = SimMachine::new(64 * MIB);
    let handle = handle(&machine, CONFS[0]);
    let mut vec = handle.zeroed::<u64>(10, ON).unwrap();
    for (start, end) in [(0, 11), (11, 11), (5, 4), (usize::MAX, usize::MAX)] {
        let error = vec.slice(start..end).unwrap_err();
        assert!(matches!(error, BufferError::OutOfRange { len: 10, .. }), "{error}");
    }
    assert!(vec.slice(0..=usize::MAX).is_err());
    assert!(vec.slice(10..).unwrap().is_empty());
    assert!(vec.view().split_at(11).is_err());
    let error = vec.view_mut().copy_from_host(&[1; 9]).unwrap_err();
    assert_eq!(error.to_string(), "a copy of 9 values into 10");
    assert!(vec.view().copy_to_host(&mut [0; 11]).is_err());
    let error = handle.uninit::<u64>(usize::MAX / 4, ON).unwrap_err();
    assert!(matches!(error, BufferError::TooLong { .. }), "{error}");
    let error = handle.uninit::<u8>(1 << 40, ON).unwrap_err();
    assert!(matches!(error, BufferError::Alloc(_)), "{error}");
    assert_eq!(live_blocks(&handle), 1);
}

#[test]
fn nothing_has_no_block_and_no_address() {
    let machine = SimMachine::new(64 * MIB);
    let handle = handle(&machine, CONFS[0]);
    let mut vec = handle.from_slice::<u32>(&[], ON).unwrap();
    assert_eq!((vec.address(), vec.len(), live_blocks(&handle)), (0, 0, 0));
    vec.view_mut().fill_zero().unwrap();
    assert_eq!(vec.to_vec().unwrap(), [0u32; 0]);
    vec.record_stream(StreamId(7)).unwrap();
    assert!(matches!(vec.release(), Released::Nothing));
    let units = handle.uninit::<()>(5, ON).unwrap();
    assert_eq!((units.len(), units.size_bytes(), units.to_vec().unwrap().len()), (5, 0, 5));
}

#[test]
fn a_drop_frees_on_its_stream_and_waits_for_recorded_ones() {
    for conf in &CONFS[..2] {
        let machine = SimMachine::new(64 * MIB);
        let handle = handle(&machine, conf);
        let (own, other) =
            (machine.driver().create_stream().unwrap(), machine.driver().create_stream().unwrap());
        let vec = handle.zeroed::<u8>(4096, own).unwrap();
        let address = vec.address();
        vec.record_stream(own).unwrap();
        vec.record_stream(other).unwrap();
        drop(vec);
        let next = handle.zeroed::<u8>(4096, own).unwrap();
        assert_ne!(next.address(), address, "{conf}: other may still read it");
        machine.finish_stream(other);
        let third = handle.zeroed::<u8>(4096, own).unwrap();
        assert_eq!(third.address(), address, "{conf}");
        drop((next, third));
        assert_eq!((live_blocks(&handle), handle.lost_blocks()), (0, 0));
    }
}

#[test]
fn released_blocks_can_be_freed_by_hand_and_taken_back() {
    let machine = SimMachine::new(64 * MIB);
    let (handle, stranger) = (handle(&machine, CONFS[0]), handle(&machine, CONFS[0]));
    let vec = handle.zeroed::<f32>(256, ON).unwrap();
    let address = vec.address();
    let Released::Block(block) = vec.release() else { panic!("it had a block") };
    assert_eq!(live_blocks(&handle), 1);
    let block = DeviceVec::<u16>::from_block(&stranger, block, ON).unwrap_err();
    let block = DeviceVec::<()>::from_block(&handle, block, ON).unwrap_err();
    let vec = DeviceVec::<u16>::from_block(&handle, block, ON).unwrap();
    assert_eq!((vec.address(), vec.len()), (address, 512));
    let Released::Block(block) = vec.release() else { panic!("it had a block") };
    handle.give(block);
    assert_eq!(live_blocks(&handle), 0);
}

struct SetOnDrop(Arc<AtomicBool>);

impl Drop for SetOnDrop {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

#[test]
fn foreign_memory_is_kept_and_never_freed() {
    let machine = SimMachine::new(64 * MIB);
    let handle = handle(&machine, CONFS[0]);
    let block = handle.take_on(1024, ON);
    let gone = Arc::new(AtomicBool::new(false));
    let adopt = |address, len| {
        let keeps = Box::new(SetOnDrop(Arc::clone(&gone)));
        DeviceVec::<u32>::adopt(&handle, address, len, ON, keeps)
    };
    let vec = adopt(block.address(), 256).unwrap();
    vec.record_stream(StreamId(9)).unwrap();
    assert_eq!(vec.slice(1..).unwrap().address(), block.address() + 4);
    drop(vec);
    assert!(gone.swap(false, Ordering::Relaxed));
    assert_eq!(live_blocks(&handle), 1);
    let Released::Foreign(keeps) = adopt(block.address(), 256).unwrap().release() else {
        panic!("it was foreign")
    };
    assert!(!gone.load(Ordering::Relaxed));
    drop(keeps);
    assert!(adopt(u64::MAX - 10, 256).is_err());
    handle.give(block);
}

/// Runs on the host device, which accepts only addresses of its own allocations. CUDA has one address
/// space for all memory, so there the access would succeed.
#[cfg(target_os = "linux")]
#[test]
fn adopted_memory_of_the_program_is_refused_at_each_access() {
    let machine = HostMachine::new(64 * MIB);
    let handle = handle(&machine, CONFS[0]);
    let values = vec![7u8; 4096];
    let address = values.as_ptr().addr() as u64;
    let mut vec = DeviceVec::<u8>::adopt(&handle, address, 4096, ON, Box::new(())).unwrap();
    assert!(vec.view_mut().fill_zero().is_err());
    assert!(vec.view_mut().copy_from_host(&[0; 4096]).is_err());
    assert!(vec.to_vec().is_err());
    handle.driver().synchronize_device().unwrap();
    assert_eq!(values, [7; 4096]);
}

#[test]
fn buffers_keep_their_allocator_alive() {
    let machine = SimMachine::new(64 * MIB);
    let vec = handle(&machine, CONFS[0]).zeroed::<u8>(100, ON).unwrap();
    assert!(machine.used_bytes() > 0);
    let also = vec.handle().clone();
    drop(vec);
    assert_eq!(live_blocks(&also), 0);
    drop(also);
    assert_eq!(machine.used_bytes(), 0);
}

#[test]
fn a_block_that_was_freed_behind_the_buffers_back_is_counted() {
    let machine = SimMachine::new(64 * MIB);
    let handle = handle(&machine, "backend:cudaMallocAsync");
    let vec = handle.zeroed::<u8>(100, ON).unwrap();
    handle.free_raw(vec.address()).unwrap();
    drop(vec);
    assert_eq!(handle.lost_blocks(), 1);
}

#[test]
fn work_of_one_stream_can_be_put_behind_that_of_another() {
    let machine = SimMachine::new(64 * MIB);
    let handle = handle(&machine, CONFS[0]);
    let [a, b] = [(); 2].map(|()| machine.0.create_stream().unwrap());
    let held = machine.0.held().events;
    handle.order(a, a).unwrap();
    assert_eq!(machine.0.calls("create_event"), 0, "a stream is in order by itself");
    handle.order(a, b).unwrap();
    assert_eq!(machine.0.held().events, held, "no event stays");
    machine.0.destroy_stream(a).unwrap();
    assert!(matches!(handle.order(a, b), Err(BufferError::Driver(_))));
    assert_eq!(machine.0.held().events, held);
}

const CHILD: &str = "STRATALLOC_TEST_FROM_ENVIRONMENT";

/// In a child process, prints the allocator that the environment configures. Does nothing in the parent.
#[test]
fn prints_the_allocator_of_its_environment_in_a_child_process() {
    if std::env::var_os(CHILD).is_none() {
        return;
    }
    registry::register("environment_own", |driver, _| {
        Ok(Box::new(registry::build(&config(""), driver, BuildOptions::default())?))
    })
    .unwrap();
    match stratalloc::from_environment(SimMachine::new(64 * MIB).driver()) {
        Ok(handle) => {
            let expands =
                handle.zeroed::<u8>(1, ON).is_ok() && handle.stats().segment.all.current == 0;
            println!("built {} {expands}", handle.name());
        }
        Err(error) => println!("failed {error}"),
    }
}

#[test]
fn the_environment_configures_a_handle_by_the_first_variable_that_is_set() {
    let printed = |variables: &[(&str, &str)]| {
        let mut child = crate::common::unconfigured(std::env::current_exe().unwrap());
        child.args(["--exact", "--nocapture"]);
        child.arg("buffers::prints_the_allocator_of_its_environment_in_a_child_process");
        let output = child.env(CHILD, "1").envs(variables.iter().copied()).output().unwrap();
        let text = String::from_utf8(output.stdout).unwrap();
        let line =
            text.lines().find(|line| line.starts_with("built") || line.starts_with("failed"));
        line.unwrap_or_else(|| panic!("{text}")).to_owned()
    };
    assert_eq!(printed(&[]), "built native false");
    assert_eq!(printed(&[("ALLOC_CONF", "expandable_segments:True")]), "built native true");
    assert_eq!(printed(&[("ALLOC_CONF", "backend:cudaMallocAsync")]), "built cudaMallocAsync true");
    let pytorch = ("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True");
    assert_eq!(printed(&[pytorch]), "built native true");
    assert_eq!(printed(&[pytorch, ("ALLOC_CONF", "backend:pinned")]), "built pinned false");
    let own = ("ALLOC_CONF", "backend:environment_own");
    assert_eq!(printed(&[own]), "built environment_own false");
    let wrong = printed(&[("PYTORCH_CUDA_ALLOC_CONF", "expandable_segment:True")]);
    assert!(wrong.contains("PYTORCH_CUDA_ALLOC_CONF: expandable_segment"), "{wrong}");
}
