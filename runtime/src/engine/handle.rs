//! The engine's thread, and the handle by which requests reach it.

use super::model::Model;
use super::queue::Queue;
use super::request::{EventStream, GenerationRequest, SubmitError};
use super::scheduler::{Scheduler, SchedulerLimits};
use super::sequence::{Outgoing, Sequence};
use crate::metrics::Metrics;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

/// How the engine is set up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EngineConfig {
    /// Limits of a step.
    pub limits: SchedulerLimits,
    /// Requests that may wait; further ones are refused at once.
    pub max_queue: usize,
    /// Longest sequence, where it is to be shorter than the model's context.
    pub max_sequence_tokens: Option<usize>,
}

/// What reaches the engine's thread.
enum Command {
    Add(Box<Sequence>),
    /// Only ends the wait for a command.
    Wake,
}

#[derive(Debug)]
struct Shared {
    queue: Arc<Queue>,
    accepting: AtomicBool,
    aborting: AtomicBool,
    alive: AtomicBool,
    max_queue: usize,
    max_sequence_tokens: usize,
    token_limit: usize,
    parallel: usize,
}

/// A cloneable way to the engine. The engine ends with its last handle, after the sequences it has.
#[derive(Debug, Clone)]
pub struct EngineHandle {
    shared: Arc<Shared>,
    commands: UnboundedSender<Command>,
}

/// Says that the engine is gone even when its thread panics.
struct AliveGuard(Arc<Shared>);

impl Drop for AliveGuard {
    fn drop(&mut self) {
        self.0.alive.store(false, Ordering::Release);
    }
}

impl EngineHandle {
    /// Starts the engine on a thread of its own.
    ///
    /// # Errors
    /// The operating system's, where it has no thread to give.
    pub fn spawn(model: Box<dyn Model>, config: EngineConfig, metrics: Arc<Metrics>) -> io::Result<Self> {
        let info = model.info();
        let longest = info.context_length.min(info.kv.capacity_tokens());
        let shared = Arc::new(Shared {
            queue: Arc::default(),
            accepting: AtomicBool::new(true),
            aborting: AtomicBool::new(false),
            alive: AtomicBool::new(true),
            max_queue: config.max_queue,
            max_sequence_tokens: config.max_sequence_tokens.unwrap_or(longest).min(longest),
            token_limit: config.limits.token_limit.min(info.vocab_size),
            parallel: config.limits.sequences,
        });
        let (commands, inbox) = unbounded_channel();
        let scheduler = Scheduler::new(model, config.limits, metrics);
        let thread_shared = Arc::clone(&shared);
        std::thread::Builder::new()
            .name("vt-engine".to_owned())
            .spawn(move || run(scheduler, inbox, &AliveGuard(thread_shared)))?;
        Ok(Self { shared, commands })
    }

    /// Hands a request to the engine; the receiver brings its events. Dropping the receiver cancels the
    /// request before the next step.
    ///
    /// # Errors
    /// [`SubmitError`] says why the request was not accepted. Nothing was started then.
    pub fn submit(&self, request: GenerationRequest) -> Result<EventStream, SubmitError> {
        let shared = &self.shared;
        if !shared.accepting.load(Ordering::Acquire) {
            return Err(SubmitError::ShuttingDown);
        }
        if !self.is_alive() {
            return Err(SubmitError::Stopped);
        }
        let prompt_tokens = request.prompt.len();
        if prompt_tokens == 0 {
            return Err(SubmitError::EmptyPrompt);
        }
        let limit = shared.max_sequence_tokens;
        if prompt_tokens.saturating_add(request.max_tokens) > limit {
            return Err(SubmitError::TooLong { prompt_tokens, max_tokens: request.max_tokens, limit });
        }
        let limit = shared.token_limit;
        if let Some(&id) = request.prompt.iter().find(|&&id| id as usize >= limit) {
            return Err(SubmitError::UnknownToken { id, limit });
        }
        let Some(tickets) = shared.queue.admit(shared.max_queue) else {
            return Err(self.queue_full());
        };
        let (events, receiver) = unbounded_channel();
        let stopped = Arc::new(AtomicBool::new(false));
        let sequence = Sequence::new(request, events, Arc::clone(&stopped), tickets);
        self.commands.send(Command::Add(Box::new(sequence))).map_err(|_| SubmitError::Stopped)?;
        Ok(EventStream::new(receiver, stopped))
    }

    /// Says whether a request that came now would find the queue full, before anything is prepared for it.
    ///
    /// # Errors
    /// [`SubmitError::QueueFull`].
    pub fn check_queue(&self) -> Result<(), SubmitError> {
        if self.shared.queue.waiting() < self.shared.max_queue { Ok(()) } else { Err(self.queue_full()) }
    }

    fn queue_full(&self) -> SubmitError {
        let queue = &self.shared.queue;
        SubmitError::QueueFull {
            waiting: queue.waiting(),
            retry_after_seconds: queue.retry_after_seconds(self.shared.parallel),
        }
    }

    /// Longest sequence, prompt and output together.
    pub fn max_sequence_tokens(&self) -> usize {
        self.shared.max_sequence_tokens
    }

    /// Token ids below this are accepted and generated.
    pub fn token_limit(&self) -> usize {
        self.shared.token_limit
    }

    /// Whether the engine's thread runs.
    pub fn is_alive(&self) -> bool {
        self.shared.alive.load(Ordering::Acquire)
    }

    /// Requests that have not ended.
    pub fn in_flight(&self) -> usize {
        self.shared.queue.in_flight()
    }

    /// Accepts no further requests; those under way go on.
    pub fn stop_accepting(&self) {
        self.shared.accepting.store(false, Ordering::Release);
    }

    /// Ends all requests under way with [`super::FinishReason::Abort`] before the next step.
    pub fn abort(&self) {
        self.stop_accepting();
        self.shared.aborting.store(true, Ordering::Release);
        // A closed channel means that there is nothing left to abort.
        let _ = self.commands.send(Command::Wake);
    }

    /// Waits until no request is under way.
    pub async fn drained(&self) {
        self.shared.queue.emptied().await;
    }
}

fn run(mut scheduler: Scheduler, mut inbox: UnboundedReceiver<Command>, alive: &AliveGuard) {
    loop {
        if scheduler.is_idle() {
            scheduler.deliver();
            match inbox.blocking_recv() {
                Some(Command::Add(sequence)) => scheduler.add(*sequence),
                Some(Command::Wake) => {}
                None => return,
            }
        }
        while let Ok(command) = inbox.try_recv() {
            if let Command::Add(sequence) = command {
                scheduler.add(*sequence);
            }
        }
        if alive.0.aborting.load(Ordering::Acquire) {
            scheduler.abort_all();
            continue;
        }
        if let Err(error) = scheduler.step() {
            tracing::error!(%error, "the engine stops");
            alive.0.alive.store(false, Ordering::Release);
            let reason = error.to_string();
            scheduler.fail_all(&reason);
            // Whoever submitted in the meantime is told as well.
            inbox.close();
            let mut outgoing = Outgoing::default();
            while let Ok(command) = inbox.try_recv() {
                if let Command::Add(mut sequence) = command {
                    sequence.fail(reason.clone(), &mut outgoing);
                }
            }
            outgoing.deliver();
            return;
        }
    }
}
