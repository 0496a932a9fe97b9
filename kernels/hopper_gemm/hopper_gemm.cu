// C[M][N] = A[M][K] * B, bf16 in, fp32 accumulate, bf16 out, by wgmma: A is M x K, B N x K or (B_LAYOUT 0) K x N, all
// row-major. Any M; N and K multiples of 8. The copy engine fills what hangs over an edge of A or B with zeros, and
// leaves out what hangs over an edge of C.
//
// A CTA computes a tile of C, and `MULTIPLIERS` warpgroups multiply it: together, or (ping-pong) a tile each in turns.
#include "../cluster.cuh"
#include "../copy_engine.cuh"
#include "../dependent_launch.cuh"
#include "../mma.cuh"
#include "../swizzle.cuh"
#include "../wgmma.cuh"
#include "config.cuh"
#include "sums.cuh"
#include "tile_order.cuh"

struct HopperGemm {
  Shared& shared;
  const ptx::TensorMap &a, &b, &c_map;
  ptx::u32* const c;
  const unsigned m, n, k;
  Workspace* const workspace;  // null where no sums go through L2

  const unsigned lane = threadIdx.x % 32, warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0);
  const unsigned group = warp / GROUP_WARPS;  // the last one loads, where there is a producer

  // This CTA's place in its cluster: its share of K, and its tile among those of the cluster.
  const unsigned rank = CLUSTER > 1 ? ptx::cluster_ctarank() : 0;
  const unsigned rank_k = SPLIT > 1 ? rank / PLANE + (SUMS_THROUGH_L2 ? blockIdx.x / PLANE % SPLIT : 0) : 0;
  const unsigned first_rank = SUMS_IN_CLUSTER ? rank_k * PLANE : 0;  // of the CTAs with this share
  const unsigned rank_m = MULTICAST ? rank % CLUSTER_M : 0;
  const unsigned rank_n = MULTICAST ? rank % PLANE / CLUSTER_M : 0;

  // The tiles of C, counted in clusters.
  const unsigned rows = (m + BM * CLUSTER_M - 1) / (BM * CLUSTER_M);
  const unsigned columns = (n + BN * CLUSTER_N - 1) / (BN * CLUSTER_N);
  const unsigned first_tile = blockIdx.x / (PLANE * SPLIT), tile_step = gridDim.x / (PLANE * SPLIT);

  unsigned m0 = 0, n0 = 0;            // of the tile in C
  unsigned first_k = 0, k_tiles = 0;  // of this CTA
  Place at = {};
  unsigned first_slot = 0;  // of C: the parts of a tile take the slots in turn, from one tile to the next

  __device__ __forceinline__ void run() {
    split_k();
    if (warp == 0 && ptx::elect_sync()) prepare();
    if constexpr (CLUSTER > 1)
      meet_cluster();
    else
      __syncthreads();
    // The launch ahead of this one in the stream may still run: nothing that it could write was read up to here.
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

  // Takes all K tiles, or this CTA's share of a split. A share may be empty; then its sums are zeros.
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

  // Initialises the barriers. One thread calls it, before anybody loads or waits.
  __device__ __forceinline__ void prepare() {
    ptx::prefetch_tensormap(&a);
    ptx::prefetch_tensormap(&b);
    if constexpr (STAGED_C) ptx::prefetch_tensormap(&c_map);
#pragma unroll
    for (int s = 0; s < STAGES; ++s) {
      ptx::mbarrier_init(ptx::shared_address(&shared.full[s]), 1);
      if constexpr (PRODUCER)
        ptx::mbarrier_init(ptx::shared_address(&shared.empty[s]), (PINGPONG ? 1 : MULTIPLIERS) * GROUP_WARPS * SHARERS);
    }
    if constexpr (SUMS_IN_CLUSTER) ThroughCluster::expect(shared, rank_k);
    ptx::fence_mbarrier_init();
  }

  // Waits for every thread of the cluster.
  __device__ __forceinline__ void meet_cluster() {
    ptx::barrier_cluster_arrive_relaxed();
    ptx::barrier_cluster_wait_acquire();
  }

  // Places the tile in C. The CTAs of a cluster take neighbouring tiles, below and beside each other.
  __device__ __forceinline__ void place(unsigned tile) {
    const TilePlace placed = place_tile<ORDER>(tile, rows, columns);
    m0 = (placed.row * CLUSTER_M + rank_m) * BM;
    n0 = (placed.column * CLUSTER_N + rank_n) * BN;
  }

  __device__ __forceinline__ void wait(const unsigned long long& barrier, unsigned parity) {
    while (!ptx::mbarrier_try_wait_parity(ptx::shared_address(&barrier), parity)) {
    }
  }

  // ---- loads --------------------------------------------------------------------------------------------------------

  // Loads K tile t. CTAs beside each other share their rows of A, those below each other their columns of B: each loads
  // a slice into all that share it.
  __device__ __forceinline__ void load(unsigned stage, unsigned t) {
    // A bit for the rank of each CTA that shares a slice: those beside each other are CLUSTER_M ranks apart.
    constexpr unsigned BELOW = (1 << CLUSTER_M) - 1, BESIDE = ((1 << PLANE) - 1) / BELOW;
    const ptx::u16 a_sharers = BESIDE << (first_rank + rank_m), b_sharers = BELOW << (first_rank + rank_n * CLUSTER_M);
    const unsigned full = ptx::shared_address(&shared.full[stage]), kk = (first_k + t) * BK;
    const unsigned to_a = ptx::shared_address(shared.stage[stage].a), to_b = ptx::shared_address(shared.stage[stage].b);
    ptx::mbarrier_arrive_expect_tx(full, A_BYTES + B_BYTES);
    load_a(to_a, kk, full, a_sharers);
    load_b(to_b, kk, full, b_sharers);
  }

  __device__ __forceinline__ void load_a(unsigned to, unsigned kk, unsigned full, ptx::u16 sharers) {
    constexpr unsigned SLICE = BM / CLUSTER_N;  // rows
    if constexpr (CLUSTER_N > 1) {
      ptx::cp_async_bulk_tensor_2d_multicast(to + rank_n * SLICE * BK * 2, &a, kk, m0 + rank_n * SLICE, full, sharers);
    } else {
      ptx::cp_async_bulk_tensor_2d(to, &a, kk, m0, full);
    }
  }

  __device__ __forceinline__ void load_b(unsigned to, unsigned kk, unsigned full, ptx::u16 sharers) {
    constexpr unsigned SLICE = BN / CLUSTER_M;  // columns
    to += rank_m * SLICE * BK * 2;
    const unsigned nn = n0 + rank_m * SLICE;
    if constexpr (K_BY_N) {  // a row of 128 bytes is 64 columns
#pragma unroll
      for (unsigned chunk = 0; chunk < SLICE / 64; ++chunk)
        load_box_of_b(to + chunk * 64 * BK * 2, nn + 64 * chunk, kk, full, sharers);
    } else {
      load_box_of_b(to, kk, nn, full, sharers);
    }
  }

  __device__ __forceinline__ void load_box_of_b(unsigned to, unsigned x, unsigned y, unsigned full, ptx::u16 sharers) {
    if constexpr (CLUSTER_M > 1) {
      ptx::cp_async_bulk_tensor_2d_multicast(to, &b, x, y, full, sharers);
    } else {
      ptx::cp_async_bulk_tensor_2d(to, &b, x, y, full);
    }
  }

  // Loads as far ahead as the ring allows, also into the next tile.
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
    // Warps of other CTAs arrive here once they have read what this CTA loaded into theirs, so it must not end before.
    if constexpr (MULTICAST) {
#pragma unroll 1
      for (unsigned s = 0; s < STAGES; ++s) {
        wait(shared.empty[at.stage], at.parity ^ 1);
        at.advance();
      }
    }
  }

  // ---- multiplication -----------------------------------------------------------------------------------------------

  __device__ __forceinline__ void multiply_and_store() {
    if constexpr (PINGPONG) {
      if (group == 1) {
        ptx::bar_arrive(TURN, 2 * GROUP);  // the first turn is the other's
        at.advance(k_tiles);
      }
    }
    const unsigned step = PINGPONG ? 2 * tile_step : tile_step;
    for (unsigned tile = first_tile + (PINGPONG ? group * tile_step : 0); tile < rows * columns; tile += step) {
      Accumulator acc;
      // The ring's barriers tell only odd rounds from even ones, so a warpgroup waits at them in its turn alone.
      if constexpr (PINGPONG) ptx::bar_sync(TURN + group, 2 * GROUP);
      multiply(acc, tile);
      store(acc);
      if constexpr (PINGPONG) at.advance(k_tiles);
      if constexpr (!PERSISTENT) break;
    }
    if constexpr (STAGED_C) {
      if (issues_stores()) ptx::cp_async_bulk_wait_group<0>();
      __syncwarp();
    }
  }

  // Computes this warpgroup's rows of the tile. One K tile is multiplied while the one before it is released.
  __device__ __forceinline__ void multiply(Accumulator& acc, unsigned tile) {
    constexpr int PENDING = STAGES > 1 ? 1 : 0;
    if constexpr (!PRODUCER) {
      place(tile);
      load_first();
    }
    if (SPLIT > 1 && k_tiles == 0) clear(acc);

    unsigned before = 0;
#pragma unroll 1
    for (unsigned t = 0; t < k_tiles; ++t) {
      wait(shared.full[at.stage], at.parity);
      ptx::wgmma_fence();
      issue(acc, at.stage, t > 0);
      ptx::wgmma_commit_group();
      ptx::wgmma_wait_group<PENDING>();
      // The K tile before this one, or with a single stage this one, has been read, and its stage may be loaded anew.
      if constexpr (PRODUCER) {
        if (PENDING == 0 || t > 0) release(PENDING == 0 ? at.stage : before);
      } else {
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
    if constexpr (PRODUCER) place(tile);  // for the store, while the last wgmma run
    ptx::wgmma_wait_group<0>();
    if (PRODUCER && PENDING > 0 && (SPLIT == 1 || k_tiles > 0)) release(before);  // an empty share has taken no stage
  }

  // Fills the stages where there is no producer: warp 0 loads, and loads each stage anew once it was read.
  __device__ __forceinline__ void load_first() {
    if (warp == 0 && ptx::elect_sync())
#pragma unroll
      for (unsigned t = 0; t < STAGES; ++t)
        if (t < k_tiles) load(t, t);
    __syncwarp();
  }

  __device__ __forceinline__ void clear(Accumulator& acc) {
#pragma unroll
    for (int i = 0; i < ROW_BLOCKS; ++i)
#pragma unroll
      for (int j = 0; j < BN / 2; ++j) acc[i][j] = 0;
  }

  // Issues the wgmma of one K tile, 16 of K at a time.
  __device__ __forceinline__ void issue(Accumulator& acc, unsigned stage, bool add) {
    const unsigned a_tile = ptx::shared_address(shared.stage[stage].a) + first_row() * BK * 2;
    const unsigned b_tile = ptx::shared_address(shared.stage[stage].b);
#pragma unroll
    for (int step = 0; step < BK / 16; ++step) {
      const ptx::u64 of_b = K_BY_N ? matrix_descriptor(b_tile + step * 16 * 128, 1024, 64 * BK * 2)
                                   : matrix_descriptor(b_tile + step * 32, 1024, 16);
#pragma unroll
      for (int i = 0; i < ROW_BLOCKS; ++i) {
        const ptx::u64 of_a = matrix_descriptor(a_tile + i * 64 * BK * 2 + step * 32, 1024, 16);
        ptx::wgmma_m64k16_bf16<BN, K_BY_N>(acc[i], of_a, of_b, add || step > 0);
      }
    }
  }

  // Says that this warp has read the stage: one lane tells each producer that loads into it, those below and above,
  // then those beside.
  __device__ __forceinline__ void release(unsigned stage) {
    const unsigned empty = ptx::shared_address(&shared.empty[stage]);
    if constexpr (MULTICAST) {
      const unsigned below = rank_n * CLUSTER_M + lane;
      const unsigned beside = (rank_n + 1 + lane - CLUSTER_M) % CLUSTER_N * CLUSTER_M + rank_m;
      if (lane < SHARERS)
        ptx::mbarrier_arrive_cluster(ptx::mapa(empty, first_rank + (lane < CLUSTER_M ? below : beside)), 1);
    } else {
      if (lane == 0) ptx::mbarrier_arrive(empty, 1);
    }
  }

  // ---- C ------------------------------------------------------------------------------------------------------------

  __device__ __forceinline__ void store(Accumulator& acc) {
    if constexpr (SUMS_THROUGH_L2)
      store_split(acc, through_l2());
    else if constexpr (SUMS_IN_CLUSTER)
      store_split(acc, ThroughCluster{shared, rank_k, rank - first_rank});
    else if constexpr (STAGED_C)
      store_staged(acc);
    else
      store_direct(acc, 0, CHUNKS);
  }

  __device__ __forceinline__ ThroughL2 through_l2() const {
    const unsigned tile = first_tile * PLANE + rank, tiles = gridDim.x / SPLIT;
    TileSums* sums = reinterpret_cast<TileSums*>(workspace + COUNTERS * tiles);
    return {workspace, tile, sums[tile], rank_k, lane, warp};
  }

  // Stores the columns that this CTA adds up. `to` is a constant in each pass, so the registers of a column are known.
  template <class Way>
  __device__ __forceinline__ void store_split(Accumulator& acc, const Way& way) {
    send_sums(acc, way);
    way.meet();
#pragma unroll
    for (unsigned to = 0; to < SPLIT; ++to)
      if (to == rank_k) {
        add_sums(acc, way, to);
        store_direct(acc, first_chunk(to), first_chunk(to + 1));
      }
  }

  // Stores chunks `first` to `end` straight from the fragments: a quad of lanes writes 16 consecutive bytes of a row,
  // half a sector.
  __device__ __forceinline__ void store_direct(const Accumulator& acc, unsigned first, unsigned end) {
    const unsigned row0 = m0 + first_row() + warp % GROUP_WARPS * 16 + lane / 4, column0 = n0 + lane % 4 * 2;
#pragma unroll
    for (int i = 0; i < ROW_BLOCKS; ++i)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const unsigned row = row0 + 64 * i + 8 * half;
        ptx::u32* target = c + (static_cast<unsigned long long>(row) * n + column0) / 2;
#pragma unroll
        for (unsigned j = first; j < end; ++j)
          if (row < m && column0 + 8 * j < n)
            ptx::st_global_u32(target + 4 * j, pack_bf16x2(acc[i][4 * j + 2 * half], acc[i][4 * j + 2 * half + 1]));
      }
  }

  // Returns the first of the tile's rows that this warpgroup multiplies.
  __device__ __forceinline__ unsigned first_row() const { return PINGPONG ? 0 : group * ROWS; }

  // Stores 64 x 64 elements at a time through slots of this warpgroup's own. The copy engine writes them while the next
  // ones are laid out, and while the next tile is multiplied. With a slot for each part of a tile the warpgroup meets
  // twice a tile, else twice for every `AT_ONCE` parts.
  __device__ __forceinline__ void store_staged(const Accumulator& acc) {
    constexpr int AT_ONCE = PARTS <= C_SLOTS ? PARTS : C_SLOTS > 2 ? 2 : 1;
    static_assert(PARTS % AT_ONCE == 0, "parts are laid out in whole groups");
#pragma unroll
    for (int first = 0; first < PARTS; first += AT_ONCE) {
      // The last stores from these slots have left shared memory.
      if (issues_stores()) ptx::cp_async_bulk_wait_group_read<C_SLOTS - AT_ONCE>();
      ptx::bar_sync(STORE + group, GROUP);
#pragma unroll
      for (int part = first; part < first + AT_ONCE; ++part) lay_out(acc, part);
      ptx::fence_proxy_async_shared();
      ptx::bar_sync(STORE + group, GROUP);
      if (issues_stores()) {
#pragma unroll
        for (int part = first; part < first + AT_ONCE; ++part) {
          ptx::cp_async_bulk_tensor_2d_store(&c_map, n0 + 64 * (part % COLUMN_PARTS),
                                             m0 + first_row() + 64 * (part / COLUMN_PARTS), slot_of(part));
          ptx::cp_async_bulk_commit_group();
        }
      }
    }
    first_slot = (first_slot + PARTS) % C_SLOTS;
  }

  // One thread of the warpgroup issues its stores and waits for them: elect.sync chooses the same lane each time.
  __device__ __forceinline__ bool issues_stores() const { return warp % GROUP_WARPS == 0 && ptx::elect_sync(); }

  // Writes this warp's fragments of a part as rows under the copy engine's swizzle.
  __device__ __forceinline__ void lay_out(const Accumulator& acc, int part) {
    const unsigned row = slot_of(part) + warp % GROUP_WARPS * 16 * 128;
#pragma unroll
    for (int j = 0; j < 8; j += 2) {
      const float* d = &acc[part / COLUMN_PARTS][32 * (part % COLUMN_PARTS) + 4 * j];
      ptx::stmatrix_x4(
          row + chunk_offset<128, true>(lane % 16, j + lane / 16),
          {pack_bf16x2(d[0], d[1]), pack_bf16x2(d[2], d[3]), pack_bf16x2(d[4], d[5]), pack_bf16x2(d[6], d[7])});
    }
  }

  // Returns where a part lies. A tile of whole rounds of the slots has each part in the same slot each time.
  __device__ __forceinline__ unsigned slot_of(int part) const {
    return ptx::shared_address(shared.c[group][PARTS % C_SLOTS == 0 ? part % C_SLOTS : (first_slot + part) % C_SLOTS]);
  }
};

