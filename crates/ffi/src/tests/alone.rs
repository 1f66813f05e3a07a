//! Tests of PyTorch's functions. Each test runs in a process of its own, with its own environment and
//! standard error stream.

use std::process::Command;
use std::ptr::{null, null_mut};

use crate::{
    Status, Text, stratalloc_create, stratalloc_destroy, stratalloc_set_conf, stratalloc_switch,
    stratalloc_torch_empty_cache, stratalloc_torch_free, stratalloc_torch_handle,
    stratalloc_torch_init, stratalloc_torch_malloc,
};
use stratalloc::registry;
use stratalloc::strategies::plugin::Callbacks;

use super::{create, last_error, text};

/// A variable that is set in the processes that tests start.
const PART: &str = "STRATALLOC_TEST_PART";

/// Returns true in a process that a test has started.
fn is_part() -> bool {
    std::env::var_os(PART).is_some()
}

/// Runs one test of this file in a process with these variables and returns what it wrote to the
/// standard error stream.
fn alone(test: &str, variables: &[(&str, &str)]) -> String {
    let mut command = Command::new(std::env::current_exe().expect("tests are programs"));
    for variable in stratalloc::config::VARIABLES {
        command.env_remove(variable);
    }
    command.args(["--exact", &format!("tests::alone::{test}"), "--nocapture", "--test-threads=1"]);
    command.env(PART, test).envs(variables.iter().copied());
    let output = command.output().expect("this program can be started again");
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{test}: {errors}");
    let output_text = String::from_utf8_lossy(&output.stdout);
    assert!(output_text.contains("1 passed"), "{test} ran: {output_text}");
    errors
}

#[test]
fn probable_mistakes_are_warned_of_once() {
    if !is_part() {
        let conf = ("ALLOC_CONF", "backend:native");
        let other = ("PYTORCH_CUDA_ALLOC_CONF", "backend:cudaMallocAsync");
        let output_text = alone(
            "probable_mistakes_are_warned_of_once",
            &[conf, other, ("STRATALLOC_DEVICE", "sim")],
        );
        for words in [
            "ALLOC_CONF and PYTORCH_CUDA_ALLOC_CONF are both set and differ; ALLOC_CONF is used",
            "max_split_size_mb is set at byte 0 and at byte 21; the last value is used",
            "roundup_power2_divisions is set at byte 0 and at byte 27; the last value is used",
            "garbage_collection_threshold is set at byte 0 and at byte 33; the last value is used",
        ] {
            let line = format!("stratalloc: warning: {words}\n");
            assert_eq!(output_text.matches(&line).count(), 1, "{line}{output_text}");
        }
        assert_eq!(output_text.matches("warning").count(), 4, "{output_text}");
        return;
    }
    stratalloc_torch_init(2);
    for device in [0, 1] {
        let block = stratalloc_torch_malloc(512, device, null_mut());
        assert!(!block.is_null());
        stratalloc_torch_free(block, 512, device, null_mut());
    }
    let mut handle = 0;
    // SAFETY: the text ends with a zero, and the handle's pointer is to a local variable.
    let made = unsafe { stratalloc_create(null(), c"sim".as_ptr(), &raw mut handle) };
    assert_eq!(made, Status::Ok);
    assert_eq!(stratalloc_destroy(handle), Status::Ok);
    let handle = create("max_split_size_mb:64,max_split_size_mb:128", "sim").unwrap();
    for _ in 0..2 {
        let further = c"roundup_power2_divisions:4,roundup_power2_divisions:8";
        // SAFETY: the text ends with a zero.
        assert_eq!(unsafe { stratalloc_set_conf(handle, further.as_ptr()) }, Status::Ok);
        let whole = c"garbage_collection_threshold:0.5,garbage_collection_threshold:0.6";
        // SAFETY: the text ends with a zero.
        assert_eq!(unsafe { stratalloc_switch(handle, whole.as_ptr()) }, Status::Ok);
    }
    // A string that is refused returns an error, and writes no warning.
    assert!(create("max_split_size_mb:64,max_split_size_mb:1", "sim").is_err());
    assert_eq!(stratalloc_destroy(handle), Status::Ok);
}

