// Where the copy engine finds a tile: an address, or a tensor map that is a parameter or lies in global memory.
#pragma once

#include "../copy_engine.cuh"

enum class Map { bulk, tensor_1d, tensor_2d, tensor_3d };
enum class Descriptor { by_value, prefetched, global };
enum class Issue { elect, thread_zero };

// Passed by value as a __grid_constant__. Each kind has both functions, and a kernel calls the one that it declares.
template <bool TENSOR, Descriptor DESCRIPTOR>
struct Source {
  ptx::TensorMap map;

  __device__ __forceinline__ const ptx::TensorMap* tensor_map() const { return &map; }
  __device__ __forceinline__ unsigned char* bytes() const { return nullptr; }
};

template <>
struct Source<true, Descriptor::global> {
  const ptx::TensorMap* map;

  __device__ __forceinline__ const ptx::TensorMap* tensor_map() const { return map; }
  __device__ __forceinline__ unsigned char* bytes() const { return nullptr; }
};

template <>
struct Source<false, Descriptor::by_value> {
  unsigned char* address;

  __device__ __forceinline__ const ptx::TensorMap* tensor_map() const { return nullptr; }
  __device__ __forceinline__ unsigned char* bytes() const { return address; }
};

// What a descriptor needs before its first use, of the thread that will use it.
template <Descriptor DESCRIPTOR>
__device__ __forceinline__ void make_ready(const ptx::TensorMap* map) {
  if constexpr (DESCRIPTOR == Descriptor::prefetched) ptx::prefetch_tensormap(map);
  if constexpr (DESCRIPTOR == Descriptor::global) ptx::fence_proxy_tensormap_acquire(map);
}

// True in the one lane that talks to the copy engine. With thread_zero ptxas cannot prove that it is one lane.
template <Issue ISSUE>
__device__ __forceinline__ bool chosen() {
  if constexpr (ISSUE == Issue::elect)
    return ptx::elect_sync();
  else
    return threadIdx.x == 0;
}

__device__ __forceinline__ void wait_full(ptx::u32 barrier, ptx::u32 parity) {
  while (!ptx::mbarrier_try_wait_parity(barrier, parity)) {
  }
}
