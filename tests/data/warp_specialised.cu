// A compact warp-specialised GEMM of sm_90a for the emulator's tests: C[M][N] = A[M][K] * B[N][K]^T, bf16 in and out.
//
// A persistent grid of clusters of two CTAs, which take tiles of 128x128 above each other and share B: each loads its half and
// multicasts it. Warpgroup 0 loads, 1 and 2 multiply 64 rows each. M is a multiple of 256, N of 128, K of 64.
#include "cluster.cuh"
#include "copy_engine.cuh"
#include "mma.cuh"

using ptx::u16;
using ptx::u32;
using ptx::u64;

constexpr int BM = 128, BN = 128, BK = 64, STAGES = 4, CONSUMERS = 2, ROWS = BM / CONSUMERS;
constexpr u32 CTAS = 2;

struct alignas(1024) Shared {
  struct {
    unsigned char a[BM * BK * 2], b[BN * BK * 2];
  } stage[STAGES];
  unsigned char c[CONSUMERS][2][ROWS * 128];  // boxes of 64 columns
  u64 full[STAGES], empty[STAGES];
};

// Rows of 128 bytes under the 128-byte swizzle, eight of them 1024 bytes.
__device__ __forceinline__ u64 descriptor(u32 address) {
  return u64(address & 0x3ffff) >> 4 | u64(1) << 16 | u64(64) << 32 | u64(1) << 62;
}

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit_group() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING>
__device__ __forceinline__ void wgmma_wait_group() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

#define D4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define D16(i) D4(i), D4(i + 4), D4(i + 8), D4(i + 12)
__device__ __forceinline__ void wgmma_m64n128k16(float (&d)[64], u64 a, u64 b, u32 adds) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.b32 p, %66, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, %64, %65, p, 1, 1, 0, 0;\n"
      "}\n"
      : D16(0), D16(16), D16(32), D16(48)
      : "l"(a), "l"(b), "r"(adds));
}

__device__ __forceinline__ void wait(u64& barrier, u32 parity) {
  while (!ptx::mbarrier_try_wait_parity(ptx::shared_address(&barrier), parity)) {
  }
}

struct Place {
  int stage = 0;
  u32 parity = 0;
  __device__ __forceinline__ void advance() {
    if (++stage == STAGES) stage = 0, parity ^= 1;
  }
};

struct Gemm {
  Shared& shared;
  const ptx::TensorMap &a, &b, &c;
  const u32 m, n, k, rank;
  u32 m0 = 0, n0 = 0;
  Place at = {};

  template <class Do>
  __device__ __forceinline__ void for_each_tile(Do run) {
    const u32 pairs = m / (CTAS * BM);
    for (u32 tile = blockIdx.x / CTAS; tile < pairs * (n / BN); tile += gridDim.x / CTAS) {
      m0 = (tile % pairs * CTAS + rank) * BM, n0 = tile / pairs * BN;
      run();
    }
  }

  __device__ __forceinline__ void load() {
#pragma unroll 1
    for (u32 t = 0; t < k / BK; ++t, at.advance()) {
      wait(shared.empty[at.stage], at.parity ^ 1);
      auto& stage = shared.stage[at.stage];
      const u32 full = ptx::shared_address(&shared.full[at.stage]), half = rank * (BN / CTAS);
      ptx::mbarrier_arrive_expect_tx(full, sizeof stage);
      ptx::cp_async_bulk_tensor_2d(ptx::shared_address(stage.a), &a, t * BK, m0, full);
      ptx::cp_async_bulk_tensor_2d_multicast(ptx::shared_address(stage.b) + half * BK * 2, &b, t * BK, n0 + half, full,
                                             (1 << CTAS) - 1);
    }
  }

  // This warpgroup has read the stage: both producers may load it anew.
  __device__ __forceinline__ void release(int stage) {
    if (threadIdx.x % 128 < CTAS)
      ptx::mbarrier_arrive_cluster(ptx::mapa(ptx::shared_address(&shared.empty[stage]), threadIdx.x % 128), 1);
  }