#[test]
fn queries_do_not_open_an_unused_device() {
    if !is_part() {
        // This kind of device cannot be opened.
        let kind = ("STRATALLOC_DEVICE", "gpu");
        let conf = ("ALLOC_CONF", "backend:cudaMallocAsync");
        alone("queries_do_not_open_an_unused_device", &[kind, conf]);
        return;
    }
    let all = text(3, Text::TorchStatistics).unwrap();
    assert!(all.contains("\"allocated_bytes.all.peak\":0,"), "{all}");
    assert!(text(3, Text::TorchSummary).unwrap().contains("hits 0 "));
    let line = "Allocation on device 3 would exceed allowed memory. (out of memory)\n";
    assert_eq!(text(3, Text::TorchOomLine).unwrap(), line);
    for device in [128, u64::from(u32::MAX), u64::MAX] {
        let refused = text(device, Text::TorchStatistics);
        assert_eq!(refused, Err(Status::InvalidArgument), "{device}");
    }
    let mut handle = 77;
    // SAFETY: the pointer is to a local variable.
    let opened = unsafe { stratalloc_torch_handle(3, &raw mut handle) };
    assert_eq!((opened, handle), (Status::InvalidArgument, 77));
}

/// PyTorch submits copies and kernels across devices without notifying the allocator.
#[cfg(target_os = "linux")]
#[test]
fn two_devices_use_each_others_memory() {
    use stratalloc::driver::{Cuda, Driver, Peers};
    use stratalloc::ids::{DeviceId, StreamId};

    use super::gpu;

    if !is_part() {
        let Some((_alone, cuda)) = gpu::device() else { return };
        if gpu::second().is_none() {
            return;
        }
        if !Peers::can_access(&*cuda, DeviceId(1)).expect("the driver answers") {
            return gpu::skip("the second device cannot reach the first");
        }
        drop(cuda);
        for conf in [
            "backend:native",
            "expandable_segments:True",
            "backend:cudaMallocAsync",
            "backend:cudaMallocAsync,malloc_async_own_pool:True",
        ] {
            alone("two_devices_use_each_others_memory", &[("ALLOC_CONF", conf)]);
        }
        return;
    }
    const BYTES: usize = 4 << 20;
    let cudas = [0, 1].map(|device| Cuda::open(DeviceId(device)).expect("it was there"));
    let take = |device| {
        let block = stratalloc_torch_malloc(BYTES, device, null_mut());
        assert!(!block.is_null(), "{}", last_error());
        (device, block)
    };
    let blocks = [take(0), take(1), take(0), take(1), take(0)];
    let stream = StreamId::DEFAULT;
    for (value, (home, block)) in (1..).zip(blocks) {
        let address = block.addr() as u64;
        let home_at = usize::try_from(home).expect("0 or 1");
        let (home_cuda, other_cuda) = (&cudas[home_at], &cudas[1 - home_at]);
        other_cuda.fill(address, value, BYTES as u64, stream).unwrap();
        other_cuda.synchronize_device().unwrap();
        let mut seen = vec![0; BYTES];
        home_cuda.copy_to_host(&mut seen, address, stream).unwrap();
        assert!(seen.iter().all(|byte| *byte == value));
        let (to, from) = (blocks[1 - home_at], (home, block));
        let [to, from] = [to, from].map(|(device, block)| {
            (DeviceId(u32::try_from(device).expect("0 or 1")), block.addr() as u64)
        });
        home_cuda.copy_peer(to, from, BYTES as u64, stream).unwrap();
        home_cuda.synchronize_device().unwrap();
        other_cuda.copy_to_host(&mut seen, to.1, stream).unwrap();
        assert!(seen.iter().all(|byte| *byte == value));
    }
    for (device, block) in blocks {
        stratalloc_torch_free(block, BYTES, device, null_mut());
    }
}

#[test]
fn a_failed_empty_cache_is_reported() {
    if !is_part() {
        let variables = [("ALLOC_CONF", "backend:failing"), ("STRATALLOC_DEVICE", "sim")];
        let output_text = alone("a_failed_empty_cache_is_reported", &variables);
        let line = "stratalloc: a defect of the library: no such request\n";
        assert_eq!(output_text.matches(line).count(), 1, "{output_text}");
        return;
    }
    assert_eq!(stratalloc_torch_empty_cache(), Status::Ok, "there is nothing to empty");
    let allocate =
        |bytes, _, _| if bytes == 666 { panic!("no such request") } else { Some(1 << 20) };
    let failing = Callbacks::new(allocate, |_, _, _, _| {}).on_reset(|| panic!("no reset"));
    registry::register_callbacks("failing", failing).unwrap();
    assert!(stratalloc_torch_malloc(666, 1, null_mut()).is_null());
    let block = stratalloc_torch_malloc(512, 1, null_mut());
    assert!(!block.is_null());
    let all = text(1, Text::TorchStatistics).unwrap();
    assert!(all.contains("\"allocation.all.current\":1,"), "{all}");
    stratalloc_torch_free(block, 512, 1, null_mut());
    assert_eq!(stratalloc_torch_empty_cache(), Status::Internal);
    assert_eq!(last_error(), "a defect of the library: no reset");
}
