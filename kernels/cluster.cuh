// What CTAs of a cluster read of each other's shared memory, and launches that begin before the one ahead of them has ended.
// One free function per instruction, as in ptx.cuh; sm_90 on.
#pragma once

#include "ptx.cuh"

namespace ptx {

// ---- clusters --------------------------------------------------------------------------------------------------------

// All meet, and nobody's writes are passed on: .release would be a MEMBAR.ALL.GPU. What was written for the others before has
// a fence of its own (fence_mbarrier_init).
__device__ __forceinline__ void barrier_cluster_arrive_relaxed() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}

// What this thread wrote to shared memory before its arrival, the others may read after their wait.
__device__ __forceinline__ void barrier_cluster_arrive_release() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}

__device__ __forceinline__ void barrier_cluster_wait_acquire() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// `source` comes from mapa.
__device__ __forceinline__ float4 ld_shared_cluster_v4(u32 source) {
  float4 v;
  asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "r"(source)
               : "memory");
  return v;
}

// ---- dependent launches ----------------------------------------------------------------------------------------------

// Until the launch ahead in the stream has ended and what it wrote is visible. Without the launch attribute it does nothing.
__device__ __forceinline__ void griddepcontrol_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// Once every CTA has come here or ended, the launch behind this one may begin.
__device__ __forceinline__ void griddepcontrol_launch_dependents() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// ---- stores ----------------------------------------------------------------------------------------------------------

__device__ __forceinline__ void st_shared_v2(u32 target, float x, float y) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(target), "f"(x), "f"(y) : "memory");
}

__device__ __forceinline__ void st_global_v2(void* target, u32 x, u32 y) {
  asm volatile("st.global.v2.u32 [%0], {%1, %2};" ::"l"(target), "r"(x), "r"(y) : "memory");
}

}  // namespace ptx
