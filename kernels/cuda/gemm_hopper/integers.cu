// Codes that are integers, with 16-bit scales a group.
#include "entries.cuh"

namespace {
template <int Group>
using Int4F16 = hopper::Int4<hopper::ScalesF16, Group>;
template <int Group>
using Int4Bf16 = hopper::Int4<hopper::ScalesBf16, Group>;
template <int Group>
using Int8F16 = hopper::Int8<hopper::ScalesF16, Group>;
template <int Group>
using Int8Bf16 = hopper::Int8<hopper::ScalesBf16, Group>;
}  // namespace

VT_HOPPER_4(int4_f16_g32, Int4F16<32>)
VT_HOPPER_4(int4_bf16_g32, Int4Bf16<32>)
VT_HOPPER_4(int4_f16_g64, Int4F16<64>)
VT_HOPPER_4(int4_bf16_g64, Int4Bf16<64>)
VT_HOPPER_8(int8_f16_g32, Int8F16<32>)
VT_HOPPER_8(int8_bf16_g32, Int8Bf16<32>)
VT_HOPPER_8(int8_f16_g64, Int8F16<64>)
VT_HOPPER_8(int8_bf16_g64, Int8Bf16<64>)
