//! Requests in, tokens out: the scheduler and its seam to the model.

pub mod model;
