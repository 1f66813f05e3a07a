//! Recordings that a test writes, in the JSON format of PyTorch.

use std::collections::BTreeMap;

pub(super) const MIB: u64 = 1 << 20;

/// A recording of one device.
#[derive(Default)]
pub(super) struct Made {
    entries: Vec<String>,
    /// The size and stream of each segment, by address.
    segments: BTreeMap<u64, (u64, u64)>,
    /// The size of each live block, by address.
    live: BTreeMap<u64, u64>,
    stream: u64,
    conf: &'static str,
}

impl Made {
    /// Returns an empty recording of a program with this configuration.
    pub(super) fn with_conf(conf: &'static str) -> Self {
        Self { conf, ..Self::default() }
    }

    /// Sets the stream of the following entries.
    pub(super) fn on_stream(&mut self, stream: u64) {
        self.stream = stream;
    }

    /// Adds an entry with any action.
    pub(super) fn entry(&mut self, action: &str, address: u64, bytes: u64) {
        let place = format!(r#""addr":{address},"size":{bytes},"stream":{}"#, self.stream);
        let time_us = self.entries.len() + 1000;
        self.entries.push(format!(r#"{{"action":"{action}",{place},"time_us":{time_us}}}"#));
    }

    /// Adds a text that the program attaches to a block.
    pub(super) fn annotate(&mut self, address: u64, bytes: u64, text: &str) {
        self.entries.push(format!(
            r#"{{"action":"annotate","addr":{address},"size":{bytes},"stream":0,"user_metadata":"{text}"}}"#
        ));
    }

    /// Adds a new segment.
    pub(super) fn segment(&mut self, address: u64, bytes: u64) {
        self.entry("segment_alloc", address, bytes);
        self.segments.insert(address, (bytes, self.stream));
    }

    /// Adds the release of a segment.
    pub(super) fn release(&mut self, address: u64) {
        let (bytes, _) = self.segments.remove(&address).expect("there is such a segment");
        self.entry("segment_free", address, bytes);
    }

    /// Adds a request that succeeds.
    pub(super) fn alloc(&mut self, address: u64, bytes: u64) {
        self.entry("alloc", address, bytes);
        self.live.insert(address, bytes);
    }

    /// Adds a request that succeeds, with more fields in its entry.
    pub(super) fn alloc_with(&mut self, address: u64, bytes: u64, more: &str) {
        self.alloc(address, bytes);
        let entry = self.entries.last_mut().expect("that of the request");
        entry.insert_str(entry.len() - 1, more);
    }

    /// Gives the last entry a stack of one frame, with this line.
    pub(super) fn at_line(&mut self, line: u32) {
        let entry = self.entries.last_mut().expect("there is an entry");
        let frames = format!(r#","frames":[{{"filename":"job.py","line":{line},"name":"step"}}]"#);
        entry.insert_str(entry.len() - 1, &frames);
    }

    /// Removes all entries so far, so that they happened before the recording began.
    pub(super) fn forget_entries(&mut self) {
        self.entries.clear();
    }

    /// Removes all entries of an action, as `skip_actions` of PyTorch's recorder does.
    pub(super) fn skip(&mut self, action: &str) {
        let start = format!(r#"{{"action":"{action}""#);
        self.entries.retain(|entry| !entry.starts_with(&start));
    }

    /// Adds a free that completes at once.
    pub(super) fn free(&mut self, address: u64, bytes: u64) {
        self.entry("free_requested", address, bytes);
        self.entry("free_completed", address, bytes);
        self.live.remove(&address);
    }

    /// Adds a free that does not complete yet, because other streams use the block.
    pub(super) fn wait_for_other_streams(&mut self, address: u64, bytes: u64) {
        self.entry("free_requested", address, bytes);
    }

    /// Adds the completion of a free that waited.
    pub(super) fn complete(&mut self, address: u64, bytes: u64) {
        self.entry("free_completed", address, bytes);
        self.live.remove(&address);
    }

    /// Adds a request that fails.
    pub(super) fn out_of_memory(&mut self, bytes: u64, device_free_bytes: u64) {
        let time_us = self.entries.len() + 1000;
        self.entries.push(format!(
            r#"{{"action":"oom","device_free":{device_free_bytes},"size":{bytes},"stream":{},"time_us":{time_us}}}"#,
            self.stream
        ));
    }

    /// Returns the snapshot. Sizes of live blocks are rounded up to multiples of 512 bytes, and each gap
    /// between two live blocks is one free block.
    pub(super) fn json(&self) -> String {
        let segments = self.segments.iter().map(|(at, of)| self.segment_json(*at, *of));
        let segments: Vec<_> = segments.collect();
        format!(
            r#"{{"segments":[{}],"device_traces":[[{}]],"allocator_settings":{{"PYTORCH_CUDA_ALLOC_CONF":"{}"}}}}"#,
            segments.join(","),
            self.entries.join(","),
            self.conf
        )
    }

    fn segment_json(&self, address: u64, (bytes, stream): (u64, u64)) -> String {
        let block = |from: u64, to: u64, state: &str| {
            format!(r#"{{"address":{from},"size":{},"state":"{state}"}}"#, to - from)
        };
        let (mut blocks, mut next) = (Vec::new(), address);
        for (live, live_bytes) in self.live.range(address..address + bytes) {
            if next < *live {
                blocks.push(block(next, *live, "inactive"));
            }
            next = live + live_bytes;
            blocks.push(block(*live, next, "active_allocated"));
        }
        if next < address + bytes {
            blocks.push(block(next, address + bytes, "inactive"));
        }
        format!(
            r#"{{"device":0,"address":{address},"total_size":{bytes},"stream":{stream},"blocks":[{}]}}"#,
            blocks.join(",")
        )
    }
}
