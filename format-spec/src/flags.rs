//! Command lines of the programs: flags and their environment twins.

use clap::builder::{BoolishValueParser, Resettable};
use clap::{Arg, ArgAction, Command, FromArgMatches};

/// Reads this process's command line.
///
/// # Errors
/// What clap says: wrong arguments, or a text that was asked for.
pub fn parse<C: clap::CommandFactory + FromArgMatches>() -> Result<C, clap::Error> {
    let mut command = with_environment(C::command());
    let matches = command.try_get_matches_from_mut(std::env::args_os())?;
    C::from_arg_matches(&matches).map_err(|e| e.format(&mut command))
}

/// Makes environment twins what people expect: an empty one is none, and a switch is on by `1`, `true`, `yes` or `on`, off by
/// `0`, `false`, `no` or `off`.
pub fn with_environment(command: Command) -> Command {
    let one = |arg: Arg| {
        let empty = arg.get_env().and_then(std::env::var_os).is_some_and(|value| value.is_empty());
        let arg = if empty { arg.env(Resettable::Reset) } else { arg };
        match arg.get_action() {
            ArgAction::SetTrue if arg.get_env().is_some() => arg.value_parser(BoolishValueParser::new()),
            _ => arg,
        }
    };
    command.mut_args(one).mut_subcommands(with_environment)
}
