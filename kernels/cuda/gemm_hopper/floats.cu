// Codes that are small floats.
#include "entries.cuh"

VT_HOPPER_4(nvfp4, hopper::Nvfp4)
VT_HOPPER_4(mxfp4, hopper::Mxfp4)
VT_HOPPER_4(mxfp4_ggml, hopper::Mxfp4Ggml)
VT_HOPPER_8(fp8, hopper::Fp8)
