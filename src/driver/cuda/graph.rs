//! Stream capture on a CUDA device, and the captured graphs.

use std::ffi::c_void;
use std::ptr;
use std::sync::atomic::Ordering;

use super::api::{Api, got};
use super::{Cuda, RELAXED};
use crate::driver::{Capture, CaptureStatus, DriverResult, NodeId};
use crate::error::{DriverError, DriverErrorKind};
use crate::ids::StreamId;

/// The two handles of the legacy default stream, which can never be captured.
const LEGACY: [StreamId; 2] = [StreamId(0), StreamId(1)];

/// Capture information of a stream, as the driver returns it.
struct CaptureInfo {
    status: u32,
    id: u64,
    graph: u64,
    nodes: Vec<u64>,
}

/// An instantiated graph, which can be launched. Dropping it does not wait for launches that still run.
#[derive(Debug)]
pub struct Graph {
    api: &'static Api,
    exec: u64,
}

impl Graph {
    /// Submits the graph's work to `stream`. The device's context must be current.
    ///
    /// # Errors
    ///
    /// [`DriverError`] when the driver refuses.
    pub fn launch(&self, stream: StreamId) -> DriverResult<()> {
        self.api.graph_launch(self.exec, stream.0).ok()
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        // A failed call leaks the graph. A drop cannot report it.
        let _ = self.api.graph_exec_destroy(self.exec);
    }
}

impl Cuda {
    fn capture_info(&self, stream: StreamId) -> DriverResult<CaptureInfo> {
        let (mut status, mut id, mut graph, mut count) = (0, 0, 0, 0);
        let (mut nodes, mut edges) = (ptr::null(), ptr::null::<c_void>());
        let newer = self.api.capture_info_3(
            stream.0,
            &mut status,
            &mut id,
            &mut graph,
            &mut nodes,
            &mut edges,
            &mut count,
        );
        if newer.code().is_none() {
            self.api
                .capture_info_2(stream.0, &mut status, &mut id, &mut graph, &mut nodes, &mut count)
                .ok()?;
        } else {
            newer.ok()?;
        }
        let nodes = if status == 1 { Api::listed(nodes, count) } else { Vec::new() };
        Ok(CaptureInfo { status, id, graph, nodes })
    }

    /// Returns the capture information of a stream, or an error if it is not captured.
    fn captured(&self, stream: StreamId) -> DriverResult<CaptureInfo> {
        let info = self.capture_info(stream)?;
        if info.status == 1 {
            return Ok(info);
        }
        let message = format!("stream {stream} is not being captured");
        let call = "cuStreamGetCaptureInfo";
        Err(DriverError::new(DriverErrorKind::InvalidValue, call, 0, message))
    }

    pub(super) fn status_of(&self, stream: StreamId) -> DriverResult<CaptureStatus> {
        if LEGACY.contains(&stream) {
            return Ok(CaptureStatus::None);
        }
        let (status, capture) = if self.can.capture {
            let info = self.capture_info(stream)?;
            (info.status, info.id)
        } else {
            self.oldest_capture_info(stream)?
        };
        Ok(match status {
            0 => CaptureStatus::None,
            1 => CaptureStatus::Active { capture },
            _ => CaptureStatus::Invalidated,
        })
    }

    /// Returns status and id of a stream's capture, with the oldest query function, which returns only
    /// these. Returns 0 for both if the driver lacks this function.
    fn oldest_capture_info(&self, stream: StreamId) -> DriverResult<(u32, u64)> {
        let (mut status, mut id) = (0, 0);
        let queried = self.api.capture_info_1(stream.0, &mut status, &mut id);
        if queried.code().is_none() {
            return Ok((0, 0));
        }
        queried.ok().map(|()| (status, id))
    }

