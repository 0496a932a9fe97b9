// How a tile of the payload gets into a stage of shared memory: `Fill<LOAD>`, specialised for each level of `load`.
//
// The loop in copy_intensity.cu calls the same functions of each:
//   start(walk)          before the loop: the barriers, and the first STAGES - 1 tiles on their way
//   enter(walk, first)   this CTA's next tile is in stage `at` for every thread; a stage that all left is filled anew
//   read(values, walk)   the thread's part of the tile, from the stage into registers
//   leave(values, walk)  this thread has read the stage
#pragma once

#include "../copy_engine.cuh"

enum class Load { direct, sync_4, sync_16, cp_async, pipeline, memcpy_async, bulk, tensor };

constexpr Load LOAD = Load(VARIANT_LOAD);
constexpr int STAGES = VARIANT_STAGES;
constexpr bool PRODUCER_WARP = VARIANT_PRODUCER;
constexpr bool COPY_ENGINE = LOAD == Load::bulk || LOAD == Load::tensor;

constexpr int CHUNK = 16;  // bytes that a thread reads and writes at once
constexpr int CHUNKS = TILE_BYTES / CHUNK;
constexpr int READERS = CHUNKS < BLOCK_THREADS ? CHUNKS : BLOCK_THREADS;  // threads that have chunks of a tile
constexpr int PER_THREAD = CHUNKS / READERS;
constexpr int WARPS = BLOCK_THREADS / 32;  // that work on the tiles
constexpr int BOX_ROW_BYTES = 128;         // of the tensor map's box: 32 floats

static_assert(TILE_BYTES % CHUNK == 0, "a tile is whole chunks of 16 bytes");
static_assert(CHUNKS % READERS == 0, "a tile of more chunks than threads gives each thread as many");
static_assert(LOAD != Load::sync_4 || TILE_BYTES % (4 * BLOCK_THREADS) == 0,
              "each thread loads as many words of a tile");
static_assert((LOAD != Load::direct && LOAD != Load::sync_4) || STAGES == 1, "nothing is loaded ahead");
static_assert(LOAD != Load::sync_16 || STAGES <= 2, "registers hold one tile ahead, no more");
static_assert(LOAD != Load::memcpy_async || STAGES == 1, "one barrier, waited for at once");
static_assert(LOAD != Load::pipeline || STAGES > 1, "a pipeline of one stage would copy and wait");
static_assert(LOAD != Load::tensor || (TILE_BYTES % BOX_ROW_BYTES == 0 && TILE_BYTES / BOX_ROW_BYTES <= 256),
              "a box has 1 to 256 whole rows");
static_assert(COPY_ENGINE || !PRODUCER_WARP,
              "one thread issues for the whole tile only where the copy engine does the rest");
static_assert(STAGES > 1 || !PRODUCER_WARP, "a producer warp runs ahead, so it needs a second stage");
static_assert(16 * STAGES <= CONTROL_BYTES, "each stage has two mbarriers");

// What a thread holds of a tile: chunks that lie READERS apart, so that a warp's accesses are contiguous.
using Values = float4[PER_THREAD];

// Where the payload is: its address, or the tensor map that describes it.
template <Load>
struct Payload {
  const unsigned char* bytes;
};
template <>
struct Payload<Load::tensor> {
  ptx::TensorMap map;
};

// As long as the plan says: the stages, and behind them what the load synchronises by.
template <Load>
struct Shared {
  alignas(128) unsigned char tile[STAGES][TILE_BYTES];
  alignas(16) unsigned char control[CONTROL_BYTES];
};

// The CTA's place in its walk over the payload: every `step`-th of the tiles is its own.
struct Walk {
  unsigned tile, tiles, step;

  __device__ __forceinline__ bool has(int ahead) const { return tile + ahead * step < tiles; }
  __device__ __forceinline__ unsigned long long offset(int ahead) const {
    return static_cast<unsigned long long>(tile + ahead * step) * TILE_BYTES;
  }
};

// Whether this thread has chunks of a tile; where the i-th lies that it brings, and the i-th that it works on. They are
// those of two warps, so that a tile is shared by its threads as in any kernel that has a use for shared memory.
__device__ __forceinline__ bool reads() {
  return (READERS == BLOCK_THREADS && !PRODUCER_WARP) || threadIdx.x < READERS;
}
__device__ __forceinline__ unsigned brought(int i) { return CHUNK * (threadIdx.x + READERS * i); }
__device__ __forceinline__ unsigned worked_on(int i) { return CHUNK * ((threadIdx.x + 32) % READERS + READERS * i); }

__device__ __forceinline__ float4 as_floats(uint4 v) {
  return {__uint_as_float(v.x), __uint_as_float(v.y), __uint_as_float(v.z), __uint_as_float(v.w)};
}

