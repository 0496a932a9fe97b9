// C[M][N] = A[M][K] * B, bf16 in, fp32 accumulate, bf16 out: one body, five factors, one instantiation per binary.
//
// Every variant runs the same grid, the same raster, the same two CTAs per SM and the same epilogue; `if constexpr`
// stands only where a factor acts. M, N and K are multiples of 128, 128 and 32: the host's plan refuses others.
#include "load.cuh"
#include "read.cuh"

template <Load LOAD, Read READ, BLayout B_LAYOUT, int STAGES, bool SWIZZLED>
struct Gemm {
  static_assert(STAGES >= 1 && STAGES <= 4, "1 to 4 stages");
  static_assert(LOAD != Load::sync || STAGES <= 2, "load 0 has 1 or 2 stages: its second is a prefetch in registers");

  using Source = Operand<LOAD>;
  using Smem = Shared<LOAD, STAGES>;

  static __device__ __forceinline__ void run(const Source& A, const Source& B, ptx::u32* C, unsigned m, unsigned n,
                                             unsigned k) {
    extern __shared__ __align__(1024) unsigned char bytes[];
    Smem& shared = *reinterpret_cast<Smem*>(bytes);
    const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const unsigned row0 = warp / WARPS_N * WARP_M, col0 = warp % WARPS_N * WARP_N;
    unsigned m0, n0;
    tile_of(blockIdx.x, m / BM, n / BN, m0, n0);

    Accumulator acc = {};
    auto consume = [&](int stage) { multiply<READ, B_LAYOUT, SWIZZLED>(acc, shared.stage[stage], row0, col0, lane); };
    if constexpr (LOAD == Load::sync)
      loop_sync(shared, ChunkLoader<B_LAYOUT, SWIZZLED>(A.base, B.base, m0, n0, n, k), k / BK, consume);
    else if constexpr (LOAD == Load::cp_async)
      loop_cp_async(shared, ChunkLoader<B_LAYOUT, SWIZZLED>(A.base, B.base, m0, n0, n, k), k / BK, consume);
    else
      loop_tma(shared, A, B, m0, n0, k / BK, warp, consume);

    store(acc, C, m0 + row0, n0 + col0, n, lane);
  }

  // Grouped raster: GROUP_M rows of tiles are walked column by column, so that CTAs in flight share A and B in L2.
  static __device__ __forceinline__ void tile_of(unsigned block, unsigned tiles_m, unsigned tiles_n, unsigned& m0,
                                                 unsigned& n0) {
    const unsigned group = block / (GROUP_M * tiles_n), first = group * GROUP_M;
    const unsigned height = min(tiles_m - first, GROUP_M), within = block % (GROUP_M * tiles_n);
    m0 = (first + within % height) * BM;
    n0 = within / height * BN;
  }

  // One barrier after the stores (the tile is complete) and, with a single buffer, one after the reads (it may go).
  // With two buffers the next tile waits in registers while this one is multiplied, and is stored into the other
  // buffer, whose last readers passed the barrier of the round before.
  template <class Loader, class Consume>
  static __device__ __forceinline__ void loop_sync(Smem& shared, Loader loader, int tiles, Consume consume) {
    if constexpr (STAGES == 1) {
#pragma unroll 1
      for (int t = 0; t < tiles; ++t) {
        loader.st_shared(shared.stage[0], loader.ld_global());
        __syncthreads();
        consume(0);
        __syncthreads();
      }
    } else {
      loader.st_shared(shared.stage[0], loader.ld_global());
      __syncthreads();
#pragma unroll 1
      for (int t = 0; t + 1 < tiles; ++t) {
        const auto next = loader.ld_global();
        consume(t % 2);
        loader.st_shared(shared.stage[(t + 1) % 2], next);
        __syncthreads();
      }
      consume((tiles - 1) % 2);
    }
  }

