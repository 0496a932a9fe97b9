// C[M][N] = A[M][K] * B, bf16 in, fp32 accumulate, bf16 out, by wgmma: A is M x K, B N x K or (B_LAYOUT 0) K x N, all
// row-major. Any M; N and K multiples of 8. What hangs over an edge of A, B or C is the copy engine's to fill with zeros and to
// leave out.
//
// A tile of C is a CTA's work, and `MULTIPLIERS` warpgroups multiply: together, or (ping-pong) each a whole tile, in turns.
#include "../cluster.cuh"
#include "../copy_engine.cuh"
#include "../mma.cuh"
#include "../swizzle.cuh"
#include "../wgmma.cuh"
#include "sums_through_l2.cuh"
#include "tile_order.cuh"

constexpr int BM = TILE_M, BN = TILE_N, BK = TILE_K;
constexpr int MULTIPLIERS = WARPGROUPS, GROUP = 128, GROUP_WARPS = 4;
constexpr int STAGES = VARIANT_STAGES;
constexpr bool PRODUCER = VARIANT_PRODUCER, PERSISTENT = VARIANT_PERSISTENT, PINGPONG = VARIANT_PINGPONG;
constexpr bool STAGED_C = VARIANT_C_SLOTS > 0, DEPENDENT = VARIANT_DEPENDENT, K_BY_N = VARIANT_B_LAYOUT == 0;
constexpr int C_SLOTS = STAGED_C ? VARIANT_C_SLOTS : 1;  // of 64 x 64 elements, for each warpgroup that multiplies
constexpr unsigned CLUSTER_M = CLUSTER_TILES_M, CLUSTER_N = CLUSTER_TILES_N;  // tiles of a cluster
constexpr unsigned SPLIT = VARIANT_SPLIT_K % 100;  // CTAs that share the K of a tile, of a cluster or (THROUGH_L2) of several
constexpr unsigned PLANE = CLUSTER_M * CLUSTER_N;  // CTAs of a cluster that have the same share of K
constexpr bool THROUGH_L2 = VARIANT_SPLIT_K > 100, MULTICAST = PLANE > 1;
constexpr unsigned CLUSTER = PLANE * (THROUGH_L2 ? 1 : SPLIT);
constexpr unsigned SHARERS = CLUSTER_M + CLUSTER_N - 1;  // CTAs of a cluster that load into this one, itself among them
constexpr Order ORDER = Order(VARIANT_ORDER);

constexpr int ROWS = PINGPONG ? BM : BM / MULTIPLIERS;  // of C that a warpgroup multiplies
constexpr int ROW_BLOCKS = ROWS / 64;                   // wgmma takes 64 at a time
constexpr int COLUMN_CHUNKS = BN / 64;
constexpr int A_BYTES = BM * BK * 2, B_BYTES = BN * BK * 2, C_SLOT_BYTES = 64 * 64 * 2;

// Where CTAs share the K of a tile, each adds up some chunks of 8 columns of it: those from `first_chunk` of its rank on.
constexpr unsigned CHUNKS = BN / 8, MOST_CHUNKS = (CHUNKS + SPLIT - 1) / SPLIT;
__device__ constexpr unsigned first_chunk(unsigned rank_k) { return rank_k * CHUNKS / SPLIT; }
using Sums = TileSums<SPLIT, MOST_CHUNKS, ROW_BLOCKS, MULTIPLIERS * GROUP>;
static_assert(BK == 64, "a row of a K-major tile is the 128 bytes of one swizzled row");
static_assert(ROWS % 64 == 0 && ROWS >= 64, "wgmma multiplies 64 rows at a time");
static_assert(MULTIPLIERS <= 2, "the registers are shared out between a producer and two warpgroups");
static_assert(!PINGPONG || MULTIPLIERS == 2, "two warpgroups take turns");
static_assert(PRODUCER || (!PERSISTENT && !PINGPONG && !MULTICAST),
              "only a producer runs ahead: into the next tile, for the other warpgroup, and for the other CTA");
