//! Every key there is: its names, what it does, what it may say.
//!
//! User-defined strategies add theirs; a table is passed to whoever parses.

use super::error::{ConfigError, Span};
use super::explain::differ;
use super::settings::Settings;
use super::user::UserKey;
use super::versions::{COMPAT_VALUES, TorchVersion};
use super::{Config, Origin};
use crate::size::MIB;

/// Who acts on a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Acts {
    /// Everybody.
    Always,
    /// The strategies built on the caching engine.
    Native,
    /// Every built-in strategy.
    BuiltIn,
    /// Both that follow PyTorch's rules: the strategies built on the caching engine, and
    /// `backend:cudaMallocAsync`.
    NativeAndMallocAsync,
    /// Expandable segments only.
    Expandable,
    /// `backend:cudaMallocAsync`.
    MallocAsync,
    /// `backend:pluggable` only.
    Pluggable,
    /// `backend:cpu` only.
    Cpu,
    /// Nobody yet: parsed and checked.
    NotYet,
}

/// Whether `backend` is no user's: some key is for it.
pub(super) fn is_built_in(backend: &str) -> bool {
    BUILT_IN.iter().any(|key| key.acts.backends().contains(&backend))
}

impl Acts {
    /// The backends that the key is for; none: everybody's, or nobody's yet.
    const fn backends(self) -> &'static [&'static str] {
        match self {
            Self::Always | Self::BuiltIn | Self::NotYet => &[],
            Self::Native | Self::Expandable => &["native"],
            Self::NativeAndMallocAsync => &["native", "cudaMallocAsync"],
            Self::MallocAsync => &["cudaMallocAsync"],
            Self::Pluggable => &["pluggable"],
            Self::Cpu => &["cpu"],
        }
    }

    /// Whether that backend may act on it. Nobody knows what a registered one reads.
    pub(super) fn reaches(self, backend: &str) -> bool {
        let own = self.backends();
        self != Self::NotYet && (own.is_empty() || own.contains(&backend) || !is_built_in(backend))
    }

    /// The backends that the key is for, as the string says them.
    pub(super) fn whose(self) -> String {
        let said: Vec<_> = self.backends().iter().map(|name| format!("backend:{name}")).collect();
        said.join(" and ")
    }
}

/// One key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Key {
    /// Its name.
    pub name: &'static str,
    /// Other names of the same key.
    pub aliases: &'static [&'static str],
    /// What it may say.
    pub range: &'static str,
    /// What it does, in a line.
    pub meaning: &'static str,
    /// Who acts on it.
    pub acts: Acts,
    /// Whether it is read once, when an allocator is built: another value takes another allocator.
    pub is_fixed: bool,
    /// The first version of PyTorch that accepts the key; 2.1 if an older one does. `None` if PyTorch has no
    /// such key.
    pub since: Option<TorchVersion>,
}

const fn key(name: &'static str, range: &'static str, acts: Acts, meaning: &'static str) -> Key {
    Key { name, aliases: &[], range, meaning, acts, is_fixed: false, since: None }
}

/// A key that is read once, when an allocator is built.
const fn fixed(name: &'static str, range: &'static str, acts: Acts, meaning: &'static str) -> Key {
    Key { is_fixed: true, ..key(name, range, acts, meaning) }
}

/// Another name of that key.
const fn also(aliases: &'static [&'static str], key: Key) -> Key {
    Key { aliases, ..key }
}

/// A key of PyTorch's, which 2.`minor` and later versions accept.
const fn torch(minor: u8, key: Key) -> Key {
    Key { since: Some(TorchVersion::minor(minor)), ..key }
}

const BOOL: &str = "True or False";
const WHOLE_MIB: &str = "a whole number of MiB";
const SYMBOL: &str = "a function's name";

