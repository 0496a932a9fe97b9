// C[M][N] = A[M][K] * B[N][K]^T, bf16 in, fp32 accumulate, bf16 out: TMA, ldmatrix and mma.sync at one CTA per SM, and
// what the tile of experiment `gemm` leaves on the table. M, N and K are multiples of the tile: the plan refuses others.
#include "../gemm/load.cuh"
#include "../gemm/read.cuh"

constexpr int WARPS = WARPS_M * WARPS_N;          // that multiply
constexpr int PRODUCER_WARPS = 4 * VARIANT_PRODUCER_WARP;  // registers move between whole warpgroups
constexpr unsigned HEAD_START = 2;                // K tiles that a skewed second half of the warps starts later
constexpr int STEPS = BK / 16;                    // mma steps in a K tile
constexpr int ROW_BYTES_C = WARP_N * 2;           // of a warp's part of C in shared memory
constexpr int PART_BYTES_C = 16 * ROW_BYTES_C;    // sixteen of its rows

static_assert(WARP_M == 64 && WARP_N == WARP_TILE_N, "the warp tile sets the tile: two by four warps");
static_assert(STEPS % 2 == 0, "the two fragment buffers take turns, so a K tile has an even number of steps");

// A place in the ring of stages; the parity of its barriers flips each time the ring comes round.
template <int STAGES>
struct Place {
  int stage = 0;
  unsigned parity = 0;

  __device__ __forceinline__ void advance() {
    if (++stage == STAGES) stage = 0, parity ^= 1;
  }
};

template <int STAGES, bool PRODUCER_WARP, bool STAGED_C>
struct alignas(1024) SharedTuned {
  Stage stage[STAGES];
  unsigned char c[STAGED_C ? WARPS * PART_BYTES_C : 0];
  unsigned long long full[STAGES];                       // a tile has landed
  unsigned long long empty[PRODUCER_WARP ? STAGES : 0];  // every warp has read it
};

struct Fragments {
  ptx::u32 a[FRAGMENTS_M][4], b[FRAGMENTS_N][2];
};

template <int STAGES, bool PRODUCER_WARP, bool DOUBLE_BUFFER, bool PERSISTENT, bool STAGED_C, bool SKEWED>
struct GemmTuned {
  static_assert(!DOUBLE_BUFFER || PRODUCER_WARP, "warp 0 would load a stage anew that the last step's ldmatrix still reads");
  static_assert(!PERSISTENT || PRODUCER_WARP, "a producer warp runs ahead into the next tile; without one nothing does");

  using Smem = SharedTuned<STAGES, PRODUCER_WARP, STAGED_C>;
  using Source = Operand<Load::tma>;

  static __device__ __forceinline__ void run(const Source& A, const Source& B, ptx::u32* C, unsigned m, unsigned n, unsigned k) {
    extern __shared__ __align__(1024) unsigned char bytes[];
    Smem& shared = *reinterpret_cast<Smem*>(bytes);
    const unsigned lane = threadIdx.x % 32, warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0);
    const unsigned tiles_m = m / BM, tiles_n = n / BN, tiles = tiles_m * tiles_n, tiles_k = k / BK;

    if (warp == 0 && ptx::elect_sync()) {
#pragma unroll
      for (int s = 0; s < STAGES; ++s) {
        ptx::mbarrier_init(ptx::shared_address(&shared.full[s]), 1);
        if constexpr (PRODUCER_WARP) ptx::mbarrier_init(ptx::shared_address(&shared.empty[s]), WARPS);
      }
      ptx::fence_mbarrier_init();
    }
    __syncthreads();

