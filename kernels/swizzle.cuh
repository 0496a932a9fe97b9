// Where a 16-byte chunk of a shared-memory tile lies. One function serves the stores, the loads and (as `swizzle_bytes`
// in the plan) the tensor map, so the image is the same byte for byte whichever way it was loaded.
#pragma once

// Shared memory has 32 banks of 4 bytes: 128 bytes a wavefront, eight chunks. ldmatrix reads eight rows per phase, one
// chunk each; unswizzled, rows of 64 B put every second row on the same banks (4 wavefronts for a phase), rows of 128 B
// put all eight there (8 wavefronts). XOR-ing the chunk index with the row spreads the eight rows over all 32 banks.
// These are TMA's own patterns: CU_TENSOR_MAP_SWIZZLE_64B takes address bits 7..8, SWIZZLE_128B bits 7..9, and XORs
// them onto the chunk bits from 4 up (PTX ISA, "swizzling modes"). The base of the tile must be aligned to the
// pattern's period: 512 B and 1024 B.
template <int ROW_BYTES, bool SWIZZLED>
__device__ __forceinline__ unsigned chunk_offset(unsigned row, unsigned chunk) {
  static_assert(ROW_BYTES == 64 || ROW_BYTES == 128,
                "a swizzled row is 64 or 128 bytes: TMA has no pattern for this one");
  if constexpr (SWIZZLED) chunk ^= ROW_BYTES == 64 ? (row >> 1) & 3 : row & 7;
  return row * ROW_BYTES + chunk * 16;
}
