//! The command line. One file per subcommand.

fn main() {}
