// Kernels of one stream whose ends and starts overlap (programmatic dependent launch; PTX ISA: griddepcontrol).
//
// A kernel that is launched early calls `wait_for_previous` before it reads what others wrote or writes what others read.
// The wait is for the whole kernel before it, which has waited in its turn. `let_next_start` lets an early kernel behind this
// one be put on the device once every block has called it or ended.
#pragma once

__device__ __forceinline__ void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

__device__ __forceinline__ void let_next_start() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
