//! The resources of the machine: memory, huge pages, NUMA nodes. And its name.

use std::path::Path;

use super::not_supported;
use crate::driver::{DriverResult, MemoryInfo};

/// Returns the free and total bytes of the machine, or of the container that limits this process.
///
/// # Errors
///
/// [`DriverErrorKind::NotSupported`](crate::error::DriverErrorKind::NotSupported) if the system does not
/// report them.
pub fn memory_info() -> DriverResult<MemoryInfo> {
    let whole = machine()?;
    Ok(container().map_or(whole, |own| MemoryInfo {
        free_bytes: whole.free_bytes.min(own.free_bytes),
        total_bytes: whole.total_bytes.min(own.total_bytes),
    }))
}

#[cfg(target_os = "linux")]
fn machine() -> DriverResult<MemoryInfo> {
    let text = std::fs::read_to_string("/proc/meminfo")
        .map_err(|error| not_supported("meminfo", error.to_string()))?;
    let bytes = |name: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(name))?;
        line.trim().trim_end_matches("kB").trim().parse::<u64>().ok()?.checked_mul(1024)
    };
    let found = bytes("MemTotal:").zip(bytes("MemAvailable:"));
    let (total_bytes, free_bytes) =
        found.ok_or_else(|| not_supported("meminfo", "no line MemAvailable"))?;
    Ok(MemoryInfo { free_bytes, total_bytes })
}

#[cfg(not(target_os = "linux"))]
fn machine() -> DriverResult<MemoryInfo> {
    Err(not_supported("memory_info", "not supported on this system"))
}

/// Returns the tightest memory limit of this process's control group (cgroup) and its ancestors.
fn container() -> Option<MemoryInfo> {
    let text = std::fs::read_to_string("/proc/self/cgroup").ok()?;
    let own = text.lines().find_map(|line| line.strip_prefix("0::/")).unwrap_or("");
    let root = Path::new("/sys/fs/cgroup");
    let mut least: Option<MemoryInfo> = None;
    for group in root.join(own).ancestors().take_while(|group| group.starts_with(root)) {
        let number =
            |name: &str| std::fs::read_to_string(group.join(name)).ok()?.trim().parse::<u64>().ok();
        let Some(total_bytes) = number("memory.max") else { continue };
        let used = number("memory.current").unwrap_or(0).saturating_sub(file_bytes(group));
        let free_bytes = total_bytes.saturating_sub(used);
        least = Some(least.map_or(MemoryInfo { free_bytes, total_bytes }, |known| MemoryInfo {
            free_bytes: known.free_bytes.min(free_bytes),
            total_bytes: known.total_bytes.min(total_bytes),
        }));
    }
    least
}

/// Returns the bytes of files that the system keeps in memory for a group, and drops when memory is short.
fn file_bytes(group: &Path) -> u64 {
    let text = std::fs::read_to_string(group.join("memory.stat")).unwrap_or_default();
    let counts = text.lines().filter_map(|line| {
        let (name, bytes) = line.split_once(' ')?;
        let is_file = name == "inactive_file" || name == "active_file";
        if is_file { bytes.trim().parse::<u64>().ok() } else { None }
    });
    counts.sum()
}

/// Returns the host's name, which in a container is the container's. Other characters than letters, digits,
/// `-`, `.` and `_` become `_`, so that the name can be part of a file's name.
pub(crate) fn host_name() -> String {
    #[cfg(target_os = "linux")]
    let name = rustix::system::uname().nodename().to_string_lossy().into_owned();
    #[cfg(not(target_os = "linux"))]
    let name = std::env::var("HOSTNAME").unwrap_or_else(|_| "localhost".to_owned());
    name.replace(|c: char| !(c.is_ascii_alphanumeric() || "-._".contains(c)), "_")
}

#[cfg(target_os = "linux")]
pub(super) fn check_huge_pages() -> DriverResult<()> {
    const PATH: &str = "/sys/kernel/mm/transparent_hugepage/enabled";
    match std::fs::read_to_string(PATH) {
        Ok(text) if !text.contains("[never]") => Ok(()),
        Ok(_) => Err(not_supported("huge_pages", "this machine's transparent huge pages are off")),
        Err(error) => Err(not_supported("huge_pages", format!("{PATH}: {error}"))),
    }
}

#[cfg(target_os = "linux")]
pub(super) fn check_node(node: u32) -> DriverResult<()> {
    let is_listed = || Path::new(&format!("/sys/devices/system/node/node{node}")).exists();
    // A system without NUMA support has no such folder, and one node.
    if node < super::mapping::NODES_MAX && (node == 0 || is_listed()) {
        return Ok(());
    }
    Err(not_supported("numa_node", format!("this machine has no node {node}")))
}

#[cfg(not(target_os = "linux"))]
pub(super) fn check_huge_pages() -> DriverResult<()> {
    Err(not_supported("huge_pages", "on Linux only"))
}

#[cfg(not(target_os = "linux"))]
pub(super) fn check_node(node: u32) -> DriverResult<()> {
    Err(not_supported("numa_node", format!("node {node}: nodes are chosen on Linux only")))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A group that has read large files has not used up its limit.
    #[test]
    fn memory_of_files_can_be_dropped() {
        let folder = std::env::temp_dir().join(format!("stratalloc-group-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let text = "anon 5\nfile 77\ninactive_anon 3\ninactive_file 40\nactive_file 30\n";
        std::fs::write(folder.join("memory.stat"), text).unwrap();
        assert_eq!(file_bytes(&folder), 70);
        std::fs::remove_dir_all(&folder).unwrap();
        assert_eq!(file_bytes(&folder), 0);
    }
}