/// The built-in keys, in the order in which `explain` lists them.
pub const BUILT_IN: &[Key] = &[
    torch(1, fixed("backend", "a strategy's name", Acts::Always, "which strategy allocates")),
    torch(
        11,
        key(
            "large_segment_size_mb",
            "a whole number > 10",
            Acts::Native,
            "segment shared by requests of 1 to 10 MiB",
        ),
    ),
    torch(
        1,
        key(
            "max_split_size_mb",
            "a whole number >= large_segment_size_mb",
            Acts::Native,
            "blocks from this size on are never split",
        ),
    ),
    torch(
        6,
        key(
            "max_non_split_rounding_mb",
            "a whole number >= large_segment_size_mb",
            Acts::Native,
            "how much larger a reused oversize block may be",
        ),
    ),
    torch(
        1,
        key(
            "garbage_collection_threshold",
            "a number between 0 and 1",
            Acts::Native,
            "part of the limit from which idle segments are released",
        ),
    ),
    torch(
        1,
        key(
            "roundup_power2_divisions",
            "a power of two, or [MiB:divisions,...,>:divisions]",
            Acts::Native,
            "steps between powers of two that requests are rounded to",
        ),
    ),
    torch(1, key("expandable_segments", BOOL, Acts::Native, "segments that grow by mapping pages")),
    key(
        "expandable_segments_ipc",
        BOOL,
        Acts::Expandable,
        "new pages may be shared with other processes; each costs a descriptor on some devices",
    ),
    key(
        "expandable_segments_handle_type",
        "unspecified, posix_fd or fabric",
        Acts::Expandable,
        "the kind of handle by which pages leave; unspecified: fabric where the device has it",
    ),
    also(
        &["release_lock_on_hipmalloc"],
        torch(
            2,
            key(
                "release_lock_on_cudamalloc",
                BOOL,
                Acts::Native,
                "other misses go on while one waits for the driver",
            ),
        ),
    ),
    torch(
        9,
        key(
            "graph_capture_record_stream_reuse",
            BOOL,
            Acts::Native,
            "blocks that were used by other streams are reused inside a graph capture",
        ),
    ),
    torch(
        10,
        key(
            "per_process_memory_fraction",
            "a number from 0 to 1",
            Acts::BuiltIn,
            "part of the device's memory that may be reserved",
        ),
    ),
    torch(
        12,
        key(
            "throw_on_cudamalloc_oom",
            BOOL,
            Acts::Native,
            "refuse beyond the fraction before asking the driver",
        ),
    ),
    torch(
        15,
        key(
            "expandable_segments_reserve",
            "a positive fraction, or a size as 40G",
            Acts::Expandable,
            "address space of an expandable segment",
        ),
    ),
    torch(
        15,
        key(
            "expandable_segments_reserve_by_class",
            "[class:reserve,...]",
            Acts::Expandable,
            "the same for classes of streams",
        ),
    ),
    fixed(
        "malloc_async_own_pool",
        BOOL,
        Acts::MallocAsync,
        "a driver pool of one's own instead of the device's default pool",
    ),
    fixed(
        "layers",
        "[limit:8GiB,track,log:\"PATH\",...]",
        Acts::Always,
        "layers around the strategy, from outside to inside",
    ),
    fixed(
        "record_history",
        "a whole number of entries > 0",
        Acts::Always,
        "the history is on from the start, and keeps at most so many",
    ),
    fixed(
        "snapshot_on_oom",
        "a file's path, with %p for the process and %d for the device",
        Acts::Always,
        "out of memory writes a snapshot, at most four times",
    ),
    fixed(
        "advise_on_oom",
        BOOL,
        Acts::Always,
        "out of memory lists the settings that would have served the recorded requests",
    ),
    key(
        "peers",
        "auto or none",
        Acts::Always,
        "whether PyTorch's allocators open their memory to each other's devices",
    ),
    torch(6, key("pinned_use_background_threads", BOOL, Acts::NotYet, "events of pinned memory")),
    torch(
        13,
        key(
            "pinned_max_round_threshold_mb",
            WHOLE_MIB,
            Acts::NotYet,
            "pinned requests above it stay as they are",
        ),
    ),
    torch(
        13,
        key(
            "pinned_max_cached_size_mb",
            WHOLE_MIB,
            Acts::NotYet,
            "pinned blocks above it are not cached",
        ),
    ),
    also(
        &["pinned_use_hip_host_register"],
        torch(
            2,
            key(
                "pinned_use_cuda_host_register",
                BOOL,
                Acts::NotYet,
                "register host memory instead of allocating it",
            ),
        ),
    ),
    torch(
        2,
        key(
            "pinned_num_register_threads",
            "a power of two from 1 to 128",
            Acts::NotYet,
            "threads that touch pinned pages",
        ),
    ),
    torch(
        10,
        key(
            "pinned_reserve_segment_size_mb",
            "a whole number of MiB > 0",
            Acts::NotYet,
            "one pinned arena for small requests",
        ),
    ),
    torch(
        12,
        key(
            "pinned_free_catch_all",
            BOOL,
            Acts::NotYet,
            "ignore failures when pinned memory is freed",
        ),
    ),
    key(
        "compat",
        COMPAT_VALUES,
        Acts::NativeAndMallocAsync,
        "decisions where PyTorch's are defects or differ by version",
    ),
    fixed("library", "a file's path", Acts::Pluggable, "shared library with the functions below"),
    fixed("alloc_fn", SYMBOL, Acts::Pluggable, "its function that allocates"),
    fixed("free_fn", SYMBOL, Acts::Pluggable, "its function that frees"),
    fixed("init_fn", SYMBOL, Acts::Pluggable, "called once, with the number of devices"),
    fixed("reset_fn", SYMBOL, Acts::Pluggable, "called when the cache is emptied"),
    fixed("memory_fraction_fn", SYMBOL, Acts::Pluggable, "called when the memory fraction is set"),
    fixed(
        "base_alloc_fn",
        SYMBOL,
        Acts::Pluggable,
        "returns the allocation that a block belongs to",
    ),
    fixed(
        "record_stream_fn",
        SYMBOL,
        Acts::Pluggable,
        "called when another stream uses a block; waits for that stream",
    ),
    fixed(
        "begin_allocate_to_pool_fn",
        SYMBOL,
        Acts::Pluggable,
        "routes requests to a private pool",
    ),
    fixed("end_allocate_to_pool_fn", SYMBOL, Acts::Pluggable, "ends that routing"),
    fixed(
        "release_pool_fn",
        SYMBOL,
        Acts::Pluggable,
        "called when a private pool has no users left",
    ),
    fixed(
        "cpu_alignment",
        "a power of two of bytes from 16 to 2097152",
        Acts::Cpu,
        "where blocks start",
    ),
    key(
        "cpu_cached_max_mb",
        WHOLE_MIB,
        Acts::Cpu,
        "more idle memory than this goes back to the system",
    ),
    key(
        "cpu_trim_age_s",
        "a number of seconds from 0 to 1000000000",
        Acts::Cpu,
        "memory idle for longer goes back to the system",
    ),
    key(
        "cpu_stop_caching_on_oom",
        BOOL,
        Acts::Cpu,
        "freed memory goes back to the system once that had no memory for a request",
    ),
    fixed("cpu_huge_pages", BOOL, Acts::Cpu, "transparent huge pages from 2 MiB on"),
    key("cpu_zero_fill", BOOL, Acts::Cpu, "every block starts as zeros"),
    key("cpu_junk_fill", BOOL, Acts::Cpu, "every block starts as the pattern 0x7fedbeef"),
    fixed("cpu_numa_node", "a node's number, or any", Acts::Cpu, "where blocks from 1 MiB on lie"),
];