static_assert(PERSISTENT || !PINGPONG, "warpgroups that take turns have more than one tile");
static_assert(SPLIT == 1 || (!PERSISTENT && !STAGED_C), "sums of a split tile are received once, and go to C from the fragments");
static_assert(BM / CLUSTER_N % 8 == 0 && BN / CLUSTER_M % (K_BY_N ? 64 : 8) == 0,
              "each CTA of a cluster loads whole swizzle patterns");

// A place in the ring of stages; the parity of its barriers flips each time the ring comes round.
struct Place {
  unsigned stage = 0, parity = 0;

  __device__ __forceinline__ void advance(unsigned by = 1) {
    stage += by;
    if (by == 1) {
      if (stage == STAGES) stage = 0, parity ^= 1;
    } else {
      parity ^= stage / STAGES & 1, stage %= STAGES;
    }
  }
};

struct alignas(1024) Stage {
  unsigned char a[A_BYTES], b[B_BYTES];
};

struct alignas(1024) Shared {
  Stage stage[STAGES];
  unsigned char c[MULTIPLIERS][C_SLOTS][STAGED_C ? C_SLOT_BYTES : 0];
  float4 sums[THROUGH_L2 ? 0 : SPLIT - 1][MOST_CHUNKS][ROW_BLOCKS][MULTIPLIERS * GROUP];  // of the other CTAs, by thread
  unsigned long long full[STAGES];   // a K tile has landed
  unsigned long long empty[STAGES];  // every warp that multiplies it has read it, here and in the CTAs that share it
  unsigned long long received[SPLIT > 1 && !THROUGH_L2];  // the sums of the other CTAs are here
};

// Named barriers: 0 is __syncthreads.
enum Named : unsigned { TURN = 1, STORE = 3 };

