// Instructions of sm_90a that attention and products share (PTX ISA: mbarrier, bulk tensor copies, clusters, setmaxnreg, and the
// fences of wgmma).
//
// Places in shared memory are given as pointers or as 32-bit addresses, whichever a kernel counts in.
#pragma once
#include <cstdint>

namespace hopper {

// A CUtensorMap, as the driver encodes it.
struct alignas(64) TensorMap {
    uint64_t words[16];
};

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// A place in shared memory.
struct Shared32 {
    uint32_t address;
    __device__ __forceinline__ Shared32(uint32_t address) : address(address) {}
    __device__ __forceinline__ Shared32(const void* pointer) : address(shared_address(pointer)) {}
};

__device__ __forceinline__ void barrier_init(Shared32 barrier, uint32_t arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier.address), "r"(arrivals) : "memory");
}

// Writes of this thread to shared memory become visible to wgmma and bulk copies.
__device__ __forceinline__ void publish_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Makes initialised barriers visible to the copy engine and to the other blocks of the cluster.
__device__ __forceinline__ void barrier_init_fence() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    publish_shared();
}

__device__ __forceinline__ void barrier_arrive(Shared32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier.address) : "memory");
}

// Arrives at the barrier of the same offset in block `rank` of the cluster.
__device__ __forceinline__ void barrier_arrive_remote(Shared32 barrier, uint32_t rank) {
    asm volatile(
        "{ .reg .b32 remote;\n"
        "mapa.shared::cluster.u32 remote, %0, %1;\n"
        "mbarrier.arrive.shared::cluster.b64 _, [remote]; }" ::"r"(barrier.address),
        "r"(rank)
        : "memory");
}

__device__ __forceinline__ void barrier_expect(Shared32 barrier, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier.address), "r"(bytes)
                 : "memory");
}

// Waits until the phase of that parity is over.
__device__ __forceinline__ void barrier_wait(Shared32 barrier, uint32_t parity) {
    asm volatile(
        "{ .reg .pred done;\n"
        "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again; }" ::"r"(barrier.address),
        "r"(parity)
        : "memory");
}

// The box of a tensor map of four axes; what lies outside of the tensor becomes zero.
__device__ __forceinline__ void copy_box(Shared32 to, const TensorMap* map, int c0, int c1, int c2, int c3, Shared32 barrier) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5}], [%6];" ::"r"(
            to.address),
        "l"(map), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(barrier.address)
        : "memory");
}

// The box of a tensor map of three axes.
__device__ __forceinline__ void copy_box(Shared32 to, const TensorMap* map, int c0, int c1, int c2, Shared32 barrier) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];" ::"r"(
            to.address),
        "l"(map), "r"(c0), "r"(c1), "r"(c2), "r"(barrier.address)
        : "memory");
}

// `bytes` bytes side by side, a multiple of 16.
__device__ __forceinline__ void copy_run(Shared32 to, const void* from, uint32_t bytes, Shared32 barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to.address), "l"(from),
        "r"(bytes), "r"(barrier.address)
        : "memory");
}

// The box of a tensor map at (column, row); what lies outside of the tensor becomes zero.
__device__ __forceinline__ void copy_box(Shared32 to, const TensorMap* map, int column, int row, Shared32 barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(
            to.address),
        "l"(map), "r"(column), "r"(row), "r"(barrier.address)
        : "memory");
}

// As `copy_box`, into the same place of every block of the cluster whose bit is set, completing on each one's barrier.
__device__ __forceinline__ void copy_box_multicast(Shared32 to, const TensorMap* map, int column, int row, Shared32 barrier,
                                                   uint16_t blocks) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%2, %3}], "
        "[%4], %5;" ::"r"(to.address),
        "l"(map), "r"(column), "r"(row), "r"(barrier.address), "h"(blocks)
        : "memory");
}

__device__ __forceinline__ void prefetch_map(const TensorMap* map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

__device__ __forceinline__ uint32_t cluster_rank() {
    uint32_t rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

__device__ __forceinline__ void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// A barrier of some warps of the block; `id` 1 to 15.
__device__ __forceinline__ void named_barrier(int id, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

template <int Registers>
__device__ __forceinline__ void registers_give() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Registers));
}
template <int Registers>
__device__ __forceinline__ void registers_take() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Registers));
}

// Orders register writes before the next wgmma.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits until at most `Pending` groups of products are under way.
template <int Pending>
__device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(Pending) : "memory");
}

}  // namespace hopper