impl Settings {
    /// The first key of those who act as `whose` says that is read once, when an allocator is built, and
    /// says something else in `other`.
    pub(crate) fn fixed_key_that_differs(
        &self,
        other: &Self,
        whose: impl Fn(Acts) -> bool,
    ) -> Option<&'static str> {
        let mut fixed = BUILT_IN.iter().filter(|key| key.is_fixed && whose(key.acts));
        fixed.find(|key| differ(self, other, key.name)).map(|key| key.name)
    }

    /// Whether an allocator that was built from these settings can become what `other` says. Of a
    /// registered backend nobody knows what it reads when it is built: anything that others read then
    /// counts.
    pub(crate) fn is_built_alike(&self, other: &Self) -> bool {
        self.fixed_key_that_differs(other, |acts| acts.reaches(&self.backend)).is_none()
    }
}

impl Config {
    /// Returns the first version of PyTorch whose own allocator accepts the string of this configuration,
    /// `compat` aside: it has every key that the string sets. `None` if PyTorch lacks one of them.
    #[must_use]
    pub fn oldest_torch(&self) -> Option<TorchVersion> {
        // Before 2.10 the value had to be larger than 20.
        let is_least = self.settings.max_split_bytes == Some(20 * MIB);
        let least = if is_least { TorchVersion::minor(10) } else { TorchVersion::V2_1 };
        let is_set = |key: &&Key| matches!(self.origin(key.name), Origin::Text { .. });
        let set = BUILT_IN.iter().filter(is_set).filter(|key| key.name != "compat");
        let has_extra = !self.settings.extra.is_empty();
        set.map(|key| key.since).fold((!has_extra).then_some(least), |oldest, since| {
            oldest.zip(since).map(|(oldest, since)| oldest.max(since))
        })
    }

