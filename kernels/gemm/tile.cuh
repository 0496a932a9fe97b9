// The shape of the problem that every variant shares, the factors, and the shared-memory image.
#pragma once

#include "../ptx.cuh"
#include "../swizzle.cuh"

// The numbers come from the variant as -D macros, so that the host's plan and the kernel cannot disagree.
constexpr int BM = TILE_M, BN = TILE_N, BK = TILE_K;
constexpr int WARPS_M = WARP_ROWS, WARPS_N = WARP_COLUMNS, THREADS = 32 * WARPS_M * WARPS_N;
constexpr unsigned GROUP_M = RASTER_GROUP_M;

enum class Load { sync = 0, cp_async = 1, tma = 2 };
enum class Read { ld_shared = 0, ldmatrix = 1, ld_shared_v4 = 2 };
enum class BLayout { k_by_n = 0, n_by_k = 1 };

constexpr int ROW_BYTES_A = BK * 2;
constexpr int CHUNK = 16;  // bytes that one thread moves at once, and the unit of the swizzle
constexpr int PANEL = 64;  // columns of B in one 128-byte row: the widest box a 128 B swizzle takes
constexpr int PANEL_BYTES = BK * PANEL * 2;

// One stage: A as [128][32]; B as [128][32] (N x K) or two panels [32][64] (K x N). The same bytes in every load mode.
struct Stage {
  unsigned char a[BM * BK * 2];
  unsigned char b[BN * BK * 2];
};

template <Load LOAD, int STAGES>
struct alignas(1024) Shared {  // 1024 B: the period of the 128 B swizzle
  Stage stage[STAGES];
};
template <int STAGES>
struct alignas(1024) Shared<Load::tma, STAGES> {
  Stage stage[STAGES];
  unsigned long long full[STAGES];  // mbarriers: phase p of full[s] completes when the p-th tile in stage s has landed
};

template <bool SWIZZLED>
__device__ __forceinline__ unsigned offset_a(unsigned row, unsigned chunk) {
  return chunk_offset<ROW_BYTES_A, SWIZZLED>(row, chunk);
}

// B as N x K has A's image; as K x N the chunk counts along N, and every 64 columns start the next panel.
template <BLayout B_LAYOUT, bool SWIZZLED>
__device__ __forceinline__ unsigned offset_b(unsigned row, unsigned chunk) {
  if constexpr (B_LAYOUT == BLayout::n_by_k) return chunk_offset<BK * 2, SWIZZLED>(row, chunk);
  return chunk / 8 * PANEL_BYTES + chunk_offset<PANEL * 2, SWIZZLED>(row, chunk % 8);
}
