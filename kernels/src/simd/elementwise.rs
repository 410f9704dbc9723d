//! Instances of the generic bodies, included in the file of each instruction set by [`instances`].

/// Makes one function per generic body, with the attributes of the instruction set.
macro_rules! instances {
    ($fma:literal, $(#[$attribute:meta])*) => {
        $(#[$attribute])*
        pub(super) fn silu_mul(gate: &[f32], up: &[f32], out: &mut [f32]) {
            $crate::simd::generic::silu_mul::<$fma>(gate, up, out);
        }

        $(#[$attribute])*
        pub(super) fn gelu_mul(gate: &[f32], up: &[f32], out: &mut [f32]) {
            $crate::simd::generic::gelu_mul::<$fma>(gate, up, out);
        }

        $(#[$attribute])*
        pub(super) fn add(x: &mut [f32], y: &[f32]) {
            $crate::simd::generic::add(x, y);
        }

        $(#[$attribute])*
        pub(super) fn scale(values: &mut [f32], factor: f32) {
            $crate::simd::generic::scale(values, factor);
        }

        $(#[$attribute])*
        pub(super) fn dot(x: &[f32], y: &[f32]) -> f32 {
            $crate::simd::generic::dot::<$fma>(x, y)
        }

        $(#[$attribute])*
        pub(super) fn rms_norm(x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
            $crate::simd::generic::rms_norm::<$fma>(x, weight, eps, out);
        }

        $(#[$attribute])*
        pub(super) fn rms_norm_in_place(x: &mut [f32], weight: &[f32], eps: f32) {
            $crate::simd::generic::rms_norm_in_place::<$fma>(x, weight, eps);
        }

        $(#[$attribute])*
        pub(super) fn rotate_half(head: &mut [f32], cos: &[f32], sin: &[f32]) {
            $crate::simd::generic::rotate_half::<$fma>(head, cos, sin);
        }

        $(#[$attribute])*
        pub(super) fn max(values: &[f32]) -> f32 {
            $crate::simd::generic::max(values)
        }

        $(#[$attribute])*
        pub(super) fn exp_and_sum(values: &mut [f32], shift: f32) -> f32 {
            $crate::simd::generic::exp_and_sum::<$fma>(values, shift)
        }

        $(#[$attribute])*
        pub(super) fn soft_cap(values: &mut [f32], cap: f32) {
            $crate::simd::generic::soft_cap::<$fma>(values, cap);
        }

        $(#[$attribute])*
        pub(super) fn dot_float(
            panel: &$crate::simd::FloatPanel,
            len: usize,
            x: &[f32],
            stride: usize,
            acc: &mut [$crate::simd::Acc],
        ) {
            $crate::simd::generic::dot_float::<$fma>(panel, len, x, stride, acc);
        }
    };
}

/// The two products of attention, for files that do not have their own.
macro_rules! attention_instances {
    ($fma:literal, $(#[$attribute:meta])*) => {
        $(#[$attribute])*
        pub(super) fn scores(q: &[f32], keys: &[f32], head_dim: usize, out: &mut [f32], stride: usize) {
            $crate::simd::generic::scores::<$fma>(q, keys, head_dim, out, stride);
        }

        $(#[$attribute])*
        pub(super) fn weighted_values(weights: &[f32], stride: usize, values: &[f32], head_dim: usize, out: &mut [f32]) {
            $crate::simd::generic::weighted_values::<$fma>(weights, stride, values, head_dim, out);
        }
    };
}

pub(super) use {attention_instances, instances};
