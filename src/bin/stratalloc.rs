//! The command line with the built-in strategies. Programs with strategies of their own call the same
//! function.

use std::process::ExitCode;

fn main() -> ExitCode {
    stratalloc::cli::main()
}
