//! What a recording says about memory: how small a device it runs on under which setting.
//!
//! A [`Recording`] is read once: what was asked for, in which configuration, under which limit, with
//! which figures. [`measure`] repeats it in a [`Room`]; [`Need::search`] repeats it on many devices to
//! find the smallest on which nothing fails. All of it runs on the simulated device: nothing here
//! touches a real one, and nothing prints. Calls take milliseconds to seconds of this machine's
//! processors, and wait for nothing else.
//!
//! ```no_run
//! use stratalloc::analysis::{Memory, Need, Recording, SearchOptions};
//! use stratalloc::config::{Config, KeyTable};
//! use stratalloc::replay::{Limits, reader};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let trace = reader::read("snapshot.pickle".as_ref(), &Limits::default())?;
//! let recorded = Config::parse(&trace.conf, &KeyTable::default()).ok();
//! let recording = Recording::new(trace, recorded, Memory::default());
//! let config = Config::parse("expandable_segments:True", &KeyTable::default())?;
//! let need = Need::search(&recording, &config, &SearchOptions::default())?;
//! println!("runs from {:?} bytes on", need.needs_bytes);
//! # Ok(())
//! # }
//! ```
//!
//! Read next: `recording`, then `needs`.

mod device;
mod figures;
mod limit;
mod needs;
mod recording;
mod trial;

#[cfg(feature = "cli")]
pub(crate) use device::{counted, open_sim};
pub use figures::Figures;
pub use needs::{Cost, Need, SearchOptions};
pub use recording::{Beginning, Limit, LimitSource, Memory, Recording};
#[cfg(feature = "cli")]
pub(crate) use trial::measure_watched;
pub use trial::{Room, Trial, fits, measure};
