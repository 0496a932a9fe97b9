// The two levels of `load` that are library code, CCCL's; apart, since its headers take a second to compile.
#pragma once

#include <cuda/barrier>
#include <cuda/pipeline>

#include "fill.cuh"

// The threads that copy together, as CCCL asks for them.
struct Block {
  __device__ __forceinline__ void sync() const { __syncthreads(); }
  __device__ __forceinline__ constexpr unsigned size() const { return BLOCK_THREADS; }
  __device__ __forceinline__ unsigned thread_rank() const { return threadIdx.x; }
};

constexpr auto WHOLE_TILE = cuda::aligned_size_t<CHUNK>(TILE_BYTES);

template <>
struct Fill<Load::pipeline> : Ring<Load::pipeline> {
  using State = cuda::pipeline_shared_state<cuda::thread_scope_block, STAGES>;
  static_assert(sizeof(State) <= CONTROL_BYTES,
                "the pipeline's barriers lie in the part that the plan leaves for them");

  cuda::pipeline<cuda::thread_scope_block> pipe;

  __device__ __forceinline__ Fill(void* bytes, const Payload<Load::pipeline>& from)
      : Ring(bytes, from), pipe(cuda::make_pipeline(Block{}, reinterpret_cast<State*>(shared.control))) {}

  __device__ __forceinline__ void issue(const Walk& walk, int ahead, int to) {
    pipe.producer_acquire();
    if (walk.has(ahead))
      cuda::memcpy_async(Block{}, shared.tile[to], payload.bytes + walk.offset(ahead), WHOLE_TILE, pipe);
    pipe.producer_commit();
  }

  __device__ __forceinline__ void start(const Walk& walk) {
#pragma unroll
    for (int s = 0; s < STAGES - 1; ++s) issue(walk, s, s);
  }

  __device__ __forceinline__ void enter(const Walk& walk, bool first) {
    if (!first) pipe.consumer_release();
    issue(walk, STAGES - 1, before());
    pipe.consumer_wait();
  }
};

template <>
struct Fill<Load::memcpy_async> : Ring<Load::memcpy_async> {
  using Ring::Ring;
  using Barrier = cuda::barrier<cuda::thread_scope_block>;

  __device__ __forceinline__ Barrier& landed() const { return *reinterpret_cast<Barrier*>(shared.control); }

  __device__ __forceinline__ void start(const Walk&) {
    if (threadIdx.x == 0) {
      init(&landed(), BLOCK_THREADS);
#if __CUDA_ARCH__ >= 900
      // The library leaves it to its user, and from sm_90 on the copy engine uses the barrier.
      ptx::fence_mbarrier_init();
#endif
    }
    __syncthreads();
  }

  __device__ __forceinline__ void enter(const Walk& walk, bool first) {
    if (!first) __syncthreads();
    cuda::memcpy_async(Block{}, shared.tile[0], payload.bytes + walk.offset(0), WHOLE_TILE, landed());
    landed().arrive_and_wait();
  }
};
