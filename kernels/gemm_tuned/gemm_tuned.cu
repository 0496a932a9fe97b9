// C[M][N] = A[M][K] * B[N][K]^T, bf16 in, fp32 accumulate, bf16 out: TMA, ldmatrix and mma.sync at one CTA per SM, and
// what the tile of experiment `gemm` leaves on the table. M, N and K are multiples of the tile: else the plan refuses.
#include "../gemm/load.cuh"
#include "../gemm/read.cuh"

constexpr int WARPS = WARPS_M * WARPS_N;                   // that multiply
constexpr int PRODUCER_WARPS = 4 * VARIANT_PRODUCER_WARP;  // registers move between whole warpgroups
constexpr unsigned HEAD_START = 2;              // K tiles that a skewed second half of the warps starts later
constexpr int STEPS = BK / 16;                  // mma steps in a K tile
constexpr int ROW_BYTES_C = WARP_N * 2;         // of a warp's part of C in shared memory
constexpr int PART_BYTES_C = 16 * ROW_BYTES_C;  // sixteen of its rows

static_assert(WARP_M == 64 && WARP_N == WARP_TILE_N, "the warp tile sets the tile: two by four warps");
static_assert(STEPS % 2 == 0, "the two sets of fragments take turns, so a K tile has an even number of steps");

// A place in the ring of stages; the parity of its barriers flips each time the ring comes round.
template <int STAGES>
struct Place {
  int stage = 0;
  unsigned parity = 0;

  __device__ __forceinline__ void advance() {
    if (++stage == STAGES) {
      stage = 0;
      parity ^= 1;
    }
  }
};

template <int STAGES, bool PRODUCER_WARP, bool STAGED_C>
struct alignas(1024) SharedTuned {
  Stage stage[STAGES];
  unsigned char c[STAGED_C ? WARPS * PART_BYTES_C : 0];
  unsigned long long full[STAGES];                       // a tile has landed
  unsigned long long empty[PRODUCER_WARP ? STAGES : 0];  // every warp has read it
};

// A[64][16] and B[16][WARP_N] of a warp, as mma.m16n8k16 takes them.
struct Fragments {
  ptx::u32 a[FRAGMENTS_M][4], b[FRAGMENTS_N][2];

  __device__ __forceinline__ void read(const Stage& stage, unsigned ks, unsigned row0, unsigned col0, unsigned lane) {
    const ptx::u32 a_tile = ptx::shared_address(stage.a), b_tile = ptx::shared_address(stage.b);
#pragma unroll
    for (int j = 0; j < FRAGMENTS_N; j += 2)
      read_b<Read::ldmatrix, BLayout::n_by_k, true>(b[j], b[j + 1], b_tile, col0 + 8 * j, ks, lane);
#pragma unroll
    for (int i = 0; i < FRAGMENTS_M; ++i) read_a<Read::ldmatrix, true>(a[i], a_tile, row0 + 16 * i, ks, lane);
  }

  // Something of what each ldmatrix read: who needs it waits for all of them.
  __device__ __forceinline__ ptx::u32 any() const {
    ptx::u32 bits = 0;
#pragma unroll
    for (int j = 0; j < FRAGMENTS_N; j += 2) bits |= b[j][0];
#pragma unroll
    for (int i = 0; i < FRAGMENTS_M; ++i) bits |= a[i][0];
    return bits;
  }

  // There and back along N, so that each mma shares a fragment with the one before it.
  __device__ __forceinline__ void multiply(Accumulator& acc) const {
#pragma unroll
    for (int i = 0; i < FRAGMENTS_M; ++i)
#pragma unroll
      for (int there = 0; there < FRAGMENTS_N; ++there) {
        const int j = i % 2 ? FRAGMENTS_N - 1 - there : there;
        mma_m16n8k16_bf16(acc[i][j], a[i], b[j]);
      }
  }
};

template <int STAGES, bool PRODUCER_WARP, bool DOUBLE_BUFFER, bool PERSISTENT, bool STAGED_C, bool SKEWED>
struct GemmTuned {
  static_assert(!DOUBLE_BUFFER || PRODUCER_WARP,
                "warp 0 would load a stage anew that the last step's ldmatrix still reads");
  static_assert(!PERSISTENT || PRODUCER_WARP,
                "a producer warp runs ahead into the next tile; without one nothing does");
  static_assert(!SKEWED || PRODUCER_WARP, "a block barrier for each K tile would pull the two halves together again");

  using Smem = SharedTuned<STAGES, PRODUCER_WARP, STAGED_C>;
  using Source = Operand<Load::tma>;

