// What CTAs of a grid say to each other through global memory. One free function per instruction, as in ptx.cuh.
#pragma once

#include "ptx.cuh"

namespace ptx {

// What this thread has written, and what it has seen others write, is visible to whoever then acquires the result.
// Returns what was there before.
__device__ __forceinline__ u32 atom_add_release_gpu(u32* target, u32 value) {
  u32 before;
  asm volatile("atom.add.release.gpu.global.u32 %0, [%1], %2;" : "=r"(before) : "l"(target), "r"(value) : "memory");
  return before;
}

__device__ __forceinline__ u32 ld_acquire_gpu(const u32* source) {
  u32 value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(source) : "memory");
  return value;
}

}  // namespace ptx
