//! Requests in, tokens out: the scheduler, its thread, and its seam to the model.

pub mod blocks;
pub mod constraint;
pub mod model;
pub mod random;
pub mod request;
pub mod sampling;

mod handle;
mod queue;
mod scheduler;
mod sequence;

#[cfg(test)]
mod tests;

pub use handle::{EngineConfig, EngineHandle};
pub use request::{CacheSalt, Event, EventStream, Finish, FinishReason, GenerationRequest, SubmitError, Timings};
pub use sampling::{SamplingParams, TokenLogprobs};
pub use scheduler::SchedulerLimits;
