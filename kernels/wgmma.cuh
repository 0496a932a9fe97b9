// wgmma (sm_90a): a warpgroup multiplies tiles that lie in shared memory, and its accumulators stay in registers. One
// free function per instruction as in ptx.cuh, and the descriptor that names a tile to the tensor core. PTX ISA 9.0,
// "Asynchronous Warpgroup Level Matrix Instructions".
#pragma once

#include "ptx.cuh"

namespace ptx {

// Before the first wgmma, and whenever registers that it takes were written by anything else.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

__device__ __forceinline__ void wgmma_commit_group() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Returns when at most `PENDING` of the warpgroup's newest groups are still under way: the others have read their tiles
// and written their accumulators.
template <int PENDING>
__device__ __forceinline__ void wgmma_wait_group() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// d[64][N] = A[64][16] * B[16][N] (+ d where `add`), bf16 in, fp32 out. A thread has N / 2 of d's values: with its lane
// 4 * g + c and its warp w in the group, d[4 * j .. + 1] are row 16 * w + g, columns 8 * j + 2 * c .. + 1, and
// d[4 * j + 2 .. + 3] the same columns eight rows below. TRANSPOSED_B: B lies with N along its rows, not K.
template <int N, bool TRANSPOSED_B>
__device__ __forceinline__ void wgmma_m64k16_bf16(float (&d)[N / 2], u64 a, u64 b, bool add) {
  static_assert(N == 64 || N == 128 || N == 192 || N == 256, "there is a function body for these widths alone");
#define RUNGS_TEN(t) "%" t "0, %" t "1, %" t "2, %" t "3, %" t "4, %" t "5, %" t "6, %" t "7, %" t "8, %" t "9, "
#define RUNGS_8(i)                                                                                            \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), \
      "+f"(d[i + 7])
#define RUNGS_32(i) RUNGS_8(i), RUNGS_8(i + 8), RUNGS_8(i + 16), RUNGS_8(i + 24)
#define RUNGS_WGMMA(n, registers, a_at, b_at, add_at, transposed_at)                      \
  "{\n.reg .pred p;\nsetp.ne.b32 p, %" add_at ", 0;\nwgmma.mma_async.sync.aligned.m64n" n \
  "k16.f32.bf16.bf16 {" registers "}, %" a_at ", %" b_at ", p, 1, 1, 0, %" transposed_at ";\n}\n"
#define RUNGS_SOURCES "l"(a), "l"(b), "r"(static_cast<u32>(add)), "n"(static_cast<int>(TRANSPOSED_B))
  if constexpr (N == 64) {
    asm volatile(RUNGS_WGMMA("64", RUNGS_TEN("") RUNGS_TEN("1") RUNGS_TEN("2") "%30, %31", "32", "33", "34", "35")
                 : RUNGS_32(0)
                 : RUNGS_SOURCES);
  } else if constexpr (N == 128) {
    asm volatile(RUNGS_WGMMA("128",
                             RUNGS_TEN("") RUNGS_TEN("1") RUNGS_TEN("2") RUNGS_TEN("3") RUNGS_TEN("4")
                                 RUNGS_TEN("5") "%60, %61, %62, %63",
                             "64", "65", "66", "67")
                 : RUNGS_32(0), RUNGS_32(32)
                 : RUNGS_SOURCES);
  } else if constexpr (N == 192) {
    asm volatile(RUNGS_WGMMA("192",
                             RUNGS_TEN("") RUNGS_TEN("1") RUNGS_TEN("2") RUNGS_TEN("3") RUNGS_TEN("4") RUNGS_TEN("5")
                                 RUNGS_TEN("6") RUNGS_TEN("7") RUNGS_TEN("8") "%90, %91, %92, %93, %94, %95",
                             "96", "97", "98", "99")
                 : RUNGS_32(0), RUNGS_32(32), RUNGS_32(64)
                 : RUNGS_SOURCES);
  } else {
    asm volatile(RUNGS_WGMMA("256",
                             RUNGS_TEN("") RUNGS_TEN("1") RUNGS_TEN("2") RUNGS_TEN("3") RUNGS_TEN("4") RUNGS_TEN("5")
                                 RUNGS_TEN("6") RUNGS_TEN("7") RUNGS_TEN("8") RUNGS_TEN("9") RUNGS_TEN("10")
                                     RUNGS_TEN("11") "%120, %121, %122, %123, %124, %125, %126, %127",
                             "128", "129", "130", "131")
                 : RUNGS_32(0), RUNGS_32(32), RUNGS_32(64), RUNGS_32(96)
                 : RUNGS_SOURCES);
  }
#undef RUNGS_TEN
#undef RUNGS_8
#undef RUNGS_32
#undef RUNGS_WGMMA
#undef RUNGS_SOURCES
}

}  // namespace ptx

// A tile in shared memory as wgmma takes it, under TMA's 128-byte swizzle (PTX ISA, "Matrix Descriptor Format"): rows
// of 128 bytes, eight rows a pattern of 1,024 bytes, to which the tile is aligned. `next_eight` is the way from eight
// rows to the next eight, `next_chunk` from 64 columns to the next 64 where the rows lie along M or N; along K a tile
// has no more than 64. A step of 16 along K moves the start: inside the pattern where rows lie along K, by 16 rows
// where they do not.
__device__ __forceinline__ ptx::u64 matrix_descriptor(ptx::u32 tile, ptx::u32 next_eight, ptx::u32 next_chunk) {
  constexpr ptx::u64 SWIZZLE_128B = 1;
  return SWIZZLE_128B << 62 | ptx::u64(next_eight >> 4) << 32 | ptx::u64(next_chunk >> 4) << 16 | (tile & 0x3FFFF) >> 4;
}
