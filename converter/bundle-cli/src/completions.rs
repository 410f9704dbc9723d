//! Shell completions and the manual page, from the same definition as the help.

use std::io::Write;

use clap::CommandFactory;
use clap_complete::Shell;

use crate::failure::{Failure, Outcome};
use crate::output;

/// Arguments of `completions`.
#[derive(clap::Args)]
pub struct Args {
    /// Shell to complete for
    #[arg(value_enum)]
    shell: Shell,
}

/// Prints the completions of the whole program.
pub fn run<C: CommandFactory>(args: &Args) -> Result<Outcome, Failure> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut C::command(), "vt-bundle", &mut script);
    print(&script)
}

/// Prints the manual page of the program and of every command.
pub fn manual<C: CommandFactory>() -> Result<Outcome, Failure> {
    let mut page = Vec::new();
    let mut command = C::command();
    command.build();
    clap_mangen::Man::new(command.clone()).render(&mut page)?;
    for sub in command.get_subcommands().filter(|s| !s.is_hide_set() && s.get_name() != "help") {
        clap_mangen::Man::new(sub.clone()).render(&mut page)?;
    }
    print(&page)
}

fn print(bytes: &[u8]) -> Result<Outcome, Failure> {
    let mut out = output::stdout();
    out.write_all(bytes)?;
    out.flush()?;
    Ok(Outcome::Clean)
}
