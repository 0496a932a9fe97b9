// What CTAs of a cluster say and send to each other. One free function per instruction, as in ptx.cuh; sm_90a, sm_100a.
#pragma once

#include "ptx.cuh"

namespace ptx {

__device__ __forceinline__ u32 cluster_ctarank() {
  u32 rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// The address, in CTA `rank` of the cluster, of what lies at `address` in this one.
__device__ __forceinline__ u32 mapa(u32 address, u32 rank) {
  u32 there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
  return there;
}

__device__ __forceinline__ void barrier_cluster_arrive() {
  asm volatile("barrier.cluster.arrive.aligned;" ::: "memory");
}

__device__ __forceinline__ void barrier_cluster_wait() { asm volatile("barrier.cluster.wait.aligned;" ::: "memory"); }

// All meet, and nobody's writes are passed on: .release would be a MEMBAR.ALL.GPU. What was written for the others
// before has a fence of its own (fence_mbarrier_init).
__device__ __forceinline__ void barrier_cluster_arrive_relaxed() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}

__device__ __forceinline__ void barrier_cluster_wait_acquire() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// `barrier` comes from mapa. Without .release.cluster, which is a MEMBAR.ALL.GPU: this thread passes no data on.
__device__ __forceinline__ void mbarrier_arrive_cluster(u32 barrier, u32 arrivals) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Into the shared memory of another CTA; once the 16 bytes are there, they count at a barrier of that CTA. `target` and
// `barrier` come from mapa.
__device__ __forceinline__ void st_async_v4(u32 target, float x, float y, float z, float w, u32 barrier) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(target),
      "f"(x), "f"(y), "f"(z), "f"(w), "r"(barrier)
      : "memory");
}

}  // namespace ptx
