// Factor `load`: how a tile of A and of B gets from global to shared memory.
#pragma once

#include "tile.cuh"

// What the kernel is given of an operand: its address, or for TMA its tensor map.
template <Load LOAD>
struct Operand {
  const unsigned char* base;
};
template <>
struct Operand<Load::tma> {
  ptx::TensorMap map;
};

// The 16-byte chunks of one operand's tile that this thread moves: two each of A and of B. The second lies a whole
// number of swizzle periods below the first, so it needs no target of its own: this kernel is short of registers.
struct Chunks {
  const unsigned char* source;
  unsigned target;      // of the first chunk, within the operand's part of a stage
  unsigned far_source;  // bytes from the first chunk to the second, in global
  unsigned step;        // bytes from one K tile to the next

  static constexpr unsigned far_target = THREADS * CHUNK;  // and in shared memory: the rows in between are full
};

// Consecutive threads on consecutive chunks of a row: a warp covers whole runs of 64 B (K contiguous) or 256 B.
template <int ROW_CHUNKS, class Offset>
__device__ __forceinline__ Chunks chunks_of(const unsigned char* tile, unsigned stride, unsigned step, Offset offset) {
  const unsigned row = threadIdx.x / ROW_CHUNKS, chunk = threadIdx.x % ROW_CHUNKS;
  return {tile + static_cast<unsigned long long>(row) * stride + chunk * CHUNK, offset(row, chunk),
          THREADS / ROW_CHUNKS * stride, step};
}

// Per-thread loader of load modes sync and cp.async. `Registers` holds a tile between ld.global and st.shared.
template <BLayout B_LAYOUT, bool SWIZZLED>
struct ChunkLoader {
  Chunks a, b;

  struct Registers {
    uint4 a[2], b[2];
  };

  __device__ __forceinline__ ChunkLoader(const unsigned char* A, const unsigned char* B, unsigned m0, unsigned n0,
                                         unsigned n, unsigned k) {
    static_assert(BM * BK * 2 == 2 * THREADS * CHUNK && BN * BK * 2 == 2 * THREADS * CHUNK,
                  "a thread moves two chunks of each operand: 128x128x32 and 256 threads");
    const unsigned row_a = 2 * k;
    a = chunks_of<BK * 2 / CHUNK>(A + static_cast<unsigned long long>(m0) * row_a, row_a, BK * 2, offset_a<SWIZZLED>);
    if constexpr (B_LAYOUT == BLayout::n_by_k) {
      b = chunks_of<BK * 2 / CHUNK>(B + static_cast<unsigned long long>(n0) * row_a, row_a, BK * 2,
                                    offset_b<B_LAYOUT, SWIZZLED>);
    } else {
      const unsigned row_b = 2 * n;
      b = chunks_of<BN * 2 / CHUNK>(B + 2ull * n0, row_b, BK * row_b, offset_b<B_LAYOUT, SWIZZLED>);
      // A row of 16 chunks lies in two panels: the second chunk of a thread is 16 rows of 128 B below the first.
      static_assert(THREADS / (BN * 2 / CHUNK) * PANEL * 2 == 2048 && BK * PANEL * 2 == 4096, "see far_target_b");
    }
  }

  static constexpr unsigned far_target_b = B_LAYOUT == BLayout::n_by_k ? Chunks::far_target : 2048;

  __device__ __forceinline__ void advance() {
    a.source += a.step;
    b.source += b.step;
  }

  __device__ __forceinline__ void cp_async(Stage& stage) {
    const unsigned to_a = ptx::shared_address(stage.a) + a.target, to_b = ptx::shared_address(stage.b) + b.target;
    ptx::cp_async_cg_16(to_a, a.source);
    ptx::cp_async_cg_16(to_a + Chunks::far_target, a.source + a.far_source);
    ptx::cp_async_cg_16(to_b, b.source);
    ptx::cp_async_cg_16(to_b + far_target_b, b.source + b.far_source);
    advance();
  }

  __device__ __forceinline__ Registers ld_global() {
    const Registers r = {{ptx::ld_global_v4(a.source), ptx::ld_global_v4(a.source + a.far_source)},
                         {ptx::ld_global_v4(b.source), ptx::ld_global_v4(b.source + b.far_source)}};
    advance();
    return r;
  }

  __device__ __forceinline__ void st_shared(Stage& stage, const Registers& r) {
    const unsigned to_a = ptx::shared_address(stage.a) + a.target, to_b = ptx::shared_address(stage.b) + b.target;
    ptx::st_shared_v4(to_a, r.a[0]);
    ptx::st_shared_v4(to_a + Chunks::far_target, r.a[1]);
    ptx::st_shared_v4(to_b, r.b[0]);
    ptx::st_shared_v4(to_b + far_target_b, r.b[1]);
  }
};

// One elected lane of warp 0 asks the copy engine for the whole tile; `full` completes when all its bytes have landed.
template <BLayout B_LAYOUT>
__device__ __forceinline__ void tma_load(Stage& stage, unsigned long long& full, const Operand<Load::tma>& A,
                                         const Operand<Load::tma>& B, unsigned m0, unsigned n0, unsigned k0) {
  const unsigned barrier = ptx::shared_address(&full);
  const unsigned to_b = ptx::shared_address(stage.b);
  ptx::mbarrier_arrive_expect_tx(barrier, sizeof(Stage));
  ptx::cp_async_bulk_tensor_2d(ptx::shared_address(stage.a), &A.map, k0, m0, barrier);
  if constexpr (B_LAYOUT == BLayout::n_by_k) {
    ptx::cp_async_bulk_tensor_2d(to_b, &B.map, k0, n0, barrier);
  } else {
#pragma unroll
    for (int panel = 0; panel < BN / PANEL; ++panel)
      ptx::cp_async_bulk_tensor_2d(to_b + panel * PANEL_BYTES, &B.map, n0 + panel * PANEL, k0, barrier);
  }
}

__device__ __forceinline__ void wait_full(unsigned long long& full, unsigned parity) {
  while (!ptx::mbarrier_try_wait_parity(ptx::shared_address(&full), parity)) {
  }
}
