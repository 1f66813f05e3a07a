//! Completion scripts and man pages, as files for packages.

use std::io::Write;
use std::path::{Path, PathBuf};

use clap::{Args, ValueHint};

use super::command;
use super::outcome::{Outcome, Result, out};
use super::show::shown_path;

/// Print a shell's completion script for this program, or write it into a folder.
#[derive(Args)]
pub(crate) struct Completions {
    shell: clap_complete::Shell,
    /// Folder for the script, which gets the name that the shell expects. Default: standard output.
    #[arg(value_name = "FOLDER", value_hint = ValueHint::DirPath)]
    folder: Option<PathBuf>,
}

impl Completions {
    pub(crate) fn run(&self) -> Result<Outcome> {
        let program = &mut command::program();
        let Some(folder) = &self.folder else {
            let mut text = Vec::new();
            clap_complete::generate(self.shell, program, command::NAME, &mut text);
            out().write_all(&text)?;
            return Ok(Outcome::Good);
        };
        create(folder)?;
        let file = clap_complete::generate_to(self.shell, program, command::NAME, folder)
            .map_err(|error| format!("{}: {error}", shown_path(folder)))?;
        writeln!(out(), "{}", shown_path(&file))?;
        Ok(Outcome::Good)
    }
}

/// Write the man pages of this program and of its commands into a folder.
#[derive(Args)]
pub(crate) struct Man {
    /// Folder for the pages, such as ~/.local/share/man/man1.
    #[arg(value_name = "FOLDER", value_hint = ValueHint::DirPath)]
    folder: PathBuf,
}

impl Man {
    pub(crate) fn run(&self) -> Result<Outcome> {
        create(&self.folder)?;
        let program = command::program();
        let commands = program.get_subcommands().filter(|one| one.get_name() != "help");
        // A page's name has the program's: `man stratalloc-advise`.
        let named = commands.map(|one| {
            let name = format!("{}-{}", command::NAME, one.get_name());
            one.clone().display_name(name).version(env!("CARGO_PKG_VERSION"))
        });
        for page in [program.clone()].into_iter().chain(named) {
            let name = page.get_display_name().unwrap_or(command::NAME).to_owned();
            let file = self.folder.join(format!("{name}.1"));
            let mut text = Vec::new();
            clap_mangen::Man::new(page).render(&mut text)?;
            let text = with_sections(&String::from_utf8_lossy(&text));
            stratalloc::files::write(&file, text.as_bytes())
                .map_err(|error| format!("{}: {error}", shown_path(&file)))?;
            writeln!(out(), "{}", shown_path(&file))?;
        }
        Ok(Outcome::Good)
    }
}

/// Gives the examples and the exit codes the sections that man pages have for them.
fn with_sections(page: &str) -> String {
    let titles = [".SH EXTRA\nExamples:\n", ".SH EXTRA\nExample:\n"];
    let page = titles
        .iter()
        .fold(page.to_owned(), |page, title| page.replace(title, ".SH EXAMPLES\n.nf\n"));
    let page = page.replace("\nExit codes:\n", ".fi\n.SH EXIT STATUS\n.nf\n");
    page.replace("\n.SH VERSION", "\n.fi\n.SH VERSION")
}

fn create(folder: &Path) -> Result<()> {
    let created = std::fs::create_dir_all(folder);
    created.map_err(|error| format!("{}: {error}", shown_path(folder)).into())
}
