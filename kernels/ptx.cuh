// One free function per PTX instruction, named after it, with every clobber stated. Nothing else belongs here.
//
// "memory" is on everything that touches shared or global memory behind the compiler's back, or that orders such
// accesses. Shared-memory addresses are 32-bit offsets in the shared window (`shared_address`).
// PTX ISA 9.0 is the reference for each: https://docs.nvidia.com/cuda/parallel-thread-execution/
#pragma once

namespace ptx {

using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;

// 128 opaque bytes that cuTensorMapEncodeTiled writes on the host; passed by value as a __grid_constant__ parameter.
struct alignas(64) TensorMap {
  u64 words[16];
};

__device__ __forceinline__ u32 shared_address(const void* pointer) {
  return static_cast<u32>(__cvta_generic_to_shared(pointer));
}

// ---- thread and warp ------------------------------------------------------------------------------------------------

// True in exactly one lane of a fully active warp. `threadIdx.x == 0` around a TMA instead makes ptxas emit a loop over
// the active lanes, because it cannot prove that a single lane is left.
__device__ __forceinline__ bool elect_sync() {
  u32 elected;
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "elect.sync _|p, 0xffffffff;\n"
      "selp.u32 %0, 1, 0, p;\n"
      "}\n"
      : "=r"(elected));
  return elected != 0;
}

// Named barriers: `arrive` counts this warp in and goes on, `sync` waits until `threads` have come.
__device__ __forceinline__ void bar_sync(u32 barrier, u32 threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

__device__ __forceinline__ void bar_arrive(u32 barrier, u32 threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// The warps of a warpgroup give registers back, or wait until as many are free and take them (sm_90a, sm_100a).
template <int REGISTERS>
__device__ __forceinline__ void setmaxnreg_dec() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

template <int REGISTERS>
__device__ __forceinline__ void setmaxnreg_inc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

__device__ __forceinline__ u32 smid() {
  u32 id;
  asm volatile("mov.u32 %0, %%smid;" : "=r"(id));
  return id;
}

__device__ __forceinline__ u64 clock64_now() {
  u64 cycles;
  asm volatile("mov.u64 %0, %%clock64;" : "=l"(cycles)::"memory");
  return cycles;
}

__device__ __forceinline__ u64 globaltimer() {
  u64 nanoseconds;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(nanoseconds)::"memory");
  return nanoseconds;
}

// ---- loads and stores -----------------------------------------------------------------------------------------------

// The L2::128B hint on every global load of an operand is a declared constant of the experiment: cp.async and the
// tensor maps carry the same one, so that no load mode fetches a different share of its line.
__device__ __forceinline__ uint4 ld_global_v4(const void* source) {
  uint4 v;
  asm volatile("ld.global.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(source)
               : "memory");
  return v;
}

__device__ __forceinline__ u32 ld_global_u32(const void* source) {
  u32 v;
  asm volatile("ld.global.L2::128B.u32 %0, [%1];" : "=r"(v) : "l"(source) : "memory");
  return v;
}

__device__ __forceinline__ void st_global_u32(void* target, u32 value) {
  asm volatile("st.global.u32 [%0], %1;" ::"l"(target), "r"(value) : "memory");
}

__device__ __forceinline__ void st_global_v4(void* target, uint4 v) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(target), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
               : "memory");
}

__device__ __forceinline__ void st_global_v4_f32(void* target, float x, float y, float z, float w) {
  asm volatile("st.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(target), "f"(x), "f"(y), "f"(z), "f"(w) : "memory");
}

__device__ __forceinline__ void st_shared_u32(u32 target, u32 v) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(target), "r"(v) : "memory");
}

__device__ __forceinline__ void st_shared_v4(u32 target, uint4 v) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(target), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
               : "memory");
}

__device__ __forceinline__ u32 ld_shared_u16(u32 source) {
  u16 v;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(v) : "r"(source) : "memory");
  return v;
}

__device__ __forceinline__ u32 ld_shared_u32(u32 source) {
  u32 v;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(source) : "memory");
  return v;
}

__device__ __forceinline__ uint4 ld_shared_v4(u32 source) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(source)
               : "memory");
  return v;
}

__device__ __forceinline__ uint4 ldmatrix_x4(u32 row) {
  uint4 v;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(row)
               : "memory");
  return v;
}

__device__ __forceinline__ uint4 ldmatrix_x4_trans(u32 row) {
  uint4 v;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(row)
               : "memory");
  return v;
}

// Two 8x8 matrices side by side and the two below (sm_90 on): lane l gives the address of row l % 8 of matrix l / 8.
__device__ __forceinline__ void stmatrix_x4(u32 row, uint4 v) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row), "r"(v.x), "r"(v.y),
               "r"(v.z), "r"(v.w)
               : "memory");
}

// ---- cp.async: 16 bytes per thread, past L1 (.cg) -------------------------------------------------------------------

__device__ __forceinline__ void cp_async_cg_16(u32 target, const void* source) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(target), "l"(source) : "memory");
}

__device__ __forceinline__ void cp_async_commit_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Returns when at most `PENDING` of this thread's newest groups are still under way.
template <int PENDING>
__device__ __forceinline__ void cp_async_wait_group() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// ---- mbarrier and TMA (sm_90 on) ------------------------------------------------------------------------------------

__device__ __forceinline__ void mbarrier_init(u32 barrier, u32 arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Makes the inits above visible to the asynchronous proxy before the first TMA names the barrier.
__device__ __forceinline__ void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void mbarrier_arrive_expect_tx(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ __forceinline__ void mbarrier_arrive(u32 barrier, u32 arrivals) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// What a thread sees once a phase has completed: what its own CTA and the copy engine wrote, or also what other CTAs of
// the cluster sent (sm_90a, sm_100a).
struct OwnCta {
  static constexpr char SEMANTICS[] = "";
};
struct WholeCluster {
  static constexpr char SEMANTICS[] = ".acquire.cluster";
};

// True once the phase of the given parity has completed. It may return false early: call it in a loop. The constraint
// "C" puts its text into the instruction.
template <class Seen = OwnCta>
__device__ __forceinline__ bool mbarrier_try_wait_parity(u32 barrier, u32 parity) {
  u32 done;
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "mbarrier.try_wait.parity%3.shared::cta.b64 p, [%1], %2;\n"
      "selp.u32 %0, 1, 0, p;\n"
      "}\n"
      : "=r"(done)
      : "r"(barrier), "r"(parity), "C"(Seen::SEMANTICS)
      : "memory");
  return done != 0;
}

// `x` counts elements along the contiguous axis, `y` rows. The destination is .shared::cta: .shared::cluster would add
// a call and a stack frame on sm_120. A CTA of a cluster may use it too, for its own shared memory.
__device__ __forceinline__ void cp_async_bulk_tensor_2d(u32 target, const TensorMap* map, int x, int y, u32 barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(
          target),
      "l"(map), "r"(x), "r"(y), "r"(barrier)
      : "memory");
}

}  // namespace ptx