    /// Ends the capture that began on `stream` and instantiates its graph.
    ///
    /// # Errors
    ///
    /// [`DriverError`] when the capture was invalidated, or the graph cannot be instantiated. The
    /// capture has ended in any case.
    pub fn end_capture(&self, stream: StreamId) -> DriverResult<Graph> {
        let _entered = self.enter()?;
        let graph = got(|graph| self.api.capture_end(stream.0, graph))?;
        let mut exec = 0;
        let ready = self.api.graph_instantiate(&mut exec, graph, 0).ok();
        let destroyed = self.api.graph_destroy(graph).ok();
        ready?;
        let made = Graph { api: self.api, exec };
        destroyed.map(|()| made)
    }
}

impl Capture for Cuda {
    fn expect_captures(&self, expected: bool) -> DriverResult<()> {
        let count = &self.captures_expected;
        if expected {
            count.fetch_add(1, Ordering::Relaxed);
            return Ok(());
        }
        let less = |count: usize| count.checked_sub(1);
        let changed = count.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less);
        changed.map(drop).map_err(|_| {
            let message = "no captures were expected";
            DriverError::new(DriverErrorKind::InvalidValue, "expect_captures", 0, message)
        })
    }

    fn expected(&self) -> DriverResult<u64> {
        Ok(self.captures_expected.load(Ordering::Relaxed) as u64)
    }

    fn begin(&self, stream: StreamId) -> DriverResult<u64> {
        let _entered = self.enter()?;
        self.api.capture_begin(stream.0, RELAXED).ok()?;
        self.capture_info(stream).map(|info| info.id).inspect_err(|_| {
            // End the capture: a caller that gets an error does not end it.
            let mut graph = 0;
            if self.api.capture_end(stream.0, &mut graph).ok().is_ok() {
                let _ = self.api.graph_destroy(graph);
            }
        })
    }

    fn end(&self, stream: StreamId) -> DriverResult<()> {
        let _entered = self.enter()?;
        let graph = got(|graph| self.api.capture_end(stream.0, graph))?;
        self.api.graph_destroy(graph).ok()
    }

    fn frontier(&self, stream: StreamId) -> DriverResult<Vec<NodeId>> {
        let _entered = self.enter()?;
        Ok(self.captured(stream)?.nodes.into_iter().map(NodeId).collect())
    }

    fn dependencies(&self, node: NodeId) -> DriverResult<Vec<NodeId>> {
        let query = |nodes: *mut u64, count: &mut usize| {
            let older = self.api.node_dependencies_1(node.0, nodes, count);
            match older.code() {
                // More drivers have the older function, so it is tried first. If it fails, the newer one
                // is tried.
                Some(0) => Ok(()),
                _ => self.api.node_dependencies_2(node.0, nodes, ptr::null_mut(), count).ok(),
            }
        };
        let mut count = 0;
        query(ptr::null_mut(), &mut count)?;
        let mut nodes = vec![0; count];
        if count > 0 {
            query(nodes.as_mut_ptr(), &mut count)?;
        }
        nodes.truncate(count);
        Ok(nodes.into_iter().map(NodeId).collect())
    }

    fn add_to_frontier(&self, stream: StreamId, nodes: &[NodeId]) -> DriverResult<()> {
        const ADD: u32 = 0;
        let _entered = self.enter()?;
        let nodes: Vec<u64> = nodes.iter().map(|node| node.0).collect();
        let (first, count) = (nodes.as_ptr(), nodes.len());
        let newer = self.api.capture_set_2(stream.0, first, ptr::null(), count, ADD);
        match newer.code() {
            Some(_) => newer.ok(),
            None => self.api.capture_set_1(stream.0, first, count, ADD).ok(),
        }
    }

    fn free_behind(
        &self,
        address: u64,
        stream: StreamId,
        nodes: &[NodeId],
    ) -> DriverResult<NodeId> {
        let _entered = self.enter()?;
        let graph = self.captured(stream)?.graph;
        let nodes: Vec<u64> = nodes.iter().map(|node| node.0).collect();
        let mut node = 0;
        // CUDA allows adding nodes to a graph while it is being captured.
        self.api.graph_add_free(&mut node, graph, nodes.as_ptr(), nodes.len(), address).ok()?;
        Ok(NodeId(node))
    }
}
