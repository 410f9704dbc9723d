//! CPU operators.
