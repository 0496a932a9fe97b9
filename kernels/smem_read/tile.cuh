// The tile in shared memory, and where each lane of each access reads it. rungs/workloads/smem_read.py works the same
// out from what the instructions mean.
#pragma once

#include "../shared_reads.cuh"
#include "../swizzle.cuh"

using ptx::u32;

// `a` and `b_n_by_k` have K along the rows, `b_k_by_n` has N. The numbers are the variant's levels.
enum class Tile { a_32 = 0, a_64 = 1, b_n_by_k = 2, b_k_by_n = 3 };
enum class Layout { plain = 0, xor_64 = 1, xor_128 = 2, pad_8 = 3 };
enum class Read { lds_u16, lds_32, lds_64, lds_128, x1, x2, x4, x1_trans, x2_trans, x4_trans };
enum class Order { fragment = 0, rows = 1 };

constexpr Tile TILE = Tile(VARIANT_TILE);
constexpr Layout LAYOUT = Layout(VARIANT_LAYOUT);
constexpr Read READ = Read(VARIANT_READ);
constexpr Order ORDER = Order(VARIANT_ORDER);
constexpr bool DEPENDENT = VARIANT_DEPENDENT;

constexpr unsigned CHUNK = 16;  // bytes that are staged at once, and the unit of the XOR
constexpr unsigned ROWS = TILE_ROWS, ROW_BYTES = TILE_COLUMNS * 2, ROW_CHUNKS = ROW_BYTES / CHUNK;
constexpr bool TRANSPOSED = TILE == Tile::b_k_by_n;
constexpr bool SWIZZLED = LAYOUT == Layout::xor_64 || LAYOUT == Layout::xor_128;
// Rows of 256 B have no XOR of their own: they are split into panels of 128 B, as TMA has to bring them.
constexpr unsigned PANEL_BYTES = SWIZZLED && ROW_BYTES > 128 ? 128 : ROW_BYTES, PANEL_CHUNKS = PANEL_BYTES / CHUNK;
constexpr unsigned STRIDE = PANEL_BYTES + (LAYOUT == Layout::pad_8 ? CHUNK : 0);

static_assert(LAYOUT != Layout::xor_64 || PANEL_BYTES == 64, "XOR 64 B is the pattern of rows of 64 bytes");
static_assert(LAYOUT != Layout::xor_128 || PANEL_BYTES == 128, "XOR 128 B is the pattern of rows of 128 bytes");

// Where a chunk of the tile lies, in bytes from the tile's start.
__device__ __forceinline__ unsigned offset(unsigned row, unsigned chunk) {
  if constexpr (SWIZZLED)
    return chunk / PANEL_CHUNKS * (ROWS * PANEL_BYTES) + chunk_offset<PANEL_BYTES, true>(row, chunk % PANEL_CHUNKS);
  else
    return row * STRIDE + chunk * CHUNK;
}

constexpr bool LDMATRIX = READ >= Read::x1;
// Registers that one access fills, and the bytes it delivers to the 32 lanes.
constexpr unsigned REGISTERS = READ == Read::lds_64 || READ == Read::x2 || READ == Read::x2_trans    ? 2
                               : READ == Read::lds_128 || READ == Read::x4 || READ == Read::x4_trans ? 4
                                                                                                     : 1;
constexpr unsigned BYTES = READ == Read::lds_u16 ? 64 : 128 * REGISTERS;
// One pass reads every byte of the tile once.
constexpr unsigned ACCESSES = ROWS * ROW_BYTES / BYTES;
static_assert(ORDER == Order::fragment || LAYOUT == Layout::plain, "row by row is one piece of memory: leave it plain");

// How many 8x8 matrices an ldmatrix reads one below the other, and side by side. A has its second matrix below the
// first and the third beside it, as mma wants them. B has K first: its second matrix is beside the first as N x K, and
// below the first as K x N.
constexpr unsigned DOWN = REGISTERS == 1 ? 1 : TILE == Tile::b_n_by_k ? REGISTERS / 2 : 2, BESIDE = REGISTERS / DOWN;

