// The copy engine's instructions that ptx.cuh lacks: copies in one and three dimensions, stores, multicast and
// descriptors. One free function per instruction, as there; sm_90 on.
#pragma once

#include "ptx.cuh"

namespace ptx {

// ---- loads ----------------------------------------------------------------------------------------------------------

// Past L1, with the L2 prefetch hint of the other loads.
__device__ __forceinline__ u32 ld_global_cg_u32(const void* source) {
  u32 v;
  asm volatile("ld.global.cg.L2::128B.u32 %0, [%1];" : "=r"(v) : "l"(source) : "memory");
  return v;
}

// Contiguous bytes, without a tensor map. Both addresses and `bytes` are multiples of 16. The destination is
// .shared::cta for the reason that cp_async_bulk_tensor_2d gives.
__device__ __forceinline__ void cp_async_bulk(u32 target, const void* source, u32 bytes, u32 barrier) {
  asm volatile("cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(target),
               "l"(source), "r"(bytes), "r"(barrier)
               : "memory");
}

__device__ __forceinline__ void cp_async_bulk_tensor_1d(u32 target, const TensorMap* map, int x, u32 barrier) {
  asm volatile(
      "cp.async.bulk.tensor.1d.shared::cta.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2}], [%3];" ::"r"(
          target),
      "l"(map), "r"(x), "r"(barrier)
      : "memory");
}

__device__ __forceinline__ void cp_async_bulk_tensor_3d(u32 target, const TensorMap* map, int x, int y, int z,
                                                        u32 barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cta.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];" ::
          "r"(target),
      "l"(map), "r"(x), "r"(y), "r"(z), "r"(barrier)
      : "memory");
}

// The box lands at the same offset in each CTA of the cluster whose bit is in `ctas`, and completes on the barrier at
// `barrier`'s offset there. Only launched in clusters, so the destination is .shared::cluster.
__device__ __forceinline__ void cp_async_bulk_tensor_2d_multicast(u32 target, const TensorMap* map, int x, int y,
                                                                  u32 barrier, u16 ctas) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster"
      " [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(target),
      "l"(map), "r"(x), "r"(y), "r"(barrier), "h"(ctas)
      : "memory");
}

// ---- stores: complete by group, not by mbarrier ---------------------------------------------------------------------

__device__ __forceinline__ void cp_async_bulk_store(void* target, u32 source, u32 bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(target), "r"(source), "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void cp_async_bulk_tensor_2d_store(const TensorMap* map, int x, int y, u32 source) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%1, %2}], [%3];" ::"l"(map), "r"(x),
               "r"(y), "r"(source)
               : "memory");
}

__device__ __forceinline__ void cp_async_bulk_commit_group() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Returns when all but the thread's `PENDING` newest groups have read their shared memory.
template <int PENDING>
__device__ __forceinline__ void cp_async_bulk_wait_group_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(PENDING) : "memory");
}

// Returns when all but the thread's `PENDING` newest groups have been written.
template <int PENDING>
__device__ __forceinline__ void cp_async_bulk_wait_group() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(PENDING) : "memory");
}

// What this thread wrote to shared memory becomes visible to the copy engine.
__device__ __forceinline__ void fence_proxy_async_shared() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// ---- descriptors ----------------------------------------------------------------------------------------------------

__device__ __forceinline__ void prefetch_tensormap(const TensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// Before the first use of a map in global memory that something else wrote: the copy engine's cache is not coherent.
__device__ __forceinline__ void fence_proxy_tensormap_acquire(const TensorMap* map) {
  asm volatile("fence.proxy.tensormap::generic.acquire.gpu [%0], 128;" ::"l"(map) : "memory");
}

}  // namespace ptx
