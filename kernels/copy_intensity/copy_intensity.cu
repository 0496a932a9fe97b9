// Takes a payload of floats tile by tile, works on each element `fma_iters` times and writes it out: when does it
// matter how a tile is loaded? Only `Fill` differs between the levels of `load`, `stages` and `producer`; reading the
// stage, the arithmetic and the store are the same in all.
#include "fill.cuh"
#if VARIANT_LOAD == 4 || VARIANT_LOAD == 5
#include "fill_cccl.cuh"
#endif

// Four independent chains of fused multiply-adds for each chunk that the thread holds.
__device__ __forceinline__ void multiply_add(Values& values, unsigned fma_iters, float scale, float offset) {
#pragma unroll 4
  for (unsigned i = 0; i < fma_iters; ++i)
#pragma unroll
    for (float4& v : values) {
      v.x = fmaf(v.x, scale, offset);
      v.y = fmaf(v.y, scale, offset);
      v.z = fmaf(v.z, scale, offset);
      v.w = fmaf(v.w, scale, offset);
    }
}

__device__ __forceinline__ void store(unsigned char* target, float4 v) {
  ptx::st_global_v4(target, {__float_as_uint(v.x), __float_as_uint(v.y), __float_as_uint(v.z), __float_as_uint(v.w)});
}

template <Load LOADED, bool WRITE>
__device__ __forceinline__ void move(const Payload<LOADED>& payload, unsigned char* output, unsigned tiles,
                                     unsigned fma_iters, float scale, float offset) {
  extern __shared__ __align__(128) unsigned char bytes[];
  Walk walk{blockIdx.x, tiles, gridDim.x};
  Fill<LOADED> fill(bytes, payload);
  fill.start(walk);
  if constexpr (PRODUCER_WARP)
    if (fill.produces()) return fill.produce(walk);

  float4 sum = {};  // of all that this thread has worked on, where the tiles are not written
#pragma unroll 1
  for (bool first = true; walk.has(0); walk.tile += walk.step, first = false) {
    Values values;
    fill.enter(walk, first);
    fill.read(values, walk);
    fill.leave(values, walk);
    if (!reads()) continue;
    multiply_add(values, fma_iters, scale, offset);
#pragma unroll
    for (int i = 0; i < PER_THREAD; ++i) {
      if constexpr (WRITE) {
        store(output + walk.offset(0) + worked_on(i), values[i]);
      } else {
        sum.x += values[i].x;
        sum.y += values[i].y;
        sum.z += values[i].z;
        sum.w += values[i].w;
      }
    }
  }
  if (!WRITE && reads()) store(output + CHUNK * READERS * blockIdx.x + worked_on(0), sum);
}

// grid: any number of CTAs, which share the tiles out among themselves; block = BLOCK_THREADS, and a producer warp
// where there is one; dynamic shared memory >= sizeof(Shared), for `direct` none. The payload is `tiles` whole tiles;
// `output` is as large, or without writing READERS float4 for each CTA.
extern "C" __global__ void __launch_bounds__(BLOCK_THREADS + 32 * PRODUCER_WARP)
    copy_intensity(const __grid_constant__ Payload<LOAD> payload, unsigned char* output, unsigned tiles,
                   unsigned fma_iters, float scale, float offset) {
  move<LOAD, bool(VARIANT_WRITE)>(payload, output, tiles, fma_iters, scale, offset);
}
