//! The lines that set a configuration, for PyTorch's own allocator and for this library's.
//!
//! Replays name PyTorch's decisions by the key `compat`, which PyTorch does not have: it refuses a string
//! with that key, and the program stops. So every printed setting comes with a line that its allocator
//! accepts.

use std::fmt;

use stratalloc::config::{Compat, Config, TorchVersion, torch_notes};
use stratalloc::registry;

/// The variable that PyTorch reads, by the platform that it is built for.
const FOR_CUDA: &str = "PYTORCH_CUDA_ALLOC_CONF";
const FOR_ROCM: &str = "PYTORCH_HIP_ALLOC_CONF";

/// A line to paste that sets a configuration, and the allocator that reads it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Paste {
    /// The allocator, such as `PyTorch 2.6 or later` or `stratalloc`.
    pub allocator: String,
    /// The assignment of an environment variable; empty if nothing has to be set.
    pub set: String,
    /// Whether PyTorch's own allocator reads the line.
    pub is_for_pytorch: bool,
}

impl Paste {
    /// Returns the line for a configuration that was replayed. With PyTorch's decisions (`compat`) it is one
    /// for PyTorch's own allocator, if `torch` accepts all keys; without `torch`, if any version does.
    /// Otherwise it is one for this library's allocator.
    pub fn of(conf: &str, torch: Option<TorchVersion>) -> Self {
        let config = Config::parse(conf, &registry::key_table()).ok();
        let config = config.filter(|config| config.settings().compat != Compat::Default);
        // Values that only this library reads, such as `true`, are left to it.
        let is_read =
            torch_notes(conf, &registry::key_table()).iter().all(|note| note.key == "compat");
        let oldest = config.and_then(|config| config.oldest_torch()).filter(|_| is_read);
        match (oldest, torch) {
            (Some(oldest), None) => Self::for_pytorch(format!("PyTorch {oldest} or later"), conf),
            (Some(oldest), Some(torch)) if oldest <= torch => {
                Self::for_pytorch(format!("PyTorch {torch}"), conf)
            }
            _ => Self::line("stratalloc".to_owned(), "ALLOC_CONF", conf.trim(), false),
        }
    }

    /// Returns the line for PyTorch's own allocator, without the key `compat`.
    pub(super) fn for_pytorch(allocator: String, conf: &str) -> Self {
        let is_compat =
            |part: &&str| part.split(':').next().is_some_and(|key| key.trim() == "compat");
        let parts = conf.split(',').filter(|part| !is_compat(part)).map(str::trim);
        let conf = parts.collect::<Vec<_>>().join(",");
        Self::line(allocator, FOR_CUDA, &conf, true)
    }

    /// Returns the same line for PyTorch that is built for ROCm.
    pub(super) fn on_rocm(self) -> Self {
        let allocator = format!("{} for ROCm", self.allocator);
        let set = match self.set.strip_prefix(FOR_CUDA) {
            Some(conf) => format!("{FOR_ROCM}{conf}"),
            None => self.set,
        };
        Self { allocator, set, ..self }
    }

    fn line(allocator: String, variable: &str, conf: &str, is_for_pytorch: bool) -> Self {
        let set = if conf.is_empty() { String::new() } else { format!("{variable}={conf}") };
        Self { allocator, set, is_for_pytorch }
    }
}

/// Formats the line for a sentence: `` `ALLOC_CONF=...` (stratalloc) ``.
impl fmt::Display for Paste {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.set.is_empty() {
            true => write!(f, "the default settings of {}", self.allocator),
            false => write!(f, "`{}` ({})", self.set, self.allocator),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_setting_for_pytorch_has_no_key_that_pytorch_lacks() {
        let line = |conf: &str, torch: Option<&str>| {
            let Paste { allocator, set, .. } = Paste::of(conf, torch.map(|v| v.parse().unwrap()));
            format!("{allocator}: {set}")
        };
        for (conf, torch, expected) in [
            (
                "max_split_size_mb:32,compat:pytorch",
                None,
                "PyTorch 2.1 or later: PYTORCH_CUDA_ALLOC_CONF=max_split_size_mb:32",
            ),
            (
                "compat:pytorch-2.13 , backend:native",
                Some("2.8"),
                "PyTorch 2.8: PYTORCH_CUDA_ALLOC_CONF=backend:native",
            ),
            (
                "roundup_power2_divisions:[256:1,>:2],compat:pytorch",
                None,
                "PyTorch 2.1 or later: PYTORCH_CUDA_ALLOC_CONF=roundup_power2_divisions:[256:1,>:2]",
            ),
            (
                "large_segment_size_mb:32,compat:pytorch",
                None,
                "PyTorch 2.11 or later: PYTORCH_CUDA_ALLOC_CONF=large_segment_size_mb:32",
            ),
            (
                "large_segment_size_mb:32,compat:pytorch",
                Some("2.8"),
                "stratalloc: ALLOC_CONF=large_segment_size_mb:32,compat:pytorch",
            ),
            ("compat:pytorch", None, "PyTorch 2.1 or later: "),
            (
                "malloc_async_own_pool:True,compat:pytorch",
                None,
                "stratalloc: ALLOC_CONF=malloc_async_own_pool:True,compat:pytorch",
            ),
            (
                "expandable_segments:true,compat:pytorch",
                None,
                "stratalloc: ALLOC_CONF=expandable_segments:true,compat:pytorch",
            ),
            ("max_split_size_mb:32", None, "stratalloc: ALLOC_CONF=max_split_size_mb:32"),
            ("", None, "stratalloc: "),
        ] {
            assert_eq!(line(conf, torch), expected);
        }
    }
}