// What all loads through shared memory have: a ring of stages. Each time it comes round the barriers' parity flips.
template <Load LOADED>
struct Ring {
  Shared<LOADED>& shared;
  const Payload<LOADED>& payload;
  int at = 0;
  unsigned parity = 0;

  __device__ __forceinline__ Ring(void* bytes, const Payload<LOADED>& from)
      : shared(*static_cast<Shared<LOADED>*>(bytes)), payload(from) {}

  __device__ __forceinline__ ptx::u32 stage(int number) const { return ptx::shared_address(shared.tile[number]); }
  __device__ __forceinline__ int before() const { return at == 0 ? STAGES - 1 : at - 1; }

  __device__ __forceinline__ void advance() {
    if (++at == STAGES) {
      at = 0;
      parity ^= 1;
    }
  }

  __device__ __forceinline__ void start(const Walk&) {}

  __device__ __forceinline__ void read(Values& values, const Walk&) const {
    if (reads())
#pragma unroll
      for (int i = 0; i < PER_THREAD; ++i) values[i] = as_floats(ptx::ld_shared_v4(stage(at) + worked_on(i)));
  }

  __device__ __forceinline__ void leave(const Values&, const Walk&) { advance(); }
};

template <Load>
struct Fill;

// No shared memory: what is the most that loads can do?
template <>
struct Fill<Load::direct> {
  const Payload<Load::direct>& payload;

  __device__ __forceinline__ Fill(void*, const Payload<Load::direct>& from) : payload(from) {}

  __device__ __forceinline__ void start(const Walk&) {}
  __device__ __forceinline__ void enter(const Walk&, bool) {}
  __device__ __forceinline__ void read(Values& values, const Walk& walk) const {
    if (reads())
#pragma unroll
      for (int i = 0; i < PER_THREAD; ++i)
        values[i] = as_floats(ptx::ld_global_v4(payload.bytes + walk.offset(0) + worked_on(i)));
  }
  __device__ __forceinline__ void leave(const Values&, const Walk&) {}
};

// Word by word, as a kernel without vectors does. All loads of a tile are under way before the first store.
template <>
struct Fill<Load::sync_4> : Ring<Load::sync_4> {
  using Ring::Ring;

  __device__ __forceinline__ void enter(const Walk& walk, bool first) {
    constexpr int WORDS = TILE_BYTES / (4 * BLOCK_THREADS);
    const unsigned char* from = payload.bytes + walk.offset(0) + 4 * threadIdx.x;
    ptx::u32 held[WORDS];
    if (!first) __syncthreads();
#pragma unroll
    for (int i = 0; i < WORDS; ++i) held[i] = ptx::ld_global_u32(from + 4 * BLOCK_THREADS * i);
#pragma unroll
    for (int i = 0; i < WORDS; ++i) ptx::st_shared_u32(stage(0) + 4 * (threadIdx.x + BLOCK_THREADS * i), held[i]);
    __syncthreads();
  }
};

// 16 bytes per thread. With two stages registers hold the next tile while this one is worked on; the one barrier of a
// tile keeps those who write the next stage from overtaking those who still read it.
template <>
struct Fill<Load::sync_16> : Ring<Load::sync_16> {
  using Ring::Ring;
  uint4 held[PER_THREAD];

  __device__ __forceinline__ void fetch(const Walk& walk, int ahead) {
    if (reads() && walk.has(ahead))
#pragma unroll
      for (int i = 0; i < PER_THREAD; ++i) held[i] = ptx::ld_global_v4(payload.bytes + walk.offset(ahead) + brought(i));
  }

  __device__ __forceinline__ void start(const Walk& walk) {
    if constexpr (STAGES == 2) fetch(walk, 0);
  }

  __device__ __forceinline__ void enter(const Walk& walk, bool first) {
    if constexpr (STAGES == 1) {
      if (!first) __syncthreads();
      fetch(walk, 0);
    }
    if (reads())
#pragma unroll
      for (int i = 0; i < PER_THREAD; ++i) ptx::st_shared_v4(stage(at) + brought(i), held[i]);
    __syncthreads();
    if constexpr (STAGES == 2) fetch(walk, 1);
  }
};

template <>
struct Fill<Load::cp_async> : Ring<Load::cp_async> {
  using Ring::Ring;

  __device__ __forceinline__ void issue(const Walk& walk, int ahead, int to) {
    if (reads() && walk.has(ahead))
#pragma unroll
      for (int i = 0; i < PER_THREAD; ++i)
        ptx::cp_async_cg_16(stage(to) + brought(i), payload.bytes + walk.offset(ahead) + brought(i));
    ptx::cp_async_commit_group();  // also an empty one: a wait counts groups
  }

  __device__ __forceinline__ void start(const Walk& walk) {
#pragma unroll
    for (int s = 0; s < STAGES - 1; ++s) issue(walk, s, s);
  }

