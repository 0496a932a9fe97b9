// How CTAs that share the K of a tile add up what each has of it.
//
// Each CTA adds up some of the tile's columns. It sends the others its sums of theirs, and adds what they send to its
// own, over the CTAs in their order, so that the result has the same bits each time. There are two ways to send:
// `ThroughCluster` writes to the shared memory of CTAs of the same cluster, and `ThroughL2` to global memory, which
// stays in L2 as long as it fits.
#pragma once

#include "../cluster.cuh"
#include "../gpu_scope.cuh"
#include "config.cuh"

// Returns where CTA `to` keeps what CTA `from` sends it. It sends itself nothing, so there are SPLIT - 1 places.
__device__ __forceinline__ unsigned slot(unsigned from, unsigned to) { return from < to ? from : from - 1; }

struct ThroughCluster {
  Shared& shared;
  const unsigned rank_k;
  const unsigned same_place;  // of this CTA among those with its share of K

  __device__ __forceinline__ unsigned received() const { return ptx::shared_address(shared.received); }

  __device__ __forceinline__ unsigned place(unsigned from, unsigned to, unsigned chunk, int block) const {
    return ptx::shared_address(&shared.sums[slot(from, to)][chunk][block][threadIdx.x]);
  }

  // Announces the bytes that the other CTAs will send. One thread calls it, before the cluster first meets.
  __device__ __forceinline__ static void expect(Shared& shared, unsigned rank_k) {
    const unsigned received = ptx::shared_address(shared.received);
    ptx::mbarrier_init(received, 1);
    ptx::mbarrier_arrive_expect_tx(
        received, (first_chunk(rank_k + 1) - first_chunk(rank_k)) * (SPLIT - 1) * sizeof shared.sums[0][0]);
  }

  __device__ __forceinline__ void send(unsigned to, unsigned chunk, int block, const float* sums) const {
    const unsigned here = place(rank_k, to, chunk, block), receiver = to * PLANE + same_place;
    ptx::st_async_v4(ptx::mapa(here, receiver), sums[0], sums[1], sums[2], sums[3], ptx::mapa(received(), receiver));
  }

  // Waits for the others' sums. No CTA ends before it has received, so all that is sent to it finds it there.
  __device__ __forceinline__ void meet() const {
    while (!ptx::mbarrier_try_wait_parity<ptx::WholeCluster>(received(), 0)) {
    }
  }

  __device__ __forceinline__ uint4 receive(unsigned from, unsigned to, unsigned chunk, int block) const {
    return ptx::ld_shared_v4(place(from, to, chunk, block));
  }
};

// What the CTAs of one tile send each other: for CTA, from CTA.
using TileSums = float4[SPLIT][SPLIT - 1][MOST_CHUNKS][ROW_BLOCKS][MULTIPLIERS * GROUP];

// Global memory of the launch's own: 32 counters for each tile, one for each warp, and behind all of them the sums of
// each tile. The counters are zeros before the first launch; after each launch they all have the same highest bit and
// no other. Launches that run at the same time must not share it.
using Workspace = ptx::u32;
constexpr unsigned COUNTERS = 32;

struct ThroughL2 {
  Workspace* const workspace;
  const unsigned tile;
  TileSums& sums;  // of the tile
  const unsigned rank_k, lane, warp;

  __device__ __forceinline__ void send(unsigned to, unsigned chunk, int block, const float* own) const {
    ptx::st_global_v4_f32(&sums[to][slot(rank_k, to)][chunk][block][threadIdx.x], own[0], own[1], own[2], own[3]);
  }

  // Waits for the warps of this warp's number: it exchanges sums with no others.
  __device__ __forceinline__ void meet() const {
    __syncwarp();
    if (lane == 0) meet_warps(&workspace[COUNTERS * tile + warp]);
    __syncwarp();
  }

  // Returns when one thread of each of SPLIT warps has called it, and what they wrote before is visible. The arrivals
  // of a round add up to the highest bit, as in the grid barrier of CUDA's cooperative groups, so nobody has to reset
  // the counter. The wait ends although nothing makes the other CTAs run: CTAs start in the order of their indices, and
  // those of a tile are consecutive.
  __device__ __forceinline__ void meet_warps(ptx::u32* arrived) const {
    constexpr ptx::u32 ROUND = 1u << 31;
    const ptx::u32 before = ptx::atom_add_release_gpu(arrived, rank_k == 0 ? ROUND - (SPLIT - 1) : 1);
    while (((before ^ ptx::ld_acquire_gpu(arrived)) & ROUND) == 0) {
    }
  }

  __device__ __forceinline__ uint4 receive(unsigned from, unsigned to, unsigned chunk, int block) const {
    return ptx::ld_global_v4(&sums[to][slot(from, to)][chunk][block][threadIdx.x]);
  }
};

// Returns the first of a thread's four values in chunk number `chunk` of the columns that CTA `rank_k` adds up.
__device__ __forceinline__ float* values_of(Accumulator& acc, int block, unsigned rank_k, unsigned chunk) {
  return &acc[block][4 * (first_chunk(rank_k) + chunk)];
}

// Sends the other CTAs what this one has of their columns, to each in turn, so that none is sent more than the others
// at a time.
template <class Way>
__device__ __forceinline__ void send_sums(Accumulator& acc, const Way& way) {
#pragma unroll
  for (unsigned chunk = 0; chunk < MOST_CHUNKS; ++chunk)
#pragma unroll
    for (unsigned to = 0; to < SPLIT; ++to)
      if (first_chunk(to) + chunk < first_chunk(to + 1) && to != way.rank_k)
#pragma unroll
        for (int block = 0; block < ROW_BLOCKS; ++block) way.send(to, chunk, block, values_of(acc, block, to, chunk));
}

// Adds up the columns of CTA `to`, which is this one.
template <class Way>
__device__ __forceinline__ void add_sums(Accumulator& acc, const Way& way, unsigned to) {
#pragma unroll
  for (unsigned chunk = 0; chunk < first_chunk(to + 1) - first_chunk(to); ++chunk)
#pragma unroll
    for (int block = 0; block < ROW_BLOCKS; ++block) {
      float* own = values_of(acc, block, to, chunk);
      float sum[4] = {};
#pragma unroll
      for (unsigned from = 0; from < SPLIT; ++from) {
        const uint4 sent = from == to ? uint4{} : way.receive(from, to, chunk, block);
        sum[0] += from == to ? own[0] : __uint_as_float(sent.x);
        sum[1] += from == to ? own[1] : __uint_as_float(sent.y);
        sum[2] += from == to ? own[2] : __uint_as_float(sent.z);
        sum[3] += from == to ? own[3] : __uint_as_float(sent.w);
      }
#pragma unroll
      for (int v = 0; v < 4; ++v) own[v] = sum[v];
    }
}
