// Nothing but mma.sync: eight warps, 32 independent accumulators each, operands that stay in registers.
#include "../kernels/mma.cuh"

constexpr int ROWS = 4, COLUMNS = 8;

// grid = SMs, block = 256; `sums` has a float for each thread, `cycles` one entry for each block.
extern "C" __global__ void __launch_bounds__(256, 1) mma_peak(float* sums, long long* cycles, int iterations) {
  float acc[ROWS][COLUMNS][4] = {};
  ptx::u32 a[ROWS][4], b[COLUMNS][2], state = threadIdx.x * 2654435761u + blockIdx.x * 40503u + 1;
  // bf16 pairs of either sign and any mantissa between 0.5 and 1: what the tensor cores draw depends on their inputs.
  auto draw = [&] {
    state ^= state << 13, state ^= state >> 17, state ^= state << 5;
    return (state & 0x807f807fu) | 0x3f003f00u;
  };
  for (auto& fragment : a)
    for (auto& pair : fragment) pair = draw();
  for (auto& fragment : b)
    for (auto& pair : fragment) pair = draw();
  __syncthreads();
  const long long start = clock64();
#pragma unroll 1
  for (int iteration = 0; iteration < iterations; ++iteration)
#pragma unroll
    for (int i = 0; i < ROWS; ++i)
#pragma unroll
      for (int j = 0; j < COLUMNS; ++j) mma_m16n8k16_bf16(acc[i][j], a[i], b[j]);
  __syncthreads();
  if (threadIdx.x == 0) cycles[blockIdx.x] = clock64() - start;
  float sum = 0;
  for (auto& row : acc)
    for (auto& fragment : row)
      for (float value : fragment) sum += value;
  sums[blockIdx.x * blockDim.x + threadIdx.x] = sum;
}
