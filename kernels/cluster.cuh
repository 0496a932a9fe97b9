// What CTAs of a cluster send into each other's shared memory, and launches that begin before the one ahead of them has ended.
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

__device__ __forceinline__ void barrier_cluster_wait_acquire() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Into the shared memory of another CTA; once the 16 bytes are there, they count at a barrier of that CTA. `target` and `barrier`
// come from mapa.
__device__ __forceinline__ void st_async_v4(u32 target, float x, float y, float z, float w, u32 barrier) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(target),
               "f"(x), "f"(y), "f"(z), "f"(w), "r"(barrier)
               : "memory");
}

// As mbarrier_try_wait_parity, for what other CTAs of the cluster have sent.
__device__ __forceinline__ bool mbarrier_try_wait_parity_cluster(u32 barrier, u32 parity) {
  u32 done;
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;\n"
      "selp.u32 %0, 1, 0, p;\n"
      "}\n"
      : "=r"(done)
      : "r"(barrier), "r"(parity)
      : "memory");
  return done != 0;
}

// ---- dependent launches ----------------------------------------------------------------------------------------------

// Until the launch ahead in the stream has ended and what it wrote is visible. Without the launch attribute it does nothing.
__device__ __forceinline__ void griddepcontrol_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// Once every CTA has come here or ended, the launch behind this one may begin.
__device__ __forceinline__ void griddepcontrol_launch_dependents() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

}  // namespace ptx