struct HopperGemm {
  Shared& shared;
  const ptx::TensorMap &a, &b, &c_map;
  ptx::u32* const c;
  const unsigned m, n, k; Workspace* const workspace = nullptr;
  const unsigned lane = threadIdx.x % 32, warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0);
  const unsigned group = warp / GROUP_WARPS;  // the last one loads, where there is a producer
  const unsigned rank = CLUSTER > 1 ? ptx::cluster_ctarank() : 0;
  const unsigned rank_k = SPLIT > 1 ? rank / PLANE + THROUGH_L2 * (blockIdx.x / PLANE % SPLIT) : 0, first_rank = THROUGH_L2 ? 0 : rank_k * PLANE;
  const unsigned rank_m = MULTICAST ? rank % CLUSTER_M : 0, rank_n = MULTICAST ? rank % PLANE / CLUSTER_M : 0;
  const unsigned rows = (m + BM * CLUSTER_M - 1) / (BM * CLUSTER_M), columns = (n + BN * CLUSTER_N - 1) / (BN * CLUSTER_N);
  const unsigned first_tile = blockIdx.x / (PLANE * SPLIT), tile_step = gridDim.x / (PLANE * SPLIT);
  unsigned m0 = 0, n0 = 0;             // of the tile in C
  unsigned first_k = 0, k_tiles = 0;   // of this CTA
  Place at = {};
  unsigned first_slot = 0;  // of C, where a tile's parts are no whole number of rounds of them

  __device__ __forceinline__ void run() {
    split_k();
    if (warp == 0 && ptx::elect_sync()) {
      ptx::prefetch_tensormap(&a);
      ptx::prefetch_tensormap(&b);
      if constexpr (STAGED_C) ptx::prefetch_tensormap(&c_map);
#pragma unroll
      for (int s = 0; s < STAGES; ++s) {
        ptx::mbarrier_init(ptx::shared_address(&shared.full[s]), 1);
        if constexpr (PRODUCER)
          ptx::mbarrier_init(ptx::shared_address(&shared.empty[s]),
                             (PINGPONG ? 1 : MULTIPLIERS) * GROUP_WARPS * SHARERS);
      }
      if constexpr (SPLIT > 1 && !THROUGH_L2) {
        const unsigned received = ptx::shared_address(shared.received);
        ptx::mbarrier_init(received, 1);
        ptx::mbarrier_arrive_expect_tx(received, (first_chunk(rank_k + 1) - first_chunk(rank_k)) * (SPLIT - 1) *
                                                     sizeof shared.sums[0][0]);
      }
      ptx::fence_mbarrier_init();
    }
    if constexpr (CLUSTER > 1)
      meet_cluster();
    else
      __syncthreads();
    // The launch before this one in the stream may still run: up to here nothing was read that it could write.
    if constexpr (DEPENDENT) {
      ptx::griddepcontrol_wait();
      ptx::griddepcontrol_launch_dependents();
    }

    if (PRODUCER && group == MULTIPLIERS) {
      if constexpr (MULTIPLIERS > 1) ptx::setmaxnreg_dec<24>();
      if (warp == MULTIPLIERS * GROUP_WARPS && ptx::elect_sync()) produce();
      __syncwarp();
    } else {
      if constexpr (PRODUCER && MULTIPLIERS > 1) ptx::setmaxnreg_inc<240>();
      multiply_and_store();
    }
  }

  // Every thread of the cluster.
  __device__ __forceinline__ void meet_cluster() {
    ptx::barrier_cluster_arrive_relaxed();
    ptx::barrier_cluster_wait_acquire();
  }

  // The K tiles of this CTA: all, or its share of a split. A share may be empty; then its sums are zeros.
  __device__ __forceinline__ void split_k() {
    const unsigned all = (k + BK - 1) / BK;
    if constexpr (SPLIT == 1) {
      k_tiles = all;
    } else {
      const unsigned share = (all + SPLIT - 1) / SPLIT;
      first_k = min(rank_k * share, all);
      k_tiles = min(share, all - first_k);
    }
  }

  // The CTAs of a cluster take neighbouring tiles, below and beside each other.
  __device__ __forceinline__ void place(unsigned tile) {
    const TilePlace placed = place_tile<ORDER>(tile, rows, columns);
    m0 = (placed.row * CLUSTER_M + rank_m) * BM;
    n0 = (placed.column * CLUSTER_N + rank_n) * BN;
  }

  // ---- loads -----------------------------------------------------------------------------------------------------------

  // K tile t. CTAs beside each other share their rows of A, those below each other their columns of B: each loads a slice of it
  // into all that share it.
  __device__ __forceinline__ void load(unsigned stage, unsigned t) {
    constexpr unsigned EVERY_M = (1 << CLUSTER_M) - 1, EVERY_N = ((1 << PLANE) - 1) / EVERY_M;  // a bit in CLUSTER_M
    const ptx::u16 a_sharers = EVERY_N << (first_rank + rank_m), b_sharers = EVERY_M << (first_rank + rank_n * CLUSTER_M);
    constexpr unsigned A_ROWS = BM / CLUSTER_N, B_ROWS = BN / CLUSTER_M;  // of a slice
    const unsigned full = ptx::shared_address(&shared.full[stage]), kk = (first_k + t) * BK;
    const unsigned to_a = ptx::shared_address(shared.stage[stage].a), to_b = ptx::shared_address(shared.stage[stage].b);
    ptx::mbarrier_arrive_expect_tx(full, A_BYTES + B_BYTES);
    if constexpr (CLUSTER_N > 1)
      ptx::cp_async_bulk_tensor_2d_multicast(to_a + rank_n * A_ROWS * BK * 2, &a, kk, m0 + rank_n * A_ROWS, full, a_sharers);
    else
      ptx::cp_async_bulk_tensor_2d(to_a, &a, kk, m0, full);
    const unsigned to = to_b + rank_m * B_ROWS * BK * 2, nn = n0 + rank_m * B_ROWS;
    if constexpr (!K_BY_N) {
      if constexpr (CLUSTER_M > 1)
        ptx::cp_async_bulk_tensor_2d_multicast(to, &b, kk, nn, full, b_sharers);
      else
        ptx::cp_async_bulk_tensor_2d(to, &b, kk, nn, full);
    } else {  // 64 columns of N are a row of 128 bytes
#pragma unroll
      for (unsigned chunk = 0; chunk < B_ROWS / 64; ++chunk)
        if constexpr (CLUSTER_M > 1)
          ptx::cp_async_bulk_tensor_2d_multicast(to + chunk * 64 * BK * 2, &b, nn + 64 * chunk, kk, full, b_sharers);
        else
          ptx::cp_async_bulk_tensor_2d(to + chunk * 64 * BK * 2, &b, nn + 64 * chunk, kk, full);
    }
  }

  // The producer: as far ahead as the ring allows, also into the next tile.
  __device__ __forceinline__ void produce() {
    for (unsigned tile = first_tile; tile < rows * columns; tile += tile_step) {
      place(tile);
#pragma unroll 1
      for (unsigned t = 0; t < k_tiles; ++t) {
        // A fresh barrier counts as one whose phase before the first is complete: the first round does not wait.
        wait(shared.empty[at.stage], at.parity ^ 1);
        load(at.stage, t);
        at.advance();
      }
      if constexpr (!PERSISTENT) break;
    }
    // The warps of other CTAs arrive here when they have read what this one loaded into them: until then this CTA must not end.
    if constexpr (MULTICAST) {
#pragma unroll 1
      for (unsigned s = 0; s < STAGES; ++s) {
        wait(shared.empty[at.stage], at.parity ^ 1);
        at.advance();
      }
    }
  }

  __device__ __forceinline__ void wait(const unsigned long long& barrier, unsigned parity) {
    while (!ptx::mbarrier_try_wait_parity(ptx::shared_address(&barrier), parity)) {
    }
  }

  // ---- multiplication --------------------------------------------------------------------------------------------------

  __device__ __forceinline__ void multiply_and_store() {
    if constexpr (PINGPONG) {
      if (group == 1) {
        ptx::bar_arrive(TURN, 2 * GROUP);  // the first turn is the other's
        at.advance(k_tiles);
      }
    }
    const unsigned step = PINGPONG ? 2 * tile_step : tile_step;
    for (unsigned tile = first_tile + (PINGPONG ? group * tile_step : 0); tile < rows * columns; tile += step) {
      float acc[ROW_BLOCKS][BN / 2];
      // The barriers of the ring tell odd rounds from even ones and no more: a warpgroup waits at them in its turn alone.
      if constexpr (PINGPONG) ptx::bar_sync(TURN + group, 2 * GROUP);
      multiply(acc, tile);
      if constexpr (THROUGH_L2) store_through_l2(acc); else if constexpr (SPLIT > 1)
        store_split(acc);
      else if constexpr (STAGED_C)
        store_staged(acc);
      else
        store_direct(acc);
      if constexpr (PINGPONG) at.advance(k_tiles);
      if constexpr (!PERSISTENT) break;
    }
    if constexpr (STAGED_C) {
      if (issues_stores()) ptx::cp_async_bulk_wait_group<0>();
      __syncwarp();
    }
  }

  // acc = this warpgroup's rows of the tile. One K tile is multiplied while the one before it is made free.
  __device__ __forceinline__ void multiply(float (&acc)[ROW_BLOCKS][BN / 2], unsigned tile) {
    constexpr int PENDING = STAGES > 1 ? 1 : 0;
    if constexpr (!PRODUCER) {
      place(tile);
      if (warp == 0 && ptx::elect_sync())
#pragma unroll
        for (unsigned t = 0; t < STAGES; ++t)
          if (t < k_tiles) load(t, t);
      __syncwarp();
    }
    if (SPLIT > 1 && k_tiles == 0) {
#pragma unroll
      for (int i = 0; i < ROW_BLOCKS; ++i)
#pragma unroll
        for (int j = 0; j < BN / 2; ++j) acc[i][j] = 0;
    }

    unsigned before = 0;
#pragma unroll 1
    for (unsigned t = 0; t < k_tiles; ++t) {
      wait(shared.full[at.stage], at.parity);
      ptx::wgmma_fence();
      issue(acc, at.stage, t > 0);
      ptx::wgmma_commit_group();
      ptx::wgmma_wait_group<PENDING>();
      if constexpr (PRODUCER) {
        if (PENDING == 0 || t > 0) release(PENDING == 0 ? at.stage : before);
      } else {
        // Everybody is done with the K tile before this one, or with a single stage with this one: its place is loaded anew.
        __syncthreads();
        const unsigned done = t - PENDING;
        if ((PENDING == 0 || t > 0) && done + STAGES < k_tiles && warp == 0) {
          if (ptx::elect_sync()) load(PENDING == 0 ? at.stage : before, done + STAGES);
          __syncwarp();
        }
      }
      before = at.stage;
      at.advance();
    }
    if constexpr (PINGPONG) {
      if (tile + tile_step < rows * columns) ptx::bar_arrive(TURN + (group ^ 1), 2 * GROUP);
    }
    if constexpr (PRODUCER) place(tile);  // of the store: while the last wgmma run
    ptx::wgmma_wait_group<0>();
    if (PRODUCER && PENDING > 0 && (SPLIT == 1 || k_tiles > 0)) release(before);  // a share may be empty
  }

  // The wgmma of one K tile: 16 of K at a time.
  __device__ __forceinline__ void issue(float (&acc)[ROW_BLOCKS][BN / 2], unsigned stage, bool add) {
    const unsigned a_tile = ptx::shared_address(shared.stage[stage].a) + (PINGPONG ? 0 : group * ROWS * BK * 2);
    const unsigned b_tile = ptx::shared_address(shared.stage[stage].b);
#pragma unroll
    for (int step = 0; step < BK / 16; ++step) {
      const ptx::u64 of_b = K_BY_N ? matrix_descriptor(b_tile + step * 16 * 128, 1024, 64 * BK * 2)
                                   : matrix_descriptor(b_tile + step * 32, 1024, 16);
#pragma unroll
      for (int i = 0; i < ROW_BLOCKS; ++i)
        ptx::wgmma_m64k16_bf16<BN, K_BY_N>(acc[i], matrix_descriptor(a_tile + i * 64 * BK * 2 + step * 32, 1024, 16), of_b,
                                           add || step > 0);
    }
  }

  // This warp has read the stage. One lane tells each producer that loads into it: those below and above, then those beside.
  __device__ __forceinline__ void release(unsigned stage) {
    const unsigned empty = ptx::shared_address(&shared.empty[stage]);
    if constexpr (MULTICAST) {
      const unsigned below = rank_n * CLUSTER_M + lane, beside = (rank_n + 1 + lane - CLUSTER_M) % CLUSTER_N * CLUSTER_M + rank_m;
      if (lane < SHARERS) ptx::mbarrier_arrive_cluster(ptx::mapa(empty, first_rank + (lane < CLUSTER_M ? below : beside)), 1);
    } else {
      if (lane == 0) ptx::mbarrier_arrive(empty, 1);
    }
  }

  // ---- C ---------------------------------------------------------------------------------------------------------------

  // Straight from the fragments: a quad of lanes writes 16 consecutive bytes of a row, half a sector.
  __device__ __forceinline__ void store_direct(const float (&acc)[ROW_BLOCKS][BN / 2], unsigned first = 0, unsigned last = BN / 8) {
    const unsigned row0 = m0 + first_row() + warp % GROUP_WARPS * 16 + lane / 4, column0 = n0 + lane % 4 * 2;
#pragma unroll
    for (int i = 0; i < ROW_BLOCKS; ++i)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const unsigned row = row0 + 64 * i + 8 * half;
        ptx::u32* target = c + (static_cast<unsigned long long>(row) * n + column0) / 2;
#pragma unroll
        for (unsigned j = first; j < last; ++j)
          if (row < m && column0 + 8 * j < n)
            ptx::st_global_u32(target + 4 * j, pack_bf16x2(acc[i][4 * j + 2 * half], acc[i][4 * j + 2 * half + 1]));
      }
  }

  __device__ __forceinline__ unsigned first_row() const { return PINGPONG ? 0 : group * ROWS; }

  // One thread of the warpgroup issues its stores and waits for them: elect.sync chooses the same lane each time.
  __device__ __forceinline__ bool issues_stores() const { return warp % GROUP_WARPS == 0 && ptx::elect_sync(); }

  // 64 x 64 at a time through slots of this warpgroup's own: stmatrix lays the fragments out as rows under the copy engine's
  // swizzle, and the engine writes them while the next ones are laid out, and while the next tile is multiplied. With a slot for
  // each part of a tile the warpgroup meets twice a tile, else twice for every `AT_ONCE` parts.
  __device__ __forceinline__ void store_staged(const float (&acc)[ROW_BLOCKS][BN / 2]) {
    constexpr int PARTS = ROW_BLOCKS * COLUMN_CHUNKS, AT_ONCE = PARTS <= C_SLOTS ? PARTS : C_SLOTS > 2 ? 2 : 1;
    static_assert(PARTS % AT_ONCE == 0, "parts are laid out in whole groups");
#pragma unroll
    for (int first = 0; first < PARTS; first += AT_ONCE) {
      if (issues_stores()) ptx::cp_async_bulk_wait_group_read<C_SLOTS - AT_ONCE>();  // the last stores of these slots have left
      ptx::bar_sync(STORE + group, GROUP);
#pragma unroll
      for (int part = first; part < first + AT_ONCE; ++part) {
        const unsigned row = slot_of(part, PARTS) + warp % GROUP_WARPS * 16 * 128;
#pragma unroll
        for (int j = 0; j < 8; j += 2) {
          const float* d = &acc[part / COLUMN_CHUNKS][32 * (part % COLUMN_CHUNKS) + 4 * j];
          ptx::stmatrix_x4(row + chunk_offset<128, true>(lane % 16, j + lane / 16),
                           {pack_bf16x2(d[0], d[1]), pack_bf16x2(d[2], d[3]), pack_bf16x2(d[4], d[5]), pack_bf16x2(d[6], d[7])});
        }
      }
      ptx::fence_proxy_async_shared();
      ptx::bar_sync(STORE + group, GROUP);
      if (issues_stores()) {
#pragma unroll
        for (int part = first; part < first + AT_ONCE; ++part) {
          ptx::cp_async_bulk_tensor_2d_store(&c_map, n0 + 64 * (part % COLUMN_CHUNKS), m0 + first_row() + 64 * (part / COLUMN_CHUNKS),
                                             slot_of(part, PARTS));
          ptx::cp_async_bulk_commit_group();
        }
      }
    }
    first_slot = (first_slot + PARTS) % C_SLOTS;
  }

  // Parts take the slots in turn, from one tile to the next.
  __device__ __forceinline__ unsigned slot_of(int part, int parts) const {
    return ptx::shared_address(shared.c[group][parts % C_SLOTS == 0 ? part % C_SLOTS : (first_slot + part) % C_SLOTS]);
  }

  // The CTAs of the cluster have a share of K each. Each sends the others what they add up, straight from its registers, and adds
  // what they send to its own, over the CTAs in their order, so that the result is the same each time. None ends before it has
  // received, so that all that is sent to it finds it there.
  __device__ __forceinline__ void store_split(float (&acc)[ROW_BLOCKS][BN / 2]) {
    const unsigned same_place = rank - first_rank, received = ptx::shared_address(shared.received);
#pragma unroll
    for (unsigned chunk = 0; chunk < MOST_CHUNKS; ++chunk)  // to each CTA in turn: none is sent more than others at a time
#pragma unroll
      for (unsigned to = 0; to < SPLIT; ++to)
        if (first_chunk(to) + chunk < first_chunk(to + 1) && to != rank_k)
#pragma unroll
          for (int i = 0; i < ROW_BLOCKS; ++i) {
            const float* sums = &acc[i][4 * (first_chunk(to) + chunk)];
            const unsigned place = ptx::shared_address(&shared.sums[slot(rank_k, to)][chunk][i][threadIdx.x]);
            ptx::st_async_v4(ptx::mapa(place, to * PLANE + same_place), sums[0], sums[1], sums[2], sums[3],
                             ptx::mapa(received, to * PLANE + same_place));
          }
    while (!ptx::mbarrier_try_wait_parity_cluster(received, 0)) {
    }
#pragma unroll
    for (unsigned to = 0; to < SPLIT; ++to)
      if (to == rank_k) {
#pragma unroll
        for (unsigned chunk = 0; chunk < first_chunk(to + 1) - first_chunk(to); ++chunk)
#pragma unroll
          for (int i = 0; i < ROW_BLOCKS; ++i) {
            float* own = &acc[i][4 * (first_chunk(to) + chunk)];
            float sum[4] = {};
#pragma unroll
            for (unsigned of = 0; of < SPLIT; ++of) {
              const uint4 sent = of == to ? uint4{} : ptx::ld_shared_v4(ptx::shared_address(&shared.sums[slot(of, to)][chunk][i][threadIdx.x]));
              sum[0] += of == to ? own[0] : __uint_as_float(sent.x), sum[1] += of == to ? own[1] : __uint_as_float(sent.y);
              sum[2] += of == to ? own[2] : __uint_as_float(sent.z), sum[3] += of == to ? own[3] : __uint_as_float(sent.w);
            }
#pragma unroll
            for (int v = 0; v < 4; ++v) own[v] = sum[v];
          }
        store_direct(acc, first_chunk(to), first_chunk(to + 1));
      }
  }
  __device__ __forceinline__ void store_through_l2(float (&acc)[ROW_BLOCKS][BN / 2]);  // below
  // Where CTA `to` receives what the CTA with share `of` of K sends it: it sends itself nothing.
  __device__ __forceinline__ static unsigned slot(unsigned of, unsigned to) { return of < to ? of : of - 1; }
};

