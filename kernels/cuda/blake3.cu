// BLAKE3 chaining values of the 1 MiB leaves of a device image.
//
// A leaf is 1024 chunks of 1 KiB, a complete subtree of its segment's BLAKE3 tree. One thread block hashes one leaf: each
// thread compresses the 16 blocks of a chunk in sequence, four chunks one after the other, and then the block reduces the
// 1024 chunk values pairwise. Source of the function: the BLAKE3 specification, section 2 (https://github.com/BLAKE3-team/BLAKE3-specs).
//
// Why staged: the 32 threads of a warp read 32 chunks that lie 1 KiB apart. Reading them through shared memory, 64 bytes of
// each chunk at a time, makes every load of the warp whole 64-byte runs, one compression ahead of their use.

#include <cstdint>

namespace {

constexpr uint32_t kThreads = 256;
constexpr uint32_t kWarps = kThreads / 32;
constexpr uint32_t kChunkBytes = 1024;
constexpr uint32_t kBlockBytes = 64;
constexpr uint32_t kBlocksPerChunk = kChunkBytes / kBlockBytes;
constexpr uint32_t kChunksPerLeaf = 1024;
constexpr uint32_t kLeafBytes = kChunksPerLeaf * kChunkBytes;
// A row of a stage is one block of one chunk. With 20 words from row to row, the 16-byte reads of 8 neighbouring threads
// fall into different banks.
constexpr uint32_t kRowBytes = kBlockBytes + 16;
constexpr uint32_t kStageBytes = 32 * kRowBytes;
constexpr uint32_t kStages = 2;

constexpr uint32_t kChunkStart = 1, kChunkEnd = 2, kParent = 4, kRoot = 8;

__device__ constexpr uint32_t kIv[8] = {0x6A09E667, 0xBB67AE85, 0x3C6EF372, 0xA54FF53A,
                                         0x510E527F, 0x9B05688C, 0x1F83D9AB, 0x5BE0CD19};

struct Shared {
    // Chunk values, then the values of each level of the tree.
    uint32_t values[kChunksPerLeaf][8];
    uint8_t stages[kWarps][kStages][kStageBytes];
};

__device__ __forceinline__ void mix(uint32_t& a, uint32_t& b, uint32_t& c, uint32_t& d, uint32_t x, uint32_t y) {
    a = a + b + x;
    d = __byte_perm(d ^ a, 0, 0x1032);  // right by 16
    c = c + d;
    b = __funnelshift_r(b ^ c, b ^ c, 12);
    a = a + b + y;
    d = __byte_perm(d ^ a, 0, 0x0321);  // right by 8
    c = c + d;
    b = __funnelshift_r(b ^ c, b ^ c, 7);
}

// cv = the first eight output words of the compression function.
__device__ __forceinline__ void compress(uint32_t (&cv)[8], const uint32_t (&message)[16], uint64_t counter, uint32_t len,
                                         uint32_t flags) {
    uint32_t v[16] = {cv[0],  cv[1],  cv[2],  cv[3],  cv[4],  cv[5],  cv[6],  cv[7],
                      kIv[0], kIv[1], kIv[2], kIv[3], static_cast<uint32_t>(counter),
                      static_cast<uint32_t>(counter >> 32), len, flags};
    uint32_t m[16];
#pragma unroll
    for (int i = 0; i < 16; ++i) m[i] = message[i];
#pragma unroll
    for (int r = 0; r < 7; ++r) {
        mix(v[0], v[4], v[8], v[12], m[0], m[1]);
        mix(v[1], v[5], v[9], v[13], m[2], m[3]);
        mix(v[2], v[6], v[10], v[14], m[4], m[5]);
        mix(v[3], v[7], v[11], v[15], m[6], m[7]);
        mix(v[0], v[5], v[10], v[15], m[8], m[9]);
        mix(v[1], v[6], v[11], v[12], m[10], m[11]);
        mix(v[2], v[7], v[8], v[13], m[12], m[13]);
        mix(v[3], v[4], v[9], v[14], m[14], m[15]);
        // The permutation between rounds; unrolled, it only renames registers.
        const uint32_t p[16] = {m[2], m[6],  m[3],  m[10], m[7], m[0],  m[4],  m[13],
                                m[1], m[11], m[12], m[5],  m[9], m[14], m[15], m[8]};
#pragma unroll
        for (int i = 0; i < 16; ++i) m[i] = p[i];
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) cv[i] = v[i] ^ v[i + 8];
}

__device__ __forceinline__ void start(uint32_t (&cv)[8]) {
#pragma unroll
    for (int i = 0; i < 8; ++i) cv[i] = kIv[i];
}

// Copies 16 bytes, of which the first `valid` exist; the rest becomes zero, which is how BLAKE3 pads a block.
__device__ __forceinline__ void copy16(uint32_t shared, const uint8_t* global, uint32_t valid) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"(shared), "l"(global), "r"(valid) : "memory");
}

// Fetches block `block` of the warp's 32 chunks. `bytes` of data exist from `data` on.
__device__ __forceinline__ void fetch(uint8_t* stage, const uint8_t* data, uint32_t bytes, uint32_t block, uint32_t lane) {
    const uint32_t to = static_cast<uint32_t>(__cvta_generic_to_shared(stage));
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) {
        const uint32_t piece = i * 32 + lane, row = piece / 4, within = piece % 4 * 16;
        const uint32_t at = row * kChunkBytes + block * kBlockBytes + within;
        const uint32_t valid = at >= bytes ? 0 : min(bytes - at, 16u);
        // Where nothing is valid nothing is read, but the address stays inside.
        copy16(to + row * kRowBytes + within, data + (valid ? at : 0), valid);
    }
    asm volatile("cp.async.commit_group;\n" ::: "memory");
}

}  // namespace