  __device__ __forceinline__ void multiply(float (&d)[64], u32 consumer) {
    int before = 0;
#pragma unroll 1
    for (u32 t = 0; t < k / BK; ++t) {
      wait(shared.full[at.stage], at.parity);
      const auto& stage = shared.stage[at.stage];
      const u64 left = descriptor(ptx::shared_address(stage.a) + consumer * ROWS * BK * 2);
      const u64 right = descriptor(ptx::shared_address(stage.b));
      wgmma_fence();
#pragma unroll
      for (int step = 0; step < BK / 16; ++step) wgmma_m64n128k16(d, left + 2 * step, right + 2 * step, t > 0 || step > 0);
      wgmma_commit_group();
      wgmma_wait_group<1>();
      if (t > 0) release(before);
      before = at.stage;
      at.advance();
    }
    wgmma_wait_group<0>();
    release(before);
  }

  __device__ __forceinline__ void store(const float (&d)[64], u32 consumer) {
    const u32 warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32, row = 16 * warp + lane % 16;
    const u32 box = ptx::shared_address(shared.c[consumer]);
    if (threadIdx.x % 128 == 0) ptx::cp_async_bulk_wait_group_read<0>();
    ptx::bar_sync(1 + consumer, 128);
#pragma unroll
    for (int j = 0; j < BN / 8; j += 2) {
      const u32 chunk = j + lane / 16;
      ptx::stmatrix_x4(box + chunk / 8 * ROWS * 128 + row * 128 + (chunk % 8 ^ row % 8) * 16,
                       {pack_bf16x2(d[4 * j], d[4 * j + 1]), pack_bf16x2(d[4 * j + 2], d[4 * j + 3]),
                        pack_bf16x2(d[4 * j + 4], d[4 * j + 5]), pack_bf16x2(d[4 * j + 6], d[4 * j + 7])});
    }
    ptx::fence_proxy_async_shared();
    ptx::bar_sync(1 + consumer, 128);
    if (threadIdx.x % 128 == 0) {
      ptx::cp_async_bulk_tensor_2d_store(&c, n0, m0 + consumer * ROWS, box);
      ptx::cp_async_bulk_tensor_2d_store(&c, n0 + 64, m0 + consumer * ROWS, box + ROWS * 128);
      ptx::cp_async_bulk_commit_group();
    }
  }

  __device__ __forceinline__ void run() {
    if (threadIdx.x == 0) {
      for (int stage = 0; stage < STAGES; ++stage) {
        ptx::mbarrier_init(ptx::shared_address(&shared.full[stage]), 1);
        ptx::mbarrier_init(ptx::shared_address(&shared.empty[stage]), CTAS * CONSUMERS);
      }
      ptx::fence_mbarrier_init();
    }
    ptx::barrier_cluster_arrive();
    ptx::barrier_cluster_wait();
    if (threadIdx.x < 128) {
      ptx::setmaxnreg_dec<40>();
      if (threadIdx.x < 32 && ptx::elect_sync()) for_each_tile([&] { load(); });
    } else {
      ptx::setmaxnreg_inc<232>();
      for_each_tile([&] {
        float d[64];
        multiply(d, threadIdx.x / 128 - 1);
        store(d, threadIdx.x / 128 - 1);
      });
      if (threadIdx.x % 128 == 0) ptx::cp_async_bulk_wait_group<0>();
    }
    __syncwarp();
    ptx::barrier_cluster_arrive();
    ptx::barrier_cluster_wait();
  }
};

extern "C" __global__ void __launch_bounds__(384, 1)
    warp_specialised(const __grid_constant__ ptx::TensorMap a, const __grid_constant__ ptx::TensorMap b,
                     const __grid_constant__ ptx::TensorMap c, u32 m, u32 n, u32 k) {
  extern __shared__ __align__(1024) unsigned char bytes[];
  Gemm{*reinterpret_cast<Shared*>(bytes), a, b, c, m, n, k, ptx::cluster_ctarank()}.run();
}
