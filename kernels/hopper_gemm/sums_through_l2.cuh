// How CTAs of several clusters share the K of a tile: each has some columns of it to add up, and the others leave their sums of
// them in global memory, which is L2 as long as they fit. A warp exchanges with those that have its number alone.
#pragma once

#include "../gpu_scope.cuh"

// The launch's own global memory: for each tile 32 counters, by warp, and behind them all for each tile its sums. The counters are
// zeros before the first launch; after each they all have the same highest bit and no other. No two launches under way may share it.
using Workspace = ptx::u32;
constexpr unsigned COUNTERS = 32;

// Of a tile: SPLIT CTAs, each of which adds up CHUNKS times 8 columns. For whom, of whom.
template <unsigned SPLIT, unsigned CHUNKS, unsigned ROW_BLOCKS, unsigned THREADS>
struct TileSums {
  float4 sums[SPLIT][SPLIT - 1][CHUNKS][ROW_BLOCKS][THREADS];
};

// One thread of each of `split` warps: returns when all are here, and what all wrote before is visible. The arrivals of a round
// add up to the highest bit, as in the grid barrier of CUDA's cooperative groups, so that nobody has to set anything back.
// They wait without regard to whether the others run yet: the CTAs of a tile have indices in a row, and CTAs begin in their order.
__device__ __forceinline__ void meet_through_l2(ptx::u32* arrived, bool first, ptx::u32 split) {
  constexpr ptx::u32 ROUND = 1u << 31;
  const ptx::u32 before = ptx::atom_add_release_gpu(arrived, first ? ROUND - (split - 1) : 1);
  while (((before ^ ptx::ld_acquire_gpu(arrived)) & ROUND) == 0) {
  }
}

// The kernel's last parameter, where there is one.
#if VARIANT_SPLIT_K > 100
#define WORKSPACE_PARAMETER , Workspace* workspace
#define WORKSPACE_ARGUMENT , workspace
#else
#define WORKSPACE_PARAMETER
#define WORKSPACE_ARGUMENT
#endif
