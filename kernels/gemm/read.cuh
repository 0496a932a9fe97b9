// Factor `read`: how fragments get from shared memory to registers, and the mma over one stage.
#pragma once

#include "../mma.cuh"
#include "tile.cuh"

constexpr int WARP_M = BM / WARPS_M, WARP_N = BN / WARPS_N;         // 64 x 32
constexpr int FRAGMENTS_M = WARP_M / 16, FRAGMENTS_N = WARP_N / 8;  // 4 x 4 mma tiles
static_assert(FRAGMENTS_N % 2 == 0, "one ldmatrix.x4 of B feeds two fragments");

using Accumulator = float[FRAGMENTS_M][FRAGMENTS_N][4];

// A[16 rows from `row0`][16 of K from 16 * `ks`] of the stage.
template <Read READ, bool SWIZZLED>
__device__ __forceinline__ void read_a(ptx::u32 (&a)[4], ptx::u32 tile, unsigned row0, unsigned ks, unsigned lane) {
  if constexpr (READ == Read::ldmatrix) {
    const uint4 v = ptx::ldmatrix_x4(tile + offset_a<SWIZZLED>(row0 + lane % 16, 2 * ks + lane / 16));
    a[0] = v.x;
    a[1] = v.y;
    a[2] = v.z;
    a[3] = v.w;
  } else {
    const unsigned g = lane / 4, word = lane % 4 * 4;
#pragma unroll
    for (int i = 0; i < 4; ++i)
      a[i] = ptx::ld_shared_u32(tile + offset_a<SWIZZLED>(row0 + g + i % 2 * 8, 2 * ks + i / 2) + word);
  }
}

// B[16 of K from 16 * `ks`][16 columns from `col0`] of the stage: two n8 fragments.
template <Read READ, BLayout B_LAYOUT, bool SWIZZLED>
__device__ __forceinline__ void read_b(ptx::u32 (&b0)[2], ptx::u32 (&b1)[2], ptx::u32 tile, unsigned col0, unsigned ks,
                                       unsigned lane) {
  if constexpr (READ == Read::ldmatrix && B_LAYOUT == BLayout::n_by_k) {
    const unsigned row = col0 + lane % 8 + lane / 16 * 8, chunk = 2 * ks + lane / 8 % 2;
    const uint4 v = ptx::ldmatrix_x4(tile + offset_b<B_LAYOUT, SWIZZLED>(row, chunk));
    b0[0] = v.x;
    b0[1] = v.y;
    b1[0] = v.z;
    b1[1] = v.w;
  } else if constexpr (READ == Read::ldmatrix) {
    const unsigned row = 16 * ks + lane % 16, chunk = col0 / 8 + lane / 16;
    const uint4 v = ptx::ldmatrix_x4_trans(tile + offset_b<B_LAYOUT, SWIZZLED>(row, chunk));
    b0[0] = v.x;
    b0[1] = v.y;
    b1[0] = v.z;
    b1[1] = v.w;
  } else if constexpr (B_LAYOUT == BLayout::n_by_k) {
    const unsigned g = lane / 4, word = lane % 4 * 4;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      b0[i] = ptx::ld_shared_u32(tile + offset_b<B_LAYOUT, SWIZZLED>(col0 + g, 2 * ks + i) + word);
      b1[i] = ptx::ld_shared_u32(tile + offset_b<B_LAYOUT, SWIZZLED>(col0 + 8 + g, 2 * ks + i) + word);
    }
  } else {
    // K runs down the rows, so the two halves of a register lie a row apart: four 2-byte loads a fragment. `col0` is a
    // whole number of 16 columns and the row even, so that all addresses lie at fixed distances from one.
    const ptx::u32 first = tile + offset_b<B_LAYOUT, SWIZZLED>(lane % 4 * 2, col0 / 8) + lane / 4 * 2;
    auto pair = [&](unsigned row, unsigned even, unsigned odd) {
      const ptx::u32 at = first + (16 * ks + row) * PANEL * 2;
      return ptx::ld_shared_u16(at + even * CHUNK) | ptx::ld_shared_u16(at + PANEL * 2 + odd * CHUNK) << 16;
    };
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      b0[i] = pair(8 * i, 0, SWIZZLED);
      b1[i] = pair(8 * i, 1, !SWIZZLED);
    }
  }
}

