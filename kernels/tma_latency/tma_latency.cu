// What one load costs, in cycles of the SM: until its data can be used (latency), until the thread can issue the next
// one (issue), and until its data can be used where nothing has touched the tensor map yet (first touch).
//
// `chain` has a node every `stride` lines of 128 bytes, whose first word is the line of the node after it. Each load of
// a latency is of the node that the load before it named. One thread does all of it: the other warps only flush L2.
#include "../tma_wall/source.cuh"

enum class Load { ldg, cp_async, bulk, tensor_2d };
enum class What { latency, issue, first_touch };

constexpr int THREADS = 1024, LINE = 128, BURST = 16, SLOT_BYTES = 1024;
constexpr Load LOAD = Load(VARIANT_LOAD);
constexpr What WHAT = What(VARIANT_WHAT);
constexpr Issue ISSUE = Issue(VARIANT_ISSUE);
constexpr Descriptor DESCRIPTOR = Descriptor(VARIANT_DESCRIPTOR);
constexpr bool ENGINE = LOAD == Load::bulk || LOAD == Load::tensor_2d;
using ChainSource = Source<LOAD == Load::tensor_2d, DESCRIPTOR>;

static_assert(WHAT != What::first_touch || LOAD == Load::tensor_2d, "only a tensor load has a tensor map to touch");

struct Loader {
  const ChainSource& source;
  const unsigned char* chain;
  unsigned bytes;           // of a load
  unsigned slots, barrier;  // addresses in shared memory
  unsigned parity = 0;

  __device__ __forceinline__ const unsigned char* node(unsigned line) const {
    return chain + static_cast<unsigned long long>(line) * LINE;
  }

  // Starts a load by the copy engine, or by cp.async, into a slot.
  __device__ __forceinline__ void start(unsigned line, unsigned slot) {
    const unsigned to = slots + slot * SLOT_BYTES;
    if constexpr (LOAD == Load::cp_async) ptx::cp_async_cg_16(to, node(line));
    if constexpr (LOAD == Load::bulk) ptx::cp_async_bulk(to, node(line), bytes, barrier);
    if constexpr (LOAD == Load::tensor_2d) ptx::cp_async_bulk_tensor_2d(to, source.tensor_map(), 0, line, barrier);
  }

  __device__ __forceinline__ void expect(unsigned loads) {
    if constexpr (ENGINE) ptx::mbarrier_arrive_expect_tx(barrier, loads * bytes);
  }

  __device__ __forceinline__ void finish() {
    if constexpr (LOAD == Load::cp_async) {
      ptx::cp_async_commit_group();
      ptx::cp_async_wait_group<0>();
    }
    if constexpr (ENGINE) {
      wait_full(barrier, parity);
      parity ^= 1;
    }
  }

  __device__ __forceinline__ unsigned word(unsigned slot) const {
    return ptx::ld_shared_u32(slots + slot * SLOT_BYTES);
  }

  // The line that the node at `line` names.
  __device__ __forceinline__ unsigned follow(unsigned line) {
    if constexpr (LOAD == Load::ldg) {
      return ptx::ld_global_cg_u32(node(line));
    } else {
      expect(1);
      start(line, 0);
      finish();
      return word(0);
    }
  }

  __device__ __forceinline__ unsigned walk(unsigned line, unsigned steps) {
#pragma unroll 1
    for (unsigned step = 0; step < steps; ++step) line = follow(line);
    return line;
  }

