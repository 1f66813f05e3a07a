//! The command line with the built-in strategies. A program with its own strategies calls the same
//! function.

use std::process::ExitCode;

fn main() -> ExitCode {
    stratalloc_cli::main()
}