    /// Whether PyTorch's own allocator accepts the string of this configuration in that version, `compat`
    /// aside.
    #[must_use]
    pub fn is_accepted_by(&self, version: TorchVersion) -> bool {
        self.oldest_torch().is_some_and(|oldest| oldest <= version)
    }
}

/// The keys that are known: the built-in ones and those of user-defined strategies.
#[derive(Clone, Debug, Default)]
pub struct KeyTable {
    extra: Vec<UserKey>,
}

/// What a name in the text stands for.
#[derive(Clone, Copy, Debug)]
pub(super) enum Known<'t> {
    BuiltIn(&'static Key),
    Extra(&'t UserKey),
}

impl Known<'_> {
    pub(super) fn name(&self) -> &str {
        match self {
            Self::BuiltIn(key) => key.name,
            Self::Extra(key) => key.name(),
        }
    }
}

impl KeyTable {
    /// Adds a key of a user-defined strategy that may say anything. Its value is handed on as text.
    #[must_use]
    pub fn with_extra(self, name: impl Into<String>) -> Self {
        self.with(UserKey::anything(name, "handed to the strategy that knows it"))
    }

    /// Adds a key of a user-defined strategy. A name that is known already keeps its first meaning.
    #[must_use]
    pub fn with(mut self, key: UserKey) -> Self {
        if !self.knows(key.name()) {
            self.extra.push(key);
        }
        self
    }

    /// The users' keys.
    #[must_use]
    pub fn extra(&self) -> &[UserKey] {
        &self.extra
    }

    /// Every name that a text can say: of the keys, their other names, and of the users' keys.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        let built_in =
            BUILT_IN.iter().flat_map(|key| key.aliases.iter().chain([&key.name]).copied());
        built_in.chain(self.extra.iter().map(UserKey::name))
    }

    /// Whether a key or another name of a key is called this.
    #[must_use]
    pub fn knows(&self, name: &str) -> bool {
        self.look_up(name).is_some()
    }

    fn look_up(&self, name: &str) -> Option<Known<'_>> {
        let is_called = |key: &&Key| key.name == name || key.aliases.contains(&name);
        let built_in = BUILT_IN.iter().find(is_called).map(Known::BuiltIn);
        let extra = || self.extra.iter().find(|extra| extra.name() == name).map(Known::Extra);
        built_in.or_else(extra)
    }

    pub(super) fn find(&self, name: &str, span: Span) -> Result<Known<'_>, ConfigError> {
        if let Some(known) = self.look_up(name) {
            return Ok(known);
        }
        if let Some((key, _)) = name.split_once('=')
            && let Some(known) = self.look_up(key)
        {
            let sign = Span { at: span.at + key.len(), len: 1 };
            return Err(ConfigError::new(known.name(), sign, "a colon instead of ="));
        }
        let mut error = ConfigError::new(name, span, "a known key");
        error.nearest = match is_built_in(name) {
            true => Some(format!("backend:{name}")),
            false => self.nearest(name),
        };
        Err(error)
    }

    /// The known key that differs least from `name`, unless all differ much.
    fn nearest(&self, name: &str) -> Option<String> {
        nearest_of(name, self.names())
    }
}

/// The known name that differs least from `name`, unless all differ much.
pub(crate) fn nearest_of<'k>(name: &str, known: impl Iterator<Item = &'k str>) -> Option<String> {
    let name: Vec<char> = name.chars().take(64).flat_map(char::to_lowercase).collect();
    let (distance, nearest) =
        known.map(|known| (edits(&name, known), known)).min_by_key(|(d, _)| *d)?;
    (distance <= name.len().max(nearest.len()) / 3 + 1).then(|| nearest.to_owned())
}

/// How many insertions, deletions and replacements turn one name into the other.
fn edits(name: &[char], known: &str) -> usize {
    let known: Vec<char> = known.chars().flat_map(char::to_lowercase).collect();
    let mut row: Vec<usize> = (0..=known.len()).collect();
    for (i, a) in name.iter().enumerate() {
        let mut diagonal = std::mem::replace(&mut row[0], i + 1);
        for (j, b) in known.iter().enumerate() {
            let replaced = diagonal + usize::from(a != b);
            diagonal = row[j + 1];
            row[j + 1] = replaced.min(row[j] + 1).min(diagonal + 1);
        }
    }
    row[known.len()]
}