  __device__ __forceinline__ void enter(const Walk& walk, bool first) {
    if constexpr (STAGES == 1) {
      if (!first) __syncthreads();
      issue(walk, 0, 0);
      ptx::cp_async_wait_group<0>();
      __syncthreads();
    } else {
      ptx::cp_async_wait_group<STAGES - 2>();
      __syncthreads();
      issue(walk, STAGES - 1, before());
    }
  }
};

__device__ __forceinline__ void wait(ptx::u32 barrier, unsigned parity) {
  while (!ptx::mbarrier_try_wait_parity(barrier, parity)) {
  }
}

// The copy engine, one elected lane of a warp telling it what to do.
template <Load LOADED>
struct EngineFill : Ring<LOADED> {
  using Ring<LOADED>::Ring;
  const unsigned warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0);

  __device__ __forceinline__ ptx::u32 full(int number) const {
    return ptx::shared_address(this->shared.control) + 8 * number;
  }
  __device__ __forceinline__ ptx::u32 empty(int number) const { return full(STAGES + number); }

  __device__ __forceinline__ void issue(const Walk& walk, int ahead, int to) {
    if (!ptx::elect_sync()) return;
    ptx::mbarrier_arrive_expect_tx(full(to), TILE_BYTES);
    if constexpr (LOADED == Load::bulk) {
      ptx::cp_async_bulk(this->stage(to), this->payload.bytes + walk.offset(ahead), TILE_BYTES, full(to));
    } else {
      // Tiles are numbered along the rows of the view, a row of tiles after the other.
      constexpr unsigned ACROSS = VIEW_FLOATS * 4 / BOX_ROW_BYTES, ROWS = TILE_BYTES / BOX_ROW_BYTES;
      const unsigned tile = walk.tile + ahead * walk.step;
      ptx::cp_async_bulk_tensor_2d(this->stage(to), &this->payload.map, tile % ACROSS * (BOX_ROW_BYTES / 4),
                                   tile / ACROSS * ROWS, full(to));
    }
  }

  __device__ __forceinline__ void start(const Walk& walk) {
    if (warp == 0 && ptx::elect_sync()) {
#pragma unroll
      for (int s = 0; s < STAGES; ++s) {
        ptx::mbarrier_init(full(s), 1);
        if constexpr (PRODUCER_WARP) ptx::mbarrier_init(empty(s), WARPS);
      }
      ptx::fence_mbarrier_init();
    }
    __syncthreads();
    if constexpr (!PRODUCER_WARP)
#pragma unroll
      for (int s = 0; s < STAGES - 1; ++s)
        if (warp == 0 && walk.has(s)) issue(walk, s, s);
  }

  __device__ __forceinline__ bool produces() const { return PRODUCER_WARP && warp == WARPS; }

  // The producer warp: as far ahead as the ring allows.
  __device__ __forceinline__ void produce(Walk walk) {
#pragma unroll 1
    for (; walk.has(0); walk.tile += walk.step) {
      // A fresh barrier counts as one whose phase before the first is complete: the first round does not wait.
      wait(empty(this->at), this->parity ^ 1);
      issue(walk, 0, this->at);
      this->advance();
    }
  }

  __device__ __forceinline__ void enter(const Walk& walk, bool first) {
    if constexpr (STAGES == 1) {
      if (!first) __syncthreads();
      if (warp == 0) issue(walk, 0, 0);
    }
    wait(full(this->at), this->parity);
    if constexpr (STAGES > 1 && !PRODUCER_WARP) {
      __syncthreads();
      if (warp == 0 && walk.has(STAGES - 1)) issue(walk, STAGES - 1, this->before());
    }
  }

  // Without a producer warp the block's barrier says that a stage may be filled anew; it comes behind the arithmetic.
  // With one, this warp's arrival says so, and has to wait for the reads itself: ptxas issues it without looking at
  // their scoreboard (see gemm_tuned.cu). So the number of arrivals, always 1, depends on every read. `tiles >> 31` is
  // 0, but ptxas cannot know.
  __device__ __forceinline__ void leave(const Values& values, const Walk& walk) {
    if constexpr (PRODUCER_WARP) {
      unsigned read = 0;
      for (int i = 0; i < PER_THREAD; ++i) read |= __float_as_uint(values[i].w);
      __syncwarp();
      if (ptx::elect_sync()) ptx::mbarrier_arrive(empty(this->at), 1 + (read & (walk.tiles >> 31)));
    }
    this->advance();
  }
};

template <>
struct Fill<Load::bulk> : EngineFill<Load::bulk> {
  using EngineFill::EngineFill;
};

template <>
struct Fill<Load::tensor> : EngineFill<Load::tensor> {
  using EngineFill::EngineFill;
};