    Place<STAGES> at;
    if (PRODUCER_WARP && warp >= WARPS) {
      // A quarter of the SM's registers lies at each of its four schedulers: three warps there have 168 each by the launch
      // bound, which is too few for those that multiply. The producer's warpgroup gives its own away.
      ptx::setmaxnreg_dec<24>();
      if (warp > WARPS) return;
      for (unsigned tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        unsigned m0, n0;
        tile_of(tile, tiles_m, tiles_n, m0, n0);
#pragma unroll 1
        for (unsigned t = 0; t < tiles_k; ++t) {
          // A fresh barrier counts as one whose phase before the first is complete: the first round does not wait.
          wait(shared.empty[at.stage], at.parity ^ 1);
          if (ptx::elect_sync()) tma_load<BLayout::n_by_k>(shared.stage[at.stage], shared.full[at.stage], A, B, m0, n0, t * BK);
          at.advance();
        }
        if constexpr (!PERSISTENT) break;
      }
      return;
    }

    if constexpr (PRODUCER_WARP) ptx::setmaxnreg_inc<240>();
    const unsigned row0 = warp / WARPS_N * WARP_M, col0 = warp % WARPS_N * WARP_N;
    await_head_start(warp);
    for (unsigned tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
      unsigned m0, n0;
      tile_of(tile, tiles_m, tiles_n, m0, n0);
      Accumulator acc = {};
      loop(acc, shared, at, A, B, m0, n0, k, row0, col0, lane, warp, tile == blockIdx.x);
      if constexpr (STAGED_C)
        store_staged(acc, shared.c + warp * PART_BYTES_C, C, m0 + row0, n0 + col0, n, lane);
      else
        store_direct(acc, C, m0 + row0, n0 + col0, n, lane);
      if constexpr (!PERSISTENT) break;
    }
  }

  // Without a producer warp, warp 0 asks for tile t + STAGES - 1 once everybody has left the stage that it goes to.
  static __device__ __forceinline__ void ahead(Smem& shared, const Source& A, const Source& B, unsigned m0, unsigned n0,
                                               unsigned t, unsigned tiles_k, int stage, unsigned warp) {
    if (t < tiles_k && warp == 0 && ptx::elect_sync())
      tma_load<BLayout::n_by_k>(shared.stage[stage], shared.full[stage], A, B, m0, n0, t * BK);
  }

  static __device__ __forceinline__ void prologue(Smem& shared, const Source& A, const Source& B, unsigned m0, unsigned n0,
                                                  unsigned tiles_k, unsigned warp) {
    if constexpr (!PRODUCER_WARP)
#pragma unroll
      for (int t = 0; t < STAGES - 1; ++t) ahead(shared, A, B, m0, n0, t, tiles_k, t, warp);
  }

  // Tile t has landed and, without a producer warp, everybody has left the stage of tile t - 1, which is loaded anew.
  static __device__ __forceinline__ void enter(Smem& shared, Place<STAGES> at, const Source& A, const Source& B, unsigned m0,
                                               unsigned n0, unsigned t, unsigned tiles_k, unsigned warp) {
    wait(shared.full[at.stage], at.parity);
    if constexpr (!PRODUCER_WARP) {
      __syncthreads();
      ahead(shared, A, B, m0, n0, t + STAGES - 1, tiles_k, at.stage == 0 ? STAGES - 1 : at.stage - 1, warp);
    }
  }

  // This warp has read all that it wants of the stage: `last` are the fragments that it read last.
  //
  // The arrive has to wait for those reads, and nothing makes it: ptxas issues it behind ldmatrix without looking at the
  // scoreboard, and ldmatrix can be held up behind stores of C in the same queue while the arrive is not. The copy engine
  // then overwrote rows that were still to be read (seen on an H200). So the number of arrivals, always 1, is made to
  // depend on a register of each read: `zero` is 0, but ptxas cannot know. A fence.proxy.async would do too; it costs 2 %.
  static __device__ __forceinline__ void leave(Smem& shared, Place<STAGES> at, const Fragments& last, unsigned zero) {
    if constexpr (PRODUCER_WARP) {
      ptx::u32 any = 0;
#pragma unroll
      for (int i = 0; i < FRAGMENTS_M; ++i) any |= last.a[i][3];
#pragma unroll
      for (int j = 1; j < FRAGMENTS_N; j += 2) any |= last.b[j][1];
      __syncwarp();
      if (ptx::elect_sync()) ptx::mbarrier_arrive(ptx::shared_address(&shared.empty[at.stage]), 1 + (any & zero));
    }
  }

  // Two warps share a scheduler and its tensor core. The second half of the warps begins HEAD_START K tiles later, and so
  // multiplies while the first half stores C, and the other way round; from then on they stay apart by themselves.
  static __device__ __forceinline__ void await_head_start(unsigned warp) {
    if (SKEWED && warp >= WARPS / 2) ptx::bar_sync(1, 32 * WARPS);
  }

  static __device__ __forceinline__ void give_head_start(unsigned warp, bool first, unsigned t, unsigned tiles_k) {
    if (SKEWED && first && warp < WARPS / 2 && t == min(HEAD_START, tiles_k) - 1) ptx::bar_arrive(1, 32 * WARPS);
  }

  // One set of fragments, or two: then those of the next step are read while those of this one are multiplied, also across
  // the border of two K tiles.
  static __device__ __forceinline__ void loop(Accumulator& acc, Smem& shared, Place<STAGES>& at, const Source& A,
                                              const Source& B, unsigned m0, unsigned n0, unsigned k, unsigned row0,
                                              unsigned col0, unsigned lane, unsigned warp, bool first) {
    const unsigned tiles_k = k / BK, zero = k >> 31;
    prologue(shared, A, B, m0, n0, tiles_k, warp);
    if constexpr (!DOUBLE_BUFFER) {
#pragma unroll 1
      for (unsigned t = 0; t < tiles_k; ++t) {
        Fragments fragments;
        enter(shared, at, A, B, m0, n0, t, tiles_k, warp);
#pragma unroll
        for (int ks = 0; ks < STEPS; ++ks) {
          read(fragments, shared.stage[at.stage], ks, row0, col0, lane);
          multiply(acc, fragments);
        }
        leave(shared, at, fragments, zero);
        give_head_start(warp, first, t, tiles_k);
        at.advance();
      }
    } else {
      Fragments fragments[2];
      enter(shared, at, A, B, m0, n0, 0, tiles_k, warp);
      read(fragments[0], shared.stage[at.stage], 0, row0, col0, lane);
#pragma unroll 1
      for (unsigned t = 0; t < tiles_k; ++t) {
#pragma unroll
        for (int ks = 0; ks < STEPS; ++ks) {
          if (ks + 1 < STEPS) {
            read(fragments[(ks + 1) % 2], shared.stage[at.stage], ks + 1, row0, col0, lane);
          } else {
            leave(shared, at, fragments[ks % 2], zero);
            give_head_start(warp, first, t, tiles_k);
            at.advance();
            if (t + 1 < tiles_k) {
              enter(shared, at, A, B, m0, n0, t + 1, tiles_k, warp);
              read(fragments[0], shared.stage[at.stage], 0, row0, col0, lane);
            }
          }
          multiply(acc, fragments[ks % 2]);
        }
      }
    }
  }

  static __device__ __forceinline__ void read(Fragments& f, const Stage& stage, unsigned ks, unsigned row0, unsigned col0,
                                              unsigned lane) {
    const ptx::u32 a_tile = ptx::shared_address(stage.a), b_tile = ptx::shared_address(stage.b);
#pragma unroll
    for (int j = 0; j < FRAGMENTS_N; j += 2)
      read_b<Read::ldmatrix, BLayout::n_by_k, true>(f.b[j], f.b[j + 1], b_tile, col0 + 8 * j, ks, lane);
#pragma unroll
    for (int i = 0; i < FRAGMENTS_M; ++i) read_a<Read::ldmatrix, true>(f.a[i], a_tile, row0 + 16 * i, ks, lane);
  }

  static __device__ __forceinline__ void multiply(Accumulator& acc, const Fragments& f) {
#pragma unroll
    for (int i = 0; i < FRAGMENTS_M; ++i)
#pragma unroll
      for (int j = 0; j < FRAGMENTS_N; ++j) mma_m16n8k16_bf16(acc[i][j], f.a[i], f.b[j]);
  }

  // Straight from the fragments: a quad of lanes writes 16 consecutive bytes of a row, half a sector.
  static __device__ __forceinline__ void store_direct(const Accumulator& acc, ptx::u32* C, unsigned row0, unsigned col0,
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

  // Sixteen rows at a time through a part of shared memory that is this warp's own, so that no block barrier is needed:
  // stmatrix lays the fragments out as rows, and each lane then writes 16 consecutive bytes of one, a row being whole sectors.
  static __device__ __forceinline__ void store_staged(const Accumulator& acc, unsigned char* part, ptx::u32* C, unsigned row0,
                                                      unsigned col0, unsigned n, unsigned lane) {
    constexpr int CHUNKS = ROW_BYTES_C / CHUNK, ROWS = 32 / CHUNKS;  // chunks of a row; rows that a warp writes at once
    const ptx::u32 tile = ptx::shared_address(part);
    unsigned char* target = reinterpret_cast<unsigned char*>(C) +
                            2 * (static_cast<unsigned long long>(row0 + lane / CHUNKS) * n + col0) + lane % CHUNKS * CHUNK;
#pragma unroll
    for (int i = 0; i < FRAGMENTS_M; ++i) {
#pragma unroll
      for (int j = 0; j < FRAGMENTS_N; j += 2)
        ptx::stmatrix_x4(tile + chunk_offset<ROW_BYTES_C, true>(lane % 16, j + lane / 16),
                         {pack_bf16x2(acc[i][j][0], acc[i][j][1]), pack_bf16x2(acc[i][j][2], acc[i][j][3]),
                          pack_bf16x2(acc[i][j + 1][0], acc[i][j + 1][1]), pack_bf16x2(acc[i][j + 1][2], acc[i][j + 1][3])});
      __syncwarp();
#pragma unroll
      for (int r = 0; r < 16; r += ROWS) {
        ptx::st_global_v4(target, ptx::ld_shared_v4(tile + chunk_offset<ROW_BYTES_C, true>(r + lane / CHUNKS, lane % CHUNKS)));
        target += 2ull * ROWS * n;
      }
      __syncwarp();
    }
  }

  // Grouped raster: GROUP_M rows of tiles are walked column by column, so that CTAs in flight share A and B in L2.
  static __device__ __forceinline__ void tile_of(unsigned block, unsigned tiles_m, unsigned tiles_n, unsigned& m0,
                                                 unsigned& n0) {
    const unsigned group = block / (GROUP_M * tiles_n), first = group * GROUP_M;
    const unsigned height = min(tiles_m - first, GROUP_M), within = block % (GROUP_M * tiles_n);
    m0 = (first + within % height) * BM;
    n0 = within / height * BN;
  }

  static __device__ __forceinline__ void wait(unsigned long long& barrier, unsigned parity) { wait_full(barrier, parity); }
};

using Variant = GemmTuned<VARIANT_STAGES, bool(VARIANT_PRODUCER_WARP), bool(VARIANT_DOUBLE_BUFFER), bool(VARIANT_PERSISTENT),
                          bool(VARIANT_STAGED_C), bool(VARIANT_SKEW)>;

// grid = tiles of C, or as many CTAs as fit at once; block = 256 or with the producer's warpgroup 384 threads; dynamic shared
// memory >= sizeof(Variant::Smem); C is M x N row-major bf16.
extern "C" __global__ void __launch_bounds__(32 * (WARPS + PRODUCER_WARPS), CTAS_PER_SM)
    gemm_tuned(const __grid_constant__ Variant::Source a, const __grid_constant__ Variant::Source b, ptx::u32* c, unsigned m,
               unsigned n, unsigned k) {
  Variant::run(a, b, c, m, n, k);
}