  // BURST loads that do not depend on each other; adds the cycles between the first and the last, and mixes their words
  // into `mixed`, in order.
  __device__ __forceinline__ unsigned burst(unsigned line, unsigned stride, unsigned mixed,
                                            unsigned long long& cycles) {
    unsigned found[BURST];
    expect(BURST);
    const unsigned long long begin = ptx::clock64_now();
#pragma unroll
    for (unsigned i = 0; i < BURST; ++i) {
      if constexpr (LOAD == Load::ldg)
        found[i] = ptx::ld_global_cg_u32(node(line + i * stride));
      else
        start(line + i * stride, i);
    }
    cycles += ptx::clock64_now() - begin;
    finish();
#pragma unroll
    for (unsigned i = 0; i < BURST; ++i) {
      if constexpr (LOAD != Load::ldg) found[i] = word(i);
      mixed = mixed * 5 + found[i];
    }
    return mixed;
  }
};

// The threads' share of a buffer, 16 bytes each at a time.
__device__ __forceinline__ unsigned read_all(const unsigned char* buffer, unsigned bytes) {
  unsigned mixed = 0;
#pragma unroll 4
  for (unsigned at = threadIdx.x * 16; at < bytes; at += THREADS * 16) {
    const uint4 found = ptx::ld_global_v4(buffer + at);
    mixed ^= found.x ^ found.y ^ found.z ^ found.w;
  }
  return mixed;
}

// grid = 1; block = 1024 threads; dynamic shared memory >= 16 slots of 1024 bytes and a barrier; 16 divides `nodes`.
extern "C" __global__ void __launch_bounds__(THREADS)
    tma_latency(const __grid_constant__ ChainSource source, const unsigned char* chain, const unsigned char* flush,
                unsigned* last, unsigned long long* cycles, unsigned nodes, unsigned stride, unsigned bytes,
                unsigned flush_bytes) {
  extern __shared__ __align__(1024) unsigned char shared[];
  const unsigned slots = ptx::shared_address(shared);
  Loader loader{source, chain, bytes, slots, slots + BURST * SLOT_BYTES};

  // Warm: the chain lies in L2, the instructions and the tensor map in their caches. What was read is used below: ptxas
  // drops loads that nothing uses, volatile or not.
  unsigned before = 0;
  unsigned long long spent = 0;
  if (threadIdx.x < 32 && chosen<ISSUE>()) {
    if constexpr (ENGINE) {
      ptx::mbarrier_init(loader.barrier, 1);
      ptx::fence_mbarrier_init();
    }
    if constexpr (LOAD == Load::tensor_2d && WHAT != What::first_touch) make_ready<DESCRIPTOR>(source.tensor_map());
    if constexpr (WHAT == What::latency) before = loader.walk(0, nodes);  // 0 again: the chain is a ring
    if constexpr (WHAT == What::issue)
#pragma unroll 1
      for (unsigned node = 0; node < nodes; node += BURST) before = loader.burst(node * stride, stride, before, spent);
  }
  __syncthreads();
  // Cold: more than L2 holds goes through it. `last` is written again at the end.
  if (flush_bytes) last[0] = read_all(flush, flush_bytes);
  __syncthreads();
  // The same lane, chosen anew: a flag kept from above would not prove to ptxas that it is one.
  if (threadIdx.x >= 32 || !chosen<ISSUE>()) return;

  unsigned result = before;
  spent = 0;
  if constexpr (WHAT == What::issue) {
    result = 0;
#pragma unroll 1
    for (unsigned node = 0; node < nodes; node += BURST) result = loader.burst(node * stride, stride, result, spent);
    if (result != before) result = 0;  // both times the same words
  } else {
    unsigned steps = nodes - 1;
    if constexpr (WHAT == What::first_touch) {
      make_ready<DESCRIPTOR>(source.tensor_map());
      // By other loads round the ring, so that a prefetch has all the time it needs and the first node lies in L2.
#pragma unroll 1
      for (unsigned step = 0; step < nodes; ++step) result = ptx::ld_global_cg_u32(loader.node(result));
      steps = 1;
    }
    const unsigned long long begin = ptx::clock64_now();
    result = loader.walk(result, steps);
    spent = ptx::clock64_now() - begin;
  }
  last[0] = result & 0x7fffffff;
  cycles[0] = spent;
}
