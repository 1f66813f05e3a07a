//! The command line with the built-in strategies. Programs with their own strategies call the same
//! function.

use std::process::ExitCode;

fn main() -> ExitCode {
    stratalloc_tools::cli::main()
}