// grid = the tiles of C, or as many CTAs as fit at once, each time the CTAs of a cluster; block = 128 threads for each
// warpgroup that multiplies and for the producer; dynamic shared memory >= sizeof(Shared); C is M x N row-major bf16.
extern "C" __global__ void __launch_bounds__(GROUP * (MULTIPLIERS + PRODUCER), CTAS_PER_SM)
    hopper_gemm(const __grid_constant__ ptx::TensorMap a, const __grid_constant__ ptx::TensorMap b,
                const __grid_constant__ ptx::TensorMap c_map, ptx::u32* c, unsigned m, unsigned n, unsigned k WORKSPACE_PARAMETER) {
  extern __shared__ __align__(1024) unsigned char bytes[];
  HopperGemm{*reinterpret_cast<Shared*>(bytes), a, b, c_map, c, m, n, k WORKSPACE_ARGUMENT}.run();
}

// As store_split, but for the way that the sums take.
static_assert(!THROUGH_L2 || CHUNKS % SPLIT == 0, "each CTA adds up as many columns as the others");
__device__ __forceinline__ void HopperGemm::store_through_l2(float (&acc)[ROW_BLOCKS][BN / 2]) {
  const unsigned tile = first_tile * PLANE + rank, tiles = gridDim.x / SPLIT;
  auto& sums = reinterpret_cast<Sums*>(workspace + COUNTERS * tiles)[tile].sums;
#pragma unroll
  for (unsigned chunk = 0; chunk < MOST_CHUNKS; ++chunk)
#pragma unroll
    for (unsigned to = 0; to < SPLIT; ++to)
      if (to != rank_k)
#pragma unroll
        for (int i = 0; i < ROW_BLOCKS; ++i) {
          const float* own = &acc[i][4 * (first_chunk(to) + chunk)];
          ptx::st_global_v4_f32(&sums[to][slot(rank_k, to)][chunk][i][threadIdx.x], own[0], own[1], own[2], own[3]);
        }
  __syncwarp();
  if (lane == 0) meet_through_l2(&workspace[COUNTERS * tile + warp], rank_k == 0, SPLIT);
  __syncwarp();
#pragma unroll
  for (unsigned to = 0; to < SPLIT; ++to)
    if (to == rank_k) {
#pragma unroll
      for (unsigned chunk = 0; chunk < MOST_CHUNKS; ++chunk)
#pragma unroll
        for (int i = 0; i < ROW_BLOCKS; ++i) {
          float* own = &acc[i][4 * (first_chunk(to) + chunk)];
          float sum[4] = {};
#pragma unroll
          for (unsigned of = 0; of < SPLIT; ++of) {
            const uint4 sent = of == to ? uint4{} : ptx::ld_global_v4(&sums[to][slot(of, to)][chunk][i][threadIdx.x]);
            sum[0] += of == to ? own[0] : __uint_as_float(sent.x), sum[1] += of == to ? own[1] : __uint_as_float(sent.y);
            sum[2] += of == to ? own[2] : __uint_as_float(sent.z), sum[3] += of == to ? own[3] : __uint_as_float(sent.w);
          }
#pragma unroll
          for (int v = 0; v < 4; ++v) own[v] = sum[v];
        }
      store_direct(acc, first_chunk(to), first_chunk(to + 1));
    }
}
#undef WORKSPACE_PARAMETER
#undef WORKSPACE_ARGUMENT
