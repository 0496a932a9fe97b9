// Reads of a tile in shared memory and nothing else: no mma hides what an access costs.
//
// Every warp reads the whole tile `passes` times and adds up what it gets, a sum for each lane that is checked
// afterwards. With VARIANT_DEPENDENT each lane reads the address of its next access: a chain, whose end is checked.
#include "tile.cuh"

constexpr unsigned STEPS = 16;              // of the chain, in one pass
constexpr unsigned BATCH = 32 / REGISTERS;  // accesses that ptxas may order among each other

// What is added to a chunk of a chain that is staged: its low halves are offsets in the tile and become addresses.
__device__ __forceinline__ u32 rebase(u32 tile, unsigned row) {
  if constexpr (!DEPENDENT)
    return 0;
  else if constexpr (TRANSPOSED)
    return row % 2 ? 0 : tile * 0x10001;  // the low half of a word is an element of an even row
  else
    return tile;
}

// Global to shared memory, in the variant's layout.
__device__ __forceinline__ void stage(u32 tile, const unsigned char* source) {
#pragma unroll 1
  for (unsigned i = threadIdx.x; i < ROWS * ROW_CHUNKS; i += blockDim.x) {
    const unsigned row = i / ROW_CHUNKS;
    const u32 add = rebase(tile, row);
    const uint4 v = ptx::ld_global_v4(source + i * CHUNK);
    ptx::st_shared_v4(tile + offset(row, i % ROW_CHUNKS), {v.x + add, v.y + add, v.z + add, v.w + add});
  }
}

// The sum of all words that this lane gets, each with the weight of its place across the tile: 1, 3, 5, 7, 1, ...
__device__ __forceinline__ u32 independent(u32 tile, unsigned passes) {
  u32 first[BASES], sum[4 * HALVES] = {}, total = 0;
#pragma unroll
  for (unsigned i = 0; i < BASES; ++i) first[i] = tile + base(threadIdx.x % 32, i);
#pragma unroll 1
  for (; passes; --passes) {
#pragma unroll
    for (unsigned i = 0; i < ACCESSES; ++i) {
      const uint4 v = read(first[place_of(i)] + immediate(i));
      const u32 words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
      for (unsigned r = 0; r < REGISTERS; ++r) sum[sum_of(i, r)] += words[r];
      if (i % BATCH == BATCH - 1) __syncwarp();  // or ptxas reads more ahead than it has registers for
    }
  }
#pragma unroll
  for (unsigned i = 0; i < 4 * HALVES; ++i) total += (2 * (i % 4) + 1) * (sum[i] << (i < 4 ? 0 : 16));
  return total;
}

// Where the chain leads in STEPS accesses a pass, as an offset in the tile.
__device__ __forceinline__ u32 dependent(u32 tile, unsigned passes) {
  u32 at = tile + base(threadIdx.x % 32, 0);
#pragma unroll 1
  for (; passes; --passes) {
#pragma unroll
    for (unsigned i = 0; i < STEPS; ++i) at = read(at).x;
  }
  return at - tile;
}

// One CTA per SM. sum[CTA][thread]; cycles[CTA][warp]: from warp 0's start after the barrier, which lets all warps go
// at once, to the warp's own end, so that the largest of a CTA is what the SM took.
extern "C" __global__ void __launch_bounds__(1024, CTAS_PER_SM)
    smem_read(const unsigned char* source, u32* sum, unsigned long long* cycles, unsigned passes) {
  extern __shared__ __align__(1024) unsigned char bytes[];
  const u32 tile = ptx::shared_address(bytes);
  stage(tile, source);
  __syncthreads();
  const unsigned long long start = ptx::clock64_now();
  const u32 result = DEPENDENT ? dependent(tile, passes) : independent(tile, passes);
  // The store waits for the last read, and the clock comes after the store.
  ptx::st_global_u32(sum + blockIdx.x * blockDim.x + threadIdx.x, result);
  const unsigned long long end = ptx::clock64_now();

  const unsigned warps = blockDim.x / 32, warp = threadIdx.x / 32;
  cycles += blockIdx.x * warps;
  if (threadIdx.x % 32 == 0) cycles[warp] = end;
  __syncthreads();
  if (threadIdx.x < warps) cycles[threadIdx.x] -= start;  // all of these are lanes of warp 0
}
