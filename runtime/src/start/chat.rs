//! `vt-run chat`: a conversation in the terminal.

use super::load::Opened;
use super::{Failure, print};
use crate::cli::{Chat, Cli};
use crate::engine::{EngineHandle, GenerationRequest, SamplingParams};
use crate::metrics::Metrics;
use crate::stats::Startup;
use crate::text::chat_template::ChatInput;
use crate::text::{BundleText, OutputEvent, OutputOptions, OutputStream, TextError};
use anyhow::anyhow;
use serde_json::{Value, json};
use std::io::{self, BufRead, IsTerminal, Write};
use std::sync::Arc;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::mpsc::{Receiver, channel};

/// What can be typed besides messages.
const HELP: &str = "/reset forgets the conversation, /system TEXT forgets it and tells the model TEXT first, /exit or \
                    Ctrl-D ends, Ctrl-C interrupts an answer";

/// Talks until the input ends.
///
/// # Errors
/// [`Failure`] with the exit code.
pub fn chat(args: &Chat, mut startup: Startup) -> Result<(), Failure> {
    let mut memory = args.memory.clone();
    memory.max_num_seqs = Some(1);
    let cli = Cli::for_bundle(args.bundle.clone(), args.device.clone(), memory);
    let mut cli = cli.map_err(|e| Failure::new(2, e))?;
    cli.server.chat_template.clone_from(&args.chat_template);
    let sampling_ranges = [("--temperature", args.temperature, 0.0, 100.0), ("--top-p", args.top_p, 1e-6, 1.0)];
    for (flag, value, least, most) in sampling_ranges {
        if let Some(value) = value.filter(|value| !(least..=most).contains(value)) {
            return Err(Failure::new(2, anyhow!("{flag} {value} is out of range")));
        }
    }
    let ready = Opened::open(&cli, &mut startup)?.into_model(&mut startup, &|_| ())?;
    let text = ready.text(&cli, true)?.ok_or_else(|| Failure::new(3, anyhow!("the bundle has no tokenizer")))?;
    if text.chat_template().is_none() {
        return Err(Failure::new(3, TextError::NoChatTemplate));
    }
    let engine = ready.into_engine(&cli, Some(&text), Arc::new(Metrics::new("vt")))?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.map_err(|e| Failure::new(6, e))?;
    let conversation = Conversation::new(args, engine, text);
    runtime.block_on(conversation.run())
}

/// The messages so far, and what answers them.
struct Conversation<'a> {
    args: &'a Chat,
    engine: EngineHandle,
    text: BundleText,
    system: Option<String>,
    messages: Vec<Value>,
    /// Whether a person sits at the terminal.
    person: bool,
}

impl<'a> Conversation<'a> {
    fn new(args: &'a Chat, engine: EngineHandle, text: BundleText) -> Self {
        let person = io::stdin().is_terminal();
        Self { args, engine, text, system: args.system.clone(), messages: Vec::new(), person }
    }

    async fn run(mut self) -> Result<(), Failure> {
        let mut interrupts = signal(SignalKind::interrupt()).map_err(|e| Failure::new(6, e))?;
        let mut lines = lines();
        self.hint(HELP);
        loop {
            self.hint_inline("> ");
            let line = tokio::select! {
                line = lines.recv() => line,
                _ = interrupts.recv() => {
                    self.hint("\nCtrl-D ends");
                    continue;
                }
            };
            let Some(line) = line else {
                self.hint("");
                return Ok(());
            };
            let line = line.map_err(|e| Failure::new(6, e))?;
            match line.trim() {
                "" => {}
                "/exit" | "/quit" => return Ok(()),
                "/help" => eprintln!("{HELP}"),
                "/reset" => self.messages.clear(),
                "/system" => (self.system, self.messages) = (None, Vec::new()),
                command if command.starts_with("/system ") => {
                    self.system = Some(command["/system ".len()..].trim().to_owned());
                    self.messages.clear();
                }
                command if command.starts_with('/') && !command.contains(' ') => {
                    eprintln!("{command} is not known; {HELP}");
                }
                message => {
                    self.messages.push(json!({"role": "user", "content": message}));
                    self.answer(&mut interrupts).await?;
                }
            }
        }
    }

