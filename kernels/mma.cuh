// mma.sync fragments of m16n8k16 bf16 and the packing of its results.
#pragma once

#include "ptx.cuh"

// Register layout (PTX ISA, "Matrix Fragments for mma.m16n8k16"), with g = lane / 4 and c = lane % 4:
//   a[0] = A[g][2c..2c+1]   a[1] = A[g+8][2c..]   a[2] = A[g][2c+8..]   a[3] = A[g+8][2c+8..]
//   b[0] = B[2c..2c+1][g]   b[1] = B[2c+8..][g]
//   d[0..1] = D[g][2c..2c+1]   d[2..3] = D[g+8][2c..2c+1]
__device__ __forceinline__ void mma_m16n8k16_bf16(float (&d)[4], const ptx::u32 (&a)[4], const ptx::u32 (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// Two floats, rounded to nearest even, as bf16x2 with `low` in the lower half.
__device__ __forceinline__ ptx::u32 pack_bf16x2(float low, float high) {
  ptx::u32 packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}
