//! Feeds mutated input to the parsers, for a given time, on a stable toolchain.
//!
//! usage: vt-fuzz TARGET|all [--seconds N] [--seed N] [--replay FILE]
//!
//! Targets run beside one another, each for that time. The seeds are the tiny checkpoints of `fixtures/`. A panic ends the run with exit code 1 and keeps the input in the
//! current folder; an input that takes longer than five seconds counts as a hang.

mod mutate;
mod targets;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use targets::{NAMES, Target, replay};
use vt_tests::process::Numbers;

/// No input of a few megabytes may take longer.
const HANG: Duration = Duration::from_secs(5);

struct Arguments {
    targets: Vec<String>,
    seconds: u64,
    seed: u64,
    replay: Option<String>,
}

fn parse() -> Option<Arguments> {
    let mut parsed = Arguments { targets: Vec::new(), seconds: 30, seed: 1, replay: None };
    let mut words = std::env::args().skip(1);
    while let Some(word) = words.next() {
        match word.as_str() {
            "--seconds" => parsed.seconds = words.next()?.parse().ok()?,
            "--seed" => parsed.seed = words.next()?.parse().ok()?,
            "--replay" => parsed.replay = Some(words.next()?),
            "all" => parsed.targets.extend(NAMES.map(str::to_owned)),
            name if NAMES.contains(&name) => parsed.targets.push(name.to_owned()),
            _ => return None,
        }
    }
    (!parsed.targets.is_empty()).then_some(parsed)
}

/// Runs one target; false after a panic or a hang.
fn fuzz(name: &str, seconds: u64, seed: u64) -> bool {
    let dir = tempfile::tempdir().expect("temporary folder");
    let target = Target::new(name, dir.path());
    let mut numbers = Numbers(seed);
    let end = Instant::now() + Duration::from_secs(seconds);
    let mut runs = 0u64;
    while Instant::now() < end {
        let input = target.input(&mut numbers);
        let started = Instant::now();
        let panicked = catch_unwind(AssertUnwindSafe(|| target.run(&input))).is_err();
        if panicked || started.elapsed() > HANG {
            let what = if panicked { "panic" } else { "hang" };
            println!("{name}: {what} in run {runs}, input in {}", target.keep(&input, runs).display());
            return false;
        }
        runs += 1;
    }
    println!("{name}: {runs} inputs in {seconds} s, no panic");
    true
}

fn main() -> ExitCode {
    let Some(arguments) = parse() else {
        eprintln!("usage: vt-fuzz {}|all [--seconds N] [--seed N] [--replay FILE]", NAMES.join("|"));
        return ExitCode::from(2);
    };
    if let Some(input) = &arguments.replay {
        let dir = tempfile::tempdir().expect("temporary folder");
        arguments.targets.iter().for_each(|name| replay(name, dir.path(), Path::new(input)));
        return ExitCode::SUCCESS;
    }
    // One thread a target: they share nothing, so all of them take the time of one.
    let clean = std::thread::scope(|scope| {
        let run = |name| scope.spawn(move || fuzz(name, arguments.seconds, arguments.seed));
        let running: Vec<_> = arguments.targets.iter().map(|name| run(name.as_str())).collect();
        running.into_iter().all(|target| target.join().unwrap_or(false))
    });
    if clean { ExitCode::SUCCESS } else { ExitCode::from(1) }
}