// One 16-byte chunk of a row is eight consecutive values of K; lane c of a quad takes chunk c. Any order of K serves as
// long as A and B agree, so registers 0 and 1 of the chunk feed the first mma and 2 and 3 the second. K is summed in
// another grouping than with ldmatrix: this read is its own numeric contract.
template <bool SWIZZLED>
__device__ __forceinline__ void multiply_k_permuted(Accumulator& acc, ptx::u32 a_tile, ptx::u32 b_tile, unsigned row0,
                                                    unsigned col0, unsigned lane) {
  static_assert(BK == 32, "four lanes of 16 bytes are one row");
  const ptx::u32 a_first = a_tile + offset_a<SWIZZLED>(row0 + lane / 4, lane % 4);  // the same swizzle eight rows on
  const ptx::u32 b_first = b_tile + offset_b<BLayout::n_by_k, SWIZZLED>(col0 + lane / 4, lane % 4);
  uint4 b[FRAGMENTS_N];
#pragma unroll
  for (int j = 0; j < FRAGMENTS_N; ++j) b[j] = ptx::ld_shared_v4(b_first + 8 * j * ROW_BYTES_A);
#pragma unroll
  for (int i = 0; i < FRAGMENTS_M; ++i) {
    const uint4 top = ptx::ld_shared_v4(a_first + 16 * i * ROW_BYTES_A);
    const uint4 low = ptx::ld_shared_v4(a_first + (16 * i + 8) * ROW_BYTES_A);
    const ptx::u32 a_1[4] = {top.x, low.x, top.y, low.y}, a_2[4] = {top.z, low.z, top.w, low.w};
#pragma unroll
    for (int j = 0; j < FRAGMENTS_N; ++j) {
      const ptx::u32 b_1[2] = {b[j].x, b[j].y}, b_2[2] = {b[j].z, b[j].w};
      mma_m16n8k16_bf16(acc[i][j], a_1, b_1);
      mma_m16n8k16_bf16(acc[i][j], a_2, b_2);
    }
    __syncwarp();  // or ptxas reads all of A ahead, and spills
  }
}

// acc += A tile * B tile, for this warp's 64 x 32 part.
template <Read READ, BLayout B_LAYOUT, bool SWIZZLED>
__device__ __forceinline__ void multiply(Accumulator& acc, const Stage& stage, unsigned row0, unsigned col0,
                                         unsigned lane) {
  const ptx::u32 a_tile = ptx::shared_address(stage.a), b_tile = ptx::shared_address(stage.b);
  if constexpr (READ == Read::ld_shared_v4) {
    static_assert(B_LAYOUT == BLayout::n_by_k, "read 2 needs K contiguous in B: choose B layout 1");
    multiply_k_permuted<SWIZZLED>(acc, a_tile, b_tile, row0, col0, lane);
  } else {
#pragma unroll
    for (int ks = 0; ks < BK / 16; ++ks) {
      ptx::u32 b[FRAGMENTS_N][2];
#pragma unroll
      for (int j = 0; j < FRAGMENTS_N; j += 2)
        read_b<READ, B_LAYOUT, SWIZZLED>(b[j], b[j + 1], b_tile, col0 + 8 * j, ks, lane);
#pragma unroll
      for (int i = 0; i < FRAGMENTS_M; ++i) {
        ptx::u32 a[4];
        read_a<READ, SWIZZLED>(a, a_tile, row0 + 16 * i, ks, lane);
#pragma unroll
        for (int j = 0; j < FRAGMENTS_N; ++j) mma_m16n8k16_bf16(acc[i][j], a, b[j]);
      }
    }
  }
}
