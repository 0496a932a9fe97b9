// Names the variant's levels, checks that they go together, and lays out shared memory.
#pragma once

#include "../ptx.cuh"
#include "tile_order.cuh"

// The numbers come from the variant as -D macros, so that the host's plan and the kernel cannot disagree.
constexpr int BM = TILE_M, BN = TILE_N, BK = TILE_K;
constexpr int STAGES = VARIANT_STAGES;
constexpr bool PRODUCER = VARIANT_PRODUCER;
constexpr bool PERSISTENT = VARIANT_PERSISTENT;
constexpr bool PINGPONG = VARIANT_PINGPONG;
constexpr bool DEPENDENT = VARIANT_DEPENDENT;
constexpr bool K_BY_N = VARIANT_B_LAYOUT == 0;
constexpr Order ORDER = Order(VARIANT_ORDER);

constexpr int MULTIPLIERS = WARPGROUPS;  // warpgroups that multiply
constexpr int GROUP = 128, GROUP_WARPS = 4;
constexpr int THREADS = GROUP * (MULTIPLIERS + PRODUCER);
constexpr int ROWS = PINGPONG ? BM : BM / MULTIPLIERS;  // of C that a warpgroup multiplies
constexpr int ROW_BLOCKS = ROWS / 64;                   // wgmma takes 64 rows at a time
using Accumulator = float[ROW_BLOCKS][BN / 2];          // of a thread

constexpr bool STAGED_C = VARIANT_C_SLOTS > 0;
constexpr int C_SLOTS = STAGED_C ? VARIANT_C_SLOTS : 1;  // for each warpgroup that multiplies, of 64 x 64 elements
constexpr int COLUMN_PARTS = BN / 64, PARTS = ROW_BLOCKS * COLUMN_PARTS;  // of a warpgroup's tile, a slot each

// CTAs of a cluster take neighbouring tiles. Those that share the K of a tile are of the same cluster, or of several
// clusters and add up through L2.
constexpr unsigned CLUSTER_M = CLUSTER_TILES_M, CLUSTER_N = CLUSTER_TILES_N;
constexpr unsigned SPLIT = VARIANT_SPLIT_K;
constexpr bool SUMS_THROUGH_L2 = VARIANT_SUMS == 1;
constexpr bool SUMS_IN_CLUSTER = SPLIT > 1 && !SUMS_THROUGH_L2;
constexpr unsigned PLANE = CLUSTER_M * CLUSTER_N;  // CTAs of a cluster with the same share of K
constexpr unsigned CLUSTER = PLANE * (SUMS_IN_CLUSTER ? SPLIT : 1);
constexpr unsigned SHARERS = CLUSTER_M + CLUSTER_N - 1;  // CTAs of a cluster that load into this one, itself included
constexpr bool MULTICAST = PLANE > 1;

// CTAs that share the K of a tile share out its columns to add them up; the share of a CTA begins at `first_chunk`.
constexpr unsigned CHUNKS = BN / 8;  // of 8 columns
constexpr unsigned MOST_CHUNKS = (CHUNKS + SPLIT - 1) / SPLIT;
__device__ constexpr unsigned first_chunk(unsigned rank_k) { return rank_k * CHUNKS / SPLIT; }

static_assert(BK == 64, "a row of a K-major tile is the 128 bytes of one swizzled row");
static_assert(ROWS % 64 == 0 && ROWS >= 64, "wgmma multiplies 64 rows at a time");
static_assert(MULTIPLIERS <= 2, "the registers are shared out between a producer and two warpgroups");
static_assert(!PINGPONG || MULTIPLIERS == 2, "two warpgroups take turns");
static_assert(!PINGPONG || PERSISTENT, "warpgroups that take turns have more than one tile");
static_assert(PRODUCER || (!PERSISTENT && !PINGPONG && !MULTICAST),
              "only a producer runs ahead: into the next tile, for the other warpgroup, and for the other CTA");
static_assert(SPLIT == 1 || (!PERSISTENT && !STAGED_C),
              "sums of a split tile are received once, and go to C from the fragments");
static_assert(!SUMS_THROUGH_L2 || (SPLIT > 1 && CHUNKS % SPLIT == 0), "each CTA adds up as many columns as the others");
static_assert(BM / CLUSTER_N % 8 == 0 && BN / CLUSTER_M % (K_BY_N ? 64 : 8) == 0,
              "each CTA of a cluster loads whole swizzle patterns");

constexpr int A_BYTES = BM * BK * 2, B_BYTES = BN * BK * 2, C_SLOT_BYTES = 64 * 64 * 2;

struct alignas(1024) Stage {  // 1024 B: the period of the 128 B swizzle
  unsigned char a[A_BYTES], b[B_BYTES];
};

struct alignas(1024) Shared {
  Stage stage[STAGES];
  unsigned char c[MULTIPLIERS][C_SLOTS][STAGED_C ? C_SLOT_BYTES : 0];
  // What the other CTAs send of the columns that this one adds up.
  float4 sums[SUMS_IN_CLUSTER ? SPLIT - 1 : 0][MOST_CHUNKS][ROW_BLOCKS][MULTIPLIERS * GROUP];
  unsigned long long full[STAGES];               // a K tile has landed
  unsigned long long empty[STAGES];              // every warp that multiplies it has read it, in all CTAs that share it
  unsigned long long received[SUMS_IN_CLUSTER];  // the sums of the other CTAs have arrived
};

// A place in the ring of stages; the parity of its barriers flips each time the ring comes round.
struct Place {
  unsigned stage = 0, parity = 0;

  __device__ __forceinline__ void advance(unsigned by = 1) {
    stage += by;
    if (by == 1) {  // needs no division
      if (stage == STAGES) {
        stage = 0;
        parity ^= 1;
      }
    } else {
      parity ^= stage / STAGES & 1;
      stage %= STAGES;
    }
  }
};

// The first of two named barriers, one for each warpgroup; barrier 0 is __syncthreads.
enum Named : unsigned { TURN = 1, STORE = 3 };