  Smem& shared;
  const Source &A, &B;
  ptx::u32* const C;
  const unsigned m, n, k;
  const unsigned lane = threadIdx.x % 32, warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0);
  const unsigned row0 = warp / WARPS_N * WARP_M, col0 = warp % WARPS_N * WARP_N;  // of this warp in the tile
  unsigned m0 = 0, n0 = 0;                                                        // of the tile in C
  Place<STAGES> at = {};

  __device__ __forceinline__ void run() {
    if (warp == 0 && ptx::elect_sync()) {
#pragma unroll
      for (int s = 0; s < STAGES; ++s) {
        ptx::mbarrier_init(ptx::shared_address(&shared.full[s]), 1);
        if constexpr (PRODUCER_WARP) ptx::mbarrier_init(ptx::shared_address(&shared.empty[s]), WARPS);
      }
      ptx::fence_mbarrier_init();
    }
    __syncthreads();

    if (PRODUCER_WARP && warp >= WARPS) {
      // A quarter of the SM's registers lies at each of its four schedulers: three warps there have 168 each by the
      // launch bound, which is too few for those that multiply. The producer's warpgroup gives its own away.
      ptx::setmaxnreg_dec<24>();
      if (warp == WARPS) for_each_tile([&](bool) { produce(); });
    } else {
      if constexpr (PRODUCER_WARP) ptx::setmaxnreg_inc<240>();
      await_head_start();
      for_each_tile([&](bool first) {
        Accumulator acc = {};
        consume(acc, first);
        if constexpr (STAGED_C)
          store_staged(acc);
        else
          store_direct(acc);
      });
    }
  }

  // The one tile of this CTA or, persistent, every gridDim-th.
  template <class Do>
  __device__ __forceinline__ void for_each_tile(Do run_tile) {
    for (unsigned tile = blockIdx.x; tile < m / BM * (n / BN); tile += gridDim.x) {
      place_tile(tile);
      run_tile(tile == blockIdx.x);
      if constexpr (!PERSISTENT) break;
    }
  }

  // Grouped raster: GROUP_M rows of tiles are walked column by column, so that CTAs in flight share A and B in L2.
  __device__ __forceinline__ void place_tile(unsigned tile) {
    const unsigned tiles_n = n / BN, first = tile / (GROUP_M * tiles_n) * GROUP_M;
    const unsigned height = min(m / BM - first, GROUP_M), within = tile % (GROUP_M * tiles_n);
    m0 = (first + within % height) * BM;
    n0 = within / height * BN;
  }

  __device__ __forceinline__ void load(int stage, unsigned t) {
    if (ptx::elect_sync()) tma_load<BLayout::n_by_k>(shared.stage[stage], shared.full[stage], A, B, m0, n0, t * BK);
  }

  // The producer warp: as far ahead as the ring allows, also into the next tile.
  __device__ __forceinline__ void produce() {
#pragma unroll 1
    for (unsigned t = 0; t < k / BK; ++t) {
      // A fresh barrier counts as one whose phase before the first is complete: the first round does not wait.
      wait_full(shared.empty[at.stage], at.parity ^ 1);
      load(at.stage, t);
      at.advance();
    }
  }

  // acc = this warp's part of the tile. With two sets of fragments, those of the next step are read while those of this
  // one are multiplied, also across the border of two K tiles.
  __device__ __forceinline__ void consume(Accumulator& acc, bool first) {
    const unsigned tiles = k / BK;
    if constexpr (!PRODUCER_WARP)
#pragma unroll
      for (int t = 0; t < STAGES - 1; ++t)
        if (t < tiles && warp == 0) load(t, t);

    if constexpr (!DOUBLE_BUFFER) {
#pragma unroll 1
      for (unsigned t = 0; t < tiles; ++t) {
        Fragments fragments;
        ptx::u32 read = 0;
        enter(t);
#pragma unroll
        for (int ks = 0; ks < STEPS; ++ks) {
          fragments.read(shared.stage[at.stage], ks, row0, col0, lane);
          if (ks >= STEPS - 2) read |= fragments.any();
          fragments.multiply(acc);
        }
        leave(at.stage, read);
        give_head_start(first, t);
        at.advance();
      }
    } else {
      Fragments fragments[2];
      enter(0);
      fragments[0].read(shared.stage[at.stage], 0, row0, col0, lane);
#pragma unroll 1
      for (unsigned t = 0; t < tiles; ++t) {
        ptx::u32 read = STEPS == 2 ? fragments[0].any() : 0;
#pragma unroll
        for (int ks = 0; ks + 1 < STEPS; ++ks) {
          fragments[(ks + 1) % 2].read(shared.stage[at.stage], ks + 1, row0, col0, lane);
          if (ks + 1 >= STEPS - 2) read |= fragments[(ks + 1) % 2].any();
          fragments[ks % 2].multiply(acc);
        }
        const int done = at.stage;
        at.advance();
        if (t + 1 < tiles) {
          enter(t + 1);
          fragments[0].read(shared.stage[at.stage], 0, row0, col0, lane);
        }
        fragments[1].multiply(acc);
        leave(done, read);
        give_head_start(first, t);
      }
    }
  }

  // K tile t has landed. Without a producer warp all have now left the stage of tile t - 1, and warp 0 loads it anew.
  __device__ __forceinline__ void enter(unsigned t) {
    wait_full(shared.full[at.stage], at.parity);
    if constexpr (!PRODUCER_WARP) {
      __syncthreads();
      if (t + STAGES - 1 < k / BK && warp == 0) load(at.stage == 0 ? STAGES - 1 : at.stage - 1, t + STAGES - 1);
    }
  }

  // This warp has read all that it wants of the stage: `read` has something of each read of its last two steps.
  //
  // The arrive has to wait for those reads, and nothing makes it: ptxas issues it behind ldmatrix without looking at
  // the scoreboard, and ldmatrix can be held up behind stores of C in the same queue while the arrive is not. The copy
  // engine then overwrites rows that are still to be read (seen on an H200, persistent and with C from fragments). So
  // the number of arrivals, always 1, is made to depend on them; they return in the order of their issue. To depend on
  // the last one alone is too little, since ptxas changes the order of reads, also of neighbouring steps (seen too). `k
  // >> 31` is 0, but ptxas cannot know. A fence.proxy.async in each thread would do; it costs 2 %.
  __device__ __forceinline__ void leave(int stage, ptx::u32 read) {
    if constexpr (PRODUCER_WARP) {
      __syncwarp();
      if (ptx::elect_sync()) ptx::mbarrier_arrive(ptx::shared_address(&shared.empty[stage]), 1 + (read & (k >> 31)));
    }
  }

  // Two warps share a scheduler and its tensor core. The second half of the warps begins HEAD_START K tiles later, and
  // so multiplies while the first half stores C, and the other way round; from then on they stay apart by themselves.
  __device__ __forceinline__ void await_head_start() {
    if (SKEWED && warp >= WARPS / 2) ptx::bar_sync(1, 32 * WARPS);
  }

  __device__ __forceinline__ void give_head_start(bool first, unsigned t) {
    if (SKEWED && first && warp < WARPS / 2 && t == min(HEAD_START, k / BK) - 1) ptx::bar_arrive(1, 32 * WARPS);
  }

  // Straight from the fragments: a quad of lanes writes 16 consecutive bytes of a row, half a sector.
  __device__ __forceinline__ void store_direct(const Accumulator& acc) {
    const unsigned row_pairs = n / 2;
    ptx::u32* row = C + static_cast<unsigned long long>(m0 + row0 + lane / 4) * row_pairs + (n0 + col0) / 2 + lane % 4;
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

  // Sixteen rows at a time through a part of shared memory that is this warp's own, so that no block barrier is needed:
  // stmatrix lays the fragments out as rows of whole sectors, and each lane then writes 16 consecutive bytes of one.
  __device__ __forceinline__ void store_staged(const Accumulator& acc) {
    constexpr int CHUNKS = ROW_BYTES_C / CHUNK, ROWS = 32 / CHUNKS;  // chunks of a row; rows that a warp writes at once
    const ptx::u32 part = ptx::shared_address(shared.c) + warp * PART_BYTES_C;
    unsigned char* target = reinterpret_cast<unsigned char*>(C) + lane % CHUNKS * CHUNK +
                            2 * (static_cast<unsigned long long>(m0 + row0 + lane / CHUNKS) * n + n0 + col0);
#pragma unroll
    for (int i = 0; i < FRAGMENTS_M; ++i) {
#pragma unroll
      for (int j = 0; j < FRAGMENTS_N; j += 2)
        ptx::stmatrix_x4(
            part + chunk_offset<ROW_BYTES_C, true>(lane % 16, j + lane / 16),
            {pack_bf16x2(acc[i][j][0], acc[i][j][1]), pack_bf16x2(acc[i][j][2], acc[i][j][3]),
             pack_bf16x2(acc[i][j + 1][0], acc[i][j + 1][1]), pack_bf16x2(acc[i][j + 1][2], acc[i][j + 1][3])});
      __syncwarp();
#pragma unroll
      for (int r = 0; r < 16; r += ROWS) {
        ptx::st_global_v4(target,
                          ptx::ld_shared_v4(part + chunk_offset<ROW_BYTES_C, true>(r + lane / CHUNKS, lane % CHUNKS)));
        target += 2ull * ROWS * n;
      }
      __syncwarp();
    }
  }
};

using Variant = GemmTuned<VARIANT_STAGES, bool(VARIANT_PRODUCER_WARP), bool(VARIANT_DOUBLE_BUFFER),
                          bool(VARIANT_PERSISTENT), bool(VARIANT_STAGED_C), bool(VARIANT_SKEW)>;

// grid = tiles of C, or as many CTAs as fit at once; block = 256 or with the producer's warpgroup 384 threads; dynamic
// shared memory >= sizeof(Variant::Smem); C is M x N row-major bf16.
extern "C" __global__ void __launch_bounds__(32 * (WARPS + PRODUCER_WARPS), CTAS_PER_SM)
    gemm_tuned(const __grid_constant__ Variant::Source a, const __grid_constant__ Variant::Source b, ptx::u32* c,
               unsigned m, unsigned n, unsigned k) {
  extern __shared__ __align__(1024) unsigned char bytes[];
  Variant{*reinterpret_cast<Variant::Smem*>(bytes), a, b, c, m, n, k}.run();
}
