//! The conformance suite, on everything that the house brings, and on allocators that are broken on
//! purpose.
//!
//! `CONFORMANCE_RUNS=1000 cargo test --release --test conformance` runs so many random scripts for each
//! property.

#[path = "conformance/bent.rs"]
mod bent;
#[path = "conformance/broken.rs"]
mod broken;
#[path = "conformance/toy.rs"]
mod toy;
#[path = "conformance/users.rs"]
mod users;

use stratalloc::conformance::configured;

stratalloc::conformance_tests!(native, configured("backend:native"));
stratalloc::conformance_tests!(expandable, configured("backend:native,expandable_segments:True"));
stratalloc::conformance_tests!(malloc_async, configured("backend:cudaMallocAsync"));
stratalloc::conformance_tests!(cpu, configured("backend:cpu"));
stratalloc::conformance_tests!(
    pytorch,
    configured("backend:native,compat:pytorch,max_split_size_mb:20,roundup_power2_divisions:4")
);
stratalloc::conformance_tests!(
    layered,
    configured("backend:native,layers:[statistics,limit:200MiB]")
);