// grid = the tiles of C times the CTAs that share one, or as many CTAs as fit at once, in whole clusters; block =
// THREADS; dynamic shared memory >= sizeof(Shared); C is M x N row-major bf16. Only sums through L2 take a workspace.
#if VARIANT_SUMS == 0
extern "C" __global__ void __launch_bounds__(THREADS, CTAS_PER_SM)
    hopper_gemm(const __grid_constant__ ptx::TensorMap a, const __grid_constant__ ptx::TensorMap b,
                const __grid_constant__ ptx::TensorMap c_map, ptx::u32* c, unsigned m, unsigned n, unsigned k) {
  extern __shared__ __align__(1024) unsigned char bytes[];
  HopperGemm{*reinterpret_cast<Shared*>(bytes), a, b, c_map, c, m, n, k, nullptr}.run();
}
#else
extern "C" __global__ void __launch_bounds__(THREADS, CTAS_PER_SM)
    hopper_gemm(const __grid_constant__ ptx::TensorMap a, const __grid_constant__ ptx::TensorMap b,
                const __grid_constant__ ptx::TensorMap c_map, ptx::u32* c, unsigned m, unsigned n, unsigned k,
                Workspace* workspace) {
  extern __shared__ __align__(1024) unsigned char bytes[];
  HopperGemm{*reinterpret_cast<Shared*>(bytes), a, b, c_map, c, m, n, k, workspace}.run();
}
#endif
