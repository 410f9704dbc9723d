//! The command line.

use std::path::PathBuf;

use clap::Parser;
use vt_convert::convert::Options;
use vt_convert::open::Choices;

/// Shown below the help.
const EXIT_CODES: &str = "Exit codes: 0 ok, 2 usage, 3 input invalid, 4 integrity failure, 6 I/O, 130 interrupted.\n\
    Results go to standard output, warnings and progress to standard error.";

/// Turns an LLM checkpoint into a vt bundle: weights in the order GPU kernels read, content-hashed and reversible.
#[derive(Debug, Parser)]
#[command(name = "vt-convert", version, about, long_about = None, after_help = EXIT_CODES)]
pub struct Cli {
    /// Checkpoint: a folder with safetensors and config.json, or a GGUF file (any part of a split one).
    pub input: PathBuf,

    /// Bundle to make: a folder that does not exist yet.
    #[arg(required_unless_present = "dry_run")]
    pub output: Option<PathBuf>,

    /// Print the plan (every tensor, the exact size of the image, a bound for the rest) and stop.
    #[arg(long, env = "VT_DRY_RUN")]
    pub dry_run: bool,

    /// Decode the bundle and compare every value with the source, bit for bit; leaves OUTPUT.verified.json.
    #[arg(long, env = "VT_VERIFY")]
    pub verify: bool,

    /// Worker threads; 0 for one per core.
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = clap::value_parser!(u16).range(..=1024), env = "VT_THREADS")]
    pub threads: u16,

    /// Bound on anonymous memory, such as 512M or 2G; at least 64M.
    #[arg(long, value_name = "SIZE", default_value = "1G", value_parser = memory, env = "VT_MAX_MEMORY")]
    pub max_memory: u64,

    /// Replace OUTPUT if it is a bundle.
    #[arg(long, env = "VT_OVERWRITE")]
    pub overwrite: bool,

    /// Start over instead of continuing an interrupted conversion.
    #[arg(long, env = "VT_NO_RESUME")]
    pub no_resume: bool,

    /// Use the embedding as the output head where lm_head.weight is missing and config.json does not say that they are
    /// tied; the bundle's configuration then says so.
    #[arg(long, env = "VT_TIE_WORD_EMBEDDINGS")]
    pub tie_word_embeddings: bool,

    /// Print the report (or, with --dry-run, the plan) as JSON.
    #[arg(long, env = "VT_JSON")]
    pub json: bool,

    /// Print nothing but errors.
    #[arg(long, short, env = "VT_QUIET")]
    pub quiet: bool,
}

impl Cli {
    /// How the input is understood.
    pub fn choices(&self) -> Choices {
        Choices { tie_word_embeddings: self.tie_word_embeddings }
    }

    /// What the library needs to know.
    pub fn options(&self) -> Options {
        Options {
            input: self.input.clone(),
            output: self.output.clone().unwrap_or_default(),
            threads: usize::from(self.threads),
            max_memory: self.max_memory,
            overwrite: self.overwrite,
            resume: !self.no_resume,
            verify: self.verify,
            choices: self.choices(),
        }
    }
}

/// What one worker and the tables of a checkpoint need.
const LEAST_MEMORY: u64 = 64 << 20;

fn memory(text: &str) -> Result<u64, String> {
    let bytes = parse_size(text)?;
    if bytes < LEAST_MEMORY {
        return Err(format!("{text:?} is too little; a conversion needs at least {}M", LEAST_MEMORY >> 20));
    }
    Ok(bytes)
}

/// Bytes with an optional binary unit: `1048576`, `64M`, `2GiB`.
fn parse_size(text: &str) -> Result<u64, String> {
    let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let shift = match unit.trim().to_ascii_lowercase().trim_end_matches("ib") {
        "" | "b" => 0,
        "k" => 10,
        "m" => 20,
        "g" => 30,
        "t" => 40,
        _ => return Err(format!("unknown unit {unit:?}; use K, M, G or T")),
    };
    let number: u64 = number.parse().map_err(|_| format!("{text:?} does not start with a number"))?;
    number.checked_mul(1 << shift).filter(|&v| v > 0).ok_or_else(|| format!("{text:?} is out of range"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_have_units() {
        assert_eq!(parse_size("4096"), Ok(4096));
        assert_eq!(parse_size("512M"), Ok(512 << 20));
        assert_eq!(parse_size("2GiB"), Ok(2 << 30));
        for bad in ["", "M", "0", "1X", "99999999999T"] {
            assert!(parse_size(bad).is_err(), "{bad}");
        }
        assert_eq!(memory("64M"), Ok(64 << 20));
        assert!(memory("63M").is_err());
    }

    #[test]
    fn the_definition_is_sound() {
        use clap::CommandFactory;
        Cli::command().debug_assert();
        let dry = Cli::try_parse_from(["vt-convert", "model.gguf", "--dry-run"]).unwrap();
        assert!(dry.dry_run && dry.output.is_none());
        assert!(Cli::try_parse_from(["vt-convert", "model.gguf"]).is_err());
    }
}