// Grid: one block per leaf. `data` is 16-byte aligned and holds `bytes` bytes; leaf `first_leaf + blockIdx.x` starts at a
// multiple of 1 MiB of it. The chunk counter starts again every `segment_leaves` leaves, as each segment is hashed alone.
// A segment that is one leaf gets its root value, so that its entry is the hash of the segment.
// values [gridDim.x, 8]: chaining values, little-endian words.
extern "C" __global__ void __launch_bounds__(kThreads, 3)
    vt_blake3_leaves(const uint8_t* __restrict__ data, uint64_t bytes, uint64_t first_leaf, uint64_t segment_leaves,
                     uint32_t* __restrict__ values) {
    extern __shared__ __align__(16) uint8_t shared_bytes[];
    Shared& shared = *reinterpret_cast<Shared*>(shared_bytes);
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const uint64_t leaf = first_leaf + blockIdx.x;
    const uint64_t begin = leaf * kLeafBytes;
    if (begin >= bytes) return;
    const uint64_t left = bytes - begin;
    const uint32_t len = left < kLeafBytes ? static_cast<uint32_t>(left) : kLeafBytes;
    const uint64_t in_segment = leaf % segment_leaves;
    const bool sole = in_segment == 0 && (left <= kLeafBytes || segment_leaves == 1);
    const uint32_t chunks = (len + kChunkBytes - 1) / kChunkBytes;

    for (uint32_t first = warp * 32; first < chunks; first += kThreads) {
        const uint8_t* at = data + begin + first * kChunkBytes;
        const uint32_t there = len - first * kChunkBytes;
        // The warp's first chunk is its longest.
        const uint32_t steps = min((there + kBlockBytes - 1) / kBlockBytes, kBlocksPerChunk);
        const uint32_t mine = there > lane * kChunkBytes ? min(there - lane * kChunkBytes, kChunkBytes) : 0;
        const uint32_t blocks = (mine + kBlockBytes - 1) / kBlockBytes;
        const uint64_t counter = in_segment * kChunksPerLeaf + first + lane;
        uint32_t cv[8];
        start(cv);
        fetch(shared.stages[warp][0], at, there, 0, lane);
        for (uint32_t b = 0; b < steps; ++b) {
            if (b + 1 < steps) {
                fetch(shared.stages[warp][(b + 1) % kStages], at, there, b + 1, lane);
                asm volatile("cp.async.wait_group 1;\n" ::: "memory");
            } else {
                asm volatile("cp.async.wait_group 0;\n" ::: "memory");
            }
            __syncwarp();
            const uint4* row = reinterpret_cast<const uint4*>(shared.stages[warp][b % kStages] + lane * kRowBytes);
            uint32_t m[16];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const uint4 q = row[i];
                m[4 * i] = q.x, m[4 * i + 1] = q.y, m[4 * i + 2] = q.z, m[4 * i + 3] = q.w;
            }
            // The stage is filled again in the next step, by other lanes.
            __syncwarp();
            if (b < blocks) {
                const bool last = b + 1 == blocks;
                uint32_t flags = (b == 0 ? kChunkStart : 0) | (last ? kChunkEnd : 0);
                if (last && sole && chunks == 1) flags |= kRoot;
                compress(cv, m, counter, last ? mine - b * kBlockBytes : kBlockBytes, flags);
            }
        }
        if (mine > 0) {
            uint4* out = reinterpret_cast<uint4*>(shared.values[first + lane]);
            out[0] = make_uint4(cv[0], cv[1], cv[2], cv[3]);
            out[1] = make_uint4(cv[4], cv[5], cv[6], cv[7]);
        }
    }
    __syncthreads();

    // Pairs become parents level by level, an odd last value moves up as it is: the same tree as BLAKE3's, whose left
    // subtrees are the largest powers of two.
    for (uint32_t count = chunks; count > 1; count = (count + 1) / 2) {
        const uint32_t pairs = count / 2;
        for (uint32_t base = 0; base < pairs; base += kThreads) {
            const uint32_t pair = base + threadIdx.x;
            uint32_t cv[8];
            if (pair < pairs) {
                uint32_t m[16];
                const uint4* in = reinterpret_cast<const uint4*>(shared.values[2 * pair]);
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const uint4 q = in[i];
                    m[4 * i] = q.x, m[4 * i + 1] = q.y, m[4 * i + 2] = q.z, m[4 * i + 3] = q.w;
                }
                start(cv);
                compress(cv, m, 0, kBlockBytes, kParent | (count == 2 && sole ? kRoot : 0));
            }
            __syncthreads();
            if (pair < pairs) {
                uint4* out = reinterpret_cast<uint4*>(shared.values[pair]);
                out[0] = make_uint4(cv[0], cv[1], cv[2], cv[3]);
                out[1] = make_uint4(cv[4], cv[5], cv[6], cv[7]);
            }
            __syncthreads();
        }
        if (count % 2 == 1) {
            if (threadIdx.x < 8) shared.values[pairs][threadIdx.x] = shared.values[count - 1][threadIdx.x];
            __syncthreads();
        }
    }
    if (threadIdx.x < 8) values[static_cast<uint64_t>(blockIdx.x) * 8 + threadIdx.x] = shared.values[0][threadIdx.x];
}

static_assert(sizeof(Shared) == 73728, "the launch wrapper asks for this much shared memory");
