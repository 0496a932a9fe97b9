// PTX instructions that only the copy kernels use, in the form of ptx.cuh: one function each, named after it.
#pragma once

#include "ptx.cuh"

namespace ptx {

__device__ __forceinline__ u32 ld_global_u32(const void* source) {
  u32 v;
  asm volatile("ld.global.L2::128B.u32 %0, [%1];" : "=r"(v) : "l"(source) : "memory");
  return v;
}

__device__ __forceinline__ void st_shared_u32(u32 target, u32 v) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(target), "r"(v) : "memory");
}

// One contiguous piece, by the copy engine (sm_90 on): source, target and bytes are multiples of 16. The destination is
// .shared::cta for the reason that cp_async_bulk_tensor_2d gives.
__device__ __forceinline__ void cp_async_bulk(u32 target, const void* source, u32 bytes, u32 barrier) {
  asm volatile("cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(target),
               "l"(source), "r"(bytes), "r"(barrier)
               : "memory");
}

}  // namespace ptx
