//! Reads recordings on some threads and drops them: the time that any analysis of many files needs at least.
//!
//! ```sh
//! cargo run --release -p stratalloc-recording --example read_files -- THREADS TRACE...
//! ```

use rayon::prelude::*;
use stratalloc_recording::reader::{self, Limits};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1);
    let threads = arguments.next().ok_or("expected a number of threads")?.parse()?;
    let files: Vec<String> = arguments.collect();
    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build()?;
    let events = pool.install(|| {
        let read = |file: &String| reader::read(file.as_ref(), &Limits::default());
        let events =
            files.par_iter().with_max_len(1).map(|file| read(file).map(|t| t.events.len()));
        events.try_reduce(|| 0, |a, b| Ok(a + b))
    })?;
    println!("{} files, {events} events", files.len());
    Ok(())
}
