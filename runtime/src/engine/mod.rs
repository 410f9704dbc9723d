//! Requests in, tokens out: the scheduler, its thread, and its seam to the model.

pub mod blocks;
pub mod constraint;
pub mod model;
pub mod random;
pub mod request;
pub mod sampling;

pub use request::{CacheSalt, Event, Finish, FinishReason, GenerationRequest, SubmitError, Timings};
pub use sampling::{SamplingParams, TokenLogprobs};