  // STAGES - 1 tiles are under way while one is multiplied. One commit a round, empty ones at the end included, keeps
  // "all but the newest STAGES - 2 groups" equal to "tile t has landed"; the barrier then does two things: every
  // thread's part of tile t is visible, and everybody has left the stage of tile t - 1, which the next copy overwrites.
  template <class Loader, class Consume>
  static __device__ __forceinline__ void loop_cp_async(Smem& shared, Loader loader, int tiles, Consume consume) {
    if constexpr (STAGES == 1) {
#pragma unroll 1
      for (int t = 0; t < tiles; ++t) {
        loader.cp_async(shared.stage[0]);
        ptx::cp_async_commit_group();
        ptx::cp_async_wait_group<0>();
        __syncthreads();
        consume(0);
        __syncthreads();
      }
    } else {
#pragma unroll
      for (int t = 0; t < STAGES - 1; ++t) {
        if (t < tiles) loader.cp_async(shared.stage[t]);
        ptx::cp_async_commit_group();
      }
      int stage = 0, free = STAGES - 1;
#pragma unroll 1
      for (int t = 0; t < tiles; ++t) {
        ptx::cp_async_wait_group<STAGES - 2>();
        __syncthreads();
        if (t + STAGES - 1 < tiles) loader.cp_async(shared.stage[free]);
        ptx::cp_async_commit_group();
        consume(stage);
        stage = stage + 1 == STAGES ? 0 : stage + 1;
        free = free + 1 == STAGES ? 0 : free + 1;
      }
    }
  }

  // The same schedule with the copy engine: an mbarrier per stage tells that the tile has landed, the barrier that its
  // stage may be overwritten. The parity of a stage's wait flips each time the ring comes round.
  template <class Consume>
  static __device__ __forceinline__ void loop_tma(Smem& shared, const Source& A, const Source& B, unsigned m0,
                                                  unsigned n0, int tiles, unsigned warp, Consume consume) {
    // Warp 0 as a whole enters, one elected lane acts: the branch is uniform, so ptxas needs no loop over lanes.
    const bool producer = __shfl_sync(0xffffffff, warp, 0) == 0;
    auto load = [&](int stage, int t) {
      if (producer && ptx::elect_sync())
        tma_load<B_LAYOUT>(shared.stage[stage], shared.full[stage], A, B, m0, n0, t * BK);
    };
    if (producer && ptx::elect_sync()) {
#pragma unroll
      for (int s = 0; s < STAGES; ++s) ptx::mbarrier_init(ptx::shared_address(&shared.full[s]), 1);
      ptx::fence_mbarrier_init();
    }
    __syncthreads();
    if constexpr (STAGES == 1) {
#pragma unroll 1
      for (int t = 0; t < tiles; ++t) {
        load(0, t);
        wait_full(shared.full[0], t % 2);
        consume(0);
        __syncthreads();
      }
    } else {
#pragma unroll
      for (int t = 0; t < STAGES - 1; ++t)
        if (t < tiles) load(t, t);
      int stage = 0, free = STAGES - 1;
      unsigned parity = 0;
#pragma unroll 1
      for (int t = 0; t < tiles; ++t) {
        wait_full(shared.full[stage], parity);
        __syncthreads();
        if (t + STAGES - 1 < tiles) load(free, t + STAGES - 1);
        consume(stage);
        if (++stage == STAGES) {
          stage = 0;
          parity ^= 1;
        }
        free = free + 1 == STAGES ? 0 : free + 1;
      }
    }
  }

  // Straight from the fragments: a quad of lanes writes 16 consecutive bytes of a row.
  static __device__ __forceinline__ void store(const Accumulator& acc, ptx::u32* C, unsigned row0, unsigned col0,
                                               unsigned n, unsigned lane) {
    const unsigned row_pairs = n / 2;
    ptx::u32* row = C + static_cast<unsigned long long>(row0 + lane / 4) * row_pairs + col0 / 2 + lane % 4;
#pragma unroll
    for (int i = 0; i < FRAGMENTS_M; ++i)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int j = 0; j < FRAGMENTS_N; ++j)
          ptx::st_global_u32(row + 4 * j, pack_bf16x2(acc[i][j][2 * half], acc[i][j][2 * half + 1]));
        row += 8ull * row_pairs;
      }
  }
};

using Variant =
    Gemm<Load(VARIANT_LOAD), Read(VARIANT_READ), BLayout(VARIANT_B_LAYOUT), VARIANT_STAGES, bool(VARIANT_SWIZZLE)>;

// grid = M/128 * N/128, block = 256, dynamic shared memory >= sizeof(Variant::Smem); C is M x N row-major bf16.
extern "C" __global__ void __launch_bounds__(THREADS, CTAS_PER_SM)
    gemm(const __grid_constant__ Variant::Source a, const __grid_constant__ Variant::Source b, ptx::u32* c, unsigned m,
         unsigned n, unsigned k) {
  Variant::run(a, b, c, m, n, k);
}
