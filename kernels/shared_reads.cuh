// The PTX loads from shared memory that ptx.cuh lacks: ldmatrix of one and of two matrices, 8 bytes a lane, and vectors
// that stay whole when only a part of them is used (.volatile): of a plain ld.shared.v4 ptxas reads only what it needs.
//
// ldmatrix: lane 8i + r gives the address of row r of matrix i, and gets the word l % 4 of row l / 4 of each; with
// .trans the two halves of its word are the elements l / 4 of rows 2 * (l % 4) and 2 * (l % 4) + 1. PTX ISA 9.0 is the
// reference for each: https://docs.nvidia.com/cuda/parallel-thread-execution/
#pragma once

#include "ptx.cuh"

namespace ptx {

__device__ __forceinline__ uint2 ld_shared_v2(u32 source) {
  uint2 v;
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(source) : "memory");
  return v;
}

__device__ __forceinline__ uint2 ld_volatile_shared_v2(u32 source) {
  uint2 v;
  asm volatile("ld.volatile.shared.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(source) : "memory");
  return v;
}

__device__ __forceinline__ uint4 ld_volatile_shared_v4(u32 source) {
  uint4 v;
  asm volatile("ld.volatile.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(source)
               : "memory");
  return v;
}

__device__ __forceinline__ u32 ldmatrix_x1(u32 row) {
  u32 v;
  asm volatile("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%0}, [%1];" : "=r"(v) : "r"(row) : "memory");
  return v;
}

__device__ __forceinline__ u32 ldmatrix_x1_trans(u32 row) {
  u32 v;
  asm volatile("ldmatrix.sync.aligned.m8n8.x1.trans.shared.b16 {%0}, [%1];" : "=r"(v) : "r"(row) : "memory");
  return v;
}

__device__ __forceinline__ uint2 ldmatrix_x2(u32 row) {
  uint2 v;
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(row) : "memory");
  return v;
}

__device__ __forceinline__ uint2 ldmatrix_x2_trans(u32 row) {
  uint2 v;
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
               : "=r"(v.x), "=r"(v.y)
               : "r"(row)
               : "memory");
  return v;
}

}  // namespace ptx