// What one access covers: DEPTH rows of SPAN chunks. With LDS.U16 two do, whose rows alternate.
constexpr unsigned DEPTH = LDMATRIX ? 8 * DOWN : 8;
constexpr unsigned SPAN = LDMATRIX ? BESIDE : REGISTERS;
constexpr unsigned ACROSS = ROW_CHUNKS / SPAN, HALVES = READ == Read::lds_u16 ? 2 : 1;

// An XOR needs an address for each place in a panel's row; all else is an immediate, since eight rows are its period.
constexpr unsigned BASES = SWIZZLED ? PANEL_CHUNKS / SPAN : 1;

// Where `lane` reads, from the tile's start, in the access that covers rows 0 on and chunks SPAN * `place` on.
__device__ __forceinline__ unsigned base(unsigned lane, unsigned place) {
  const unsigned chunk = place * SPAN;
  if constexpr (LDMATRIX) {
    const unsigned matrix = lane / 8 % REGISTERS;  // x1 and x2 look at the first 8 and 16 lanes only
    const unsigned below = TILE == Tile::b_n_by_k ? matrix / BESIDE : matrix % DOWN;
    const unsigned right = TILE == Tile::b_n_by_k ? matrix % BESIDE : matrix / DOWN;
    return offset(below * 8 + lane % 8, chunk + right);
  } else if constexpr (READ == Read::lds_u16) {
    return offset(lane % 4 * 2, chunk) + lane / 4 * 2;  // K runs down the rows, and this is the low half of a word
  } else if constexpr (ORDER == Order::fragment) {
    // Lane 4g + t is in row g; its four neighbours cover 16, 32 or 64 bytes. With 16 that is mma's own order of K.
    const unsigned byte = lane % 4 * 4 * REGISTERS;
    return offset(lane / 4, chunk + byte / CHUNK) + byte % CHUNK;
  } else {
    return lane * 4 * REGISTERS;
  }
}

// The base of access `index` of a pass, and what is to be added to it.
__device__ constexpr unsigned place_of(unsigned index) {
  const unsigned half = index % HALVES, place = index / HALVES % ACROSS;
  return SWIZZLED ? (place ^ half) % BASES : 0;  // the odd row's XOR differs in its lowest bit
}
__device__ constexpr unsigned immediate(unsigned index) {
  const unsigned half = index % HALVES, place = index / HALVES % ACROSS, group = index / HALVES / ACROSS;
  if (ORDER == Order::rows) return index * BYTES;
  return (SWIZZLED ? place / BASES * ROWS * PANEL_BYTES : place * SPAN * CHUNK) + (group * DEPTH + half) * STRIDE;
}

// Which sum a register of access `index` goes to: one for each of four places across, high halves apart from low ones.
__device__ constexpr unsigned sum_of(unsigned index, unsigned r) {
  const unsigned half = index % HALVES, place = index / HALVES % ACROSS;
  if (ORDER == Order::rows) return index % 4;
  if (!LDMATRIX) return 4 * half + place % 4;
  return (place * BESIDE + (TILE == Tile::b_n_by_k ? r % BESIDE : r / DOWN)) % 4;
}

// One access; the registers that it does not fill are zero. A chain uses few of them, and ptxas reads no others.
__device__ __forceinline__ uint4 read(u32 at) {
  uint2 two = {};
  if constexpr (READ == Read::lds_128) return DEPENDENT ? ptx::ld_volatile_shared_v4(at) : ptx::ld_shared_v4(at);
  if constexpr (READ == Read::x4) return ptx::ldmatrix_x4(at);
  if constexpr (READ == Read::x4_trans) return ptx::ldmatrix_x4_trans(at);
  if constexpr (READ == Read::lds_64) two = DEPENDENT ? ptx::ld_volatile_shared_v2(at) : ptx::ld_shared_v2(at);
  if constexpr (READ == Read::x2) two = ptx::ldmatrix_x2(at);
  if constexpr (READ == Read::x2_trans) two = ptx::ldmatrix_x2_trans(at);
  if constexpr (READ == Read::lds_u16) two.x = ptx::ld_shared_u16(at);
  if constexpr (READ == Read::lds_32) two.x = ptx::ld_shared_u32(at);
  if constexpr (READ == Read::x1) two.x = ptx::ldmatrix_x1(at);
  if constexpr (READ == Read::x1_trans) two.x = ptx::ldmatrix_x1_trans(at);
  return {two.x, two.y, 0, 0};
}