    fn hint(&self, text: &str) {
        if self.person {
            eprintln!("{text}");
        }
    }

    fn hint_inline(&self, text: &str) {
        if self.person {
            eprint!("{text}");
            // Nobody is helped by an error about a prompt.
            let _ = io::stderr().flush();
        }
    }

    /// Answers the last message, and remembers what was said. A message that cannot be answered is forgotten.
    async fn answer(&mut self, interrupts: &mut Signal) -> Result<(), Failure> {
        let prompt = match self.prompt() {
            Ok(prompt) => prompt,
            Err(reason) => {
                eprintln!("{reason}");
                self.messages.pop();
                return Ok(());
            }
        };
        let room = self.engine.max_sequence_tokens() - prompt.len();
        let most = self.args.max_tokens.map_or(room, |most| room.min(most as usize));
        let mut request = GenerationRequest::greedy(prompt, most);
        request.sampling = self.sampling();
        request.stop_token_ids = self.text.stop_token_ids().iter().copied().collect();
        let events = self.engine.submit(request).map_err(|e| Failure::new(5, e))?;
        let options = OutputOptions::default();
        let mut output = OutputStream::new(events, Arc::clone(self.text.tokenizer()), options);
        let mut said = String::new();
        loop {
            // The interrupt first: an answer that comes quickly must not hide it.
            let event = tokio::select! {
                biased;
                _ = interrupts.recv() => {
                    eprint!(" [interrupted]");
                    break;
                }
                event = output.next() => event,
            };
            match event {
                None | Some(OutputEvent::Finished(_)) => break,
                Some(OutputEvent::Started { .. }) => {}
                Some(OutputEvent::Delta { text, .. }) => {
                    print(&text)?;
                    said.push_str(&text);
                }
                Some(OutputEvent::Failed(reason)) => return Err(Failure::new(5, anyhow!(reason))),
            }
        }
        print("\n")?;
        self.messages.push(json!({"role": "assistant", "content": said}));
        Ok(())
    }

    /// The conversation as tokens. Where it has outgrown the context its oldest turns are forgotten.
    fn prompt(&mut self) -> Result<Vec<u32>, String> {
        let limit = self.engine.max_sequence_tokens();
        loop {
            let system = self.system.iter().map(|text| json!({"role": "system", "content": text}));
            let input = ChatInput {
                messages: system.chain(self.messages.iter().cloned()).collect(),
                add_generation_prompt: true,
                ..ChatInput::default()
            };
            let ids = self.text.encode_chat(&input).map_err(|error| error.to_string())?;
            if ids.len() < limit {
                return Ok(ids);
            }
            if self.messages.len() < 3 {
                return Err(format!("the message has {} tokens, the limit is {limit}; see --max-model-len", ids.len()));
            }
            eprintln!("the conversation has outgrown the context of {limit} tokens: its oldest turn is forgotten");
            self.messages.drain(..2);
        }
    }

    fn sampling(&self) -> SamplingParams {
        let defaults = self.text.sampling_defaults();
        SamplingParams {
            temperature: self.args.temperature.or(defaults.temperature).unwrap_or(1.0),
            top_p: self.args.top_p.or(defaults.top_p).unwrap_or(1.0),
            top_k: defaults.top_k.unwrap_or(0) as usize,
            min_p: defaults.min_p.unwrap_or(0.0),
            repetition_penalty: defaults.repetition_penalty.unwrap_or(1.0),
            seed: self.args.seed,
            ..SamplingParams::default()
        }
    }
}

/// Lines of standard input, read on a thread of its own so that a signal can be noticed meanwhile.
fn lines() -> Receiver<io::Result<String>> {
    let (send, lines) = channel(1);
    std::thread::spawn(move || {
        for line in io::stdin().lock().lines() {
            if send.blocking_send(line).is_err() {
                return;
            }
        }
    });
    lines
}
