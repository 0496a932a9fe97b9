// How many bytes a second the copy engine moves. A CTA is one warp: it keeps `stages` tiles under way in a ring of
// slots, and nothing but the engine is to be a limit.
//
// Loads: a word of each 128-byte line that has landed is added to the CTA's sum, line i giving word i mod 32, so that a
// warp's 32 reads fall into 32 banks and a tile costs tile / 4096 of them. Stores: the slots are filled once, and each
// tile written from the slot whose turn it is. Tiles of a CTA, or of a cluster together: its number, and from there on
// every one that is as many tiles on as there are of them; and the same tiles again in each further pass.
#include "../cluster.cuh"
#include "source.cuh"

enum class Direction { load, store };

constexpr int LANES = 32, LINE = 128;
constexpr Map MAP = Map(VARIANT_MAP);
constexpr Issue ISSUE = Issue(VARIANT_ISSUE);
constexpr Descriptor DESCRIPTOR = Descriptor(VARIANT_DESCRIPTOR);
constexpr Direction DIRECTION = VARIANT_DIRECTION ? Direction::store : Direction::load;
constexpr unsigned SWIZZLE_CHUNKS = VARIANT_SWIZZLE / 16;  // of the span: the hardware XORs that many minus one
constexpr unsigned CLUSTER = VARIANT_MULTICAST;
constexpr unsigned BOX_1D =
    1024;                        // bytes: a box of 256 floats, the most that one instruction moves along one dimension
constexpr unsigned ROWS_3D = 8;  // of a slice
using TileSource = Source<MAP != Map::bulk, DESCRIPTOR>;

static_assert(CLUSTER == 1 || (MAP == Map::tensor_2d && DIRECTION == Direction::load), "only 2D loads are multicast");
static_assert(DIRECTION == Direction::load || MAP == Map::bulk || MAP == Map::tensor_2d,
              "1D and 3D maps are only loaded");

// Run-time numbers of a launch, the same for every variant.
struct Shape {
  unsigned tiles, passes, tile_bytes, stages;
  unsigned columns_log2;  // tiles side by side in the tensor, of a 2D and a 3D map
  unsigned box_x, box_y;  // of a tile, in floats and rows; a multicast takes box_y / CLUSTER at a time
  const float* fill;      // what the slots hold before they are stored
};

// The tiles of this CTA, one after the other.
struct Walk {
  const unsigned first = blockIdx.x / CLUSTER, step = gridDim.x / CLUSTER, tiles;
  unsigned tile = first;

  __device__ __forceinline__ explicit Walk(unsigned tiles) : tiles(tiles) {}

  __device__ __forceinline__ unsigned count() const { return first < tiles ? (tiles - 1 - first) / step + 1 : 0; }

  __device__ __forceinline__ void advance() {
    tile += step;
    if (tile >= tiles) tile = first;
  }
};

struct Ring {
  const TileSource& source;
  const Shape& shape;
  const unsigned lane = threadIdx.x;
  unsigned slots, full, empty;  // addresses in shared memory

  __device__ __forceinline__ Ring(const TileSource& source, const Shape& shape, unsigned char* bytes)
      : source(source),
        shape(shape),
        slots(ptx::shared_address(bytes)),
        full(slots + shape.stages * shape.tile_bytes),
        empty(full + shape.stages * 8) {}

  __device__ __forceinline__ unsigned slot_address(unsigned slot) const { return slots + slot * shape.tile_bytes; }

  __device__ __forceinline__ int x_of(unsigned tile) const {
    return (tile & ((1u << shape.columns_log2) - 1)) * shape.box_x;
  }

  __device__ __forceinline__ int y_of(unsigned tile) const { return (tile >> shape.columns_log2) * shape.box_y; }

  __device__ __forceinline__ unsigned char* bytes_of(unsigned tile) const {
    return source.bytes() + static_cast<unsigned long long>(tile) * shape.tile_bytes;
  }

  // ---- loads ----

  __device__ __forceinline__ void init_barriers() {
    if (chosen<ISSUE>()) {
#pragma unroll 1
      for (unsigned s = 0; s < shape.stages; ++s) {
        ptx::mbarrier_init(full + 8 * s, 1);
        if constexpr (CLUSTER > 1) ptx::mbarrier_init(empty + 8 * s, CLUSTER);
      }
      ptx::fence_mbarrier_init();
    }
    __syncwarp();
  }

  // `more` is 0 and comes from what was read of the slot: without it nothing makes the copy wait for those reads.
  __device__ __forceinline__ void load(unsigned tile, unsigned slot, unsigned more) {
    if (!chosen<ISSUE>()) return;
    const unsigned to = slot_address(slot), barrier = full + 8 * slot;
    ptx::mbarrier_arrive_expect_tx(barrier, shape.tile_bytes + more);
    if constexpr (MAP == Map::bulk) {
      ptx::cp_async_bulk(to, bytes_of(tile), shape.tile_bytes, barrier);
    } else if constexpr (MAP == Map::tensor_1d) {
      const unsigned x = tile * (shape.tile_bytes / 4);
#pragma unroll 1
      for (unsigned at = 0; at < shape.tile_bytes; at += BOX_1D)
        ptx::cp_async_bulk_tensor_1d(to + at, source.tensor_map(), x + at / 4, barrier);
    } else if constexpr (MAP == Map::tensor_3d) {
      ptx::cp_async_bulk_tensor_3d(to, source.tensor_map(), x_of(tile), 0, y_of(tile) / ROWS_3D, barrier);
    } else if constexpr (CLUSTER == 1) {
      ptx::cp_async_bulk_tensor_2d(to, source.tensor_map(), x_of(tile), y_of(tile), barrier);
    } else {
      const unsigned rank = ptx::cluster_ctarank();
      ptx::cp_async_bulk_tensor_2d_multicast(to + rank * (shape.tile_bytes / CLUSTER), source.tensor_map(), x_of(tile),
                                             y_of(tile) + rank * (shape.box_y / CLUSTER), barrier, (1 << CLUSTER) - 1);
    }
  }

  // Word i mod 32 of line i, wherever the swizzle has put its 16-byte chunk.
  __device__ __forceinline__ float add_lines(unsigned slot, float sum) const {
    const unsigned moved = SWIZZLE_CHUNKS ? lane & (SWIZZLE_CHUNKS - 1) : 0;
    const unsigned at = slot_address(slot) + lane * LINE + ((lane ^ (moved << 2)) << 2);
#pragma unroll 1
    for (unsigned line = 0; line + lane * LINE < shape.tile_bytes; line += LANES * LINE)
      sum += __uint_as_float(ptx::ld_shared_u32(at + line));
    return sum;
  }

  __device__ __forceinline__ float run_loads() {
    init_barriers();
    if constexpr (CLUSTER > 1) {
      ptx::barrier_cluster_arrive();
      ptx::barrier_cluster_wait();
    }
    Walk next(shape.tiles);
    const unsigned count = next.count() * shape.passes;
#pragma unroll 1
    for (unsigned s = 0; s < min(shape.stages, count); ++s) {
      load(next.tile, s, 0);
      next.advance();
    }

    float sum = 0;
    unsigned slot = 0, parity = 0;
#pragma unroll 1
    for (unsigned left = count; left > 0; --left) {
      wait_full(full + 8 * slot, parity);
      sum = add_lines(slot, sum);
      const unsigned more = __float_as_uint(sum) & (shape.tiles >> 31);
      __syncwarp();
      if constexpr (CLUSTER > 1) {
        // The slot is free here: says so to every CTA of the cluster, and waits until all have said it.
        if (lane < CLUSTER) ptx::mbarrier_arrive_cluster(ptx::mapa(empty + 8 * slot, lane), 1 + more);
        __syncwarp();
      }
      if (left > shape.stages) {
        if constexpr (CLUSTER > 1) wait_full(empty + 8 * slot, parity);
        load(next.tile, slot, more);
        next.advance();
      }
      if (++slot == shape.stages) {
        slot = 0;
        parity ^= 1;
      }
    }
    if constexpr (CLUSTER > 1) {  // nobody leaves while another may still arrive at its barriers
      ptx::barrier_cluster_arrive();
      ptx::barrier_cluster_wait();
    }
    return sum;
  }

  // ---- stores ----

  __device__ __forceinline__ void store(unsigned tile, unsigned slot) {
    if constexpr (MAP == Map::bulk)
      ptx::cp_async_bulk_store(bytes_of(tile), slot_address(slot), shape.tile_bytes);
    else if constexpr (MAP == Map::tensor_2d)
      ptx::cp_async_bulk_tensor_2d_store(source.tensor_map(), x_of(tile), y_of(tile), slot_address(slot));
    ptx::cp_async_bulk_commit_group();
  }

  // At most STAGES groups under way: before the next is issued, the oldest has read its slot.
  template <int STAGES>
  __device__ __forceinline__ void store_all() {
    Walk next(shape.tiles);
    unsigned slot = 0;
#pragma unroll 1
    for (unsigned left = next.count() * shape.passes; left > 0; --left) {
      store(next.tile, slot);
      next.advance();
      ptx::cp_async_bulk_wait_group_read<STAGES - 1>();
      if (++slot == STAGES) slot = 0;
    }
    ptx::cp_async_bulk_wait_group<0>();
  }

  __device__ __forceinline__ void run_stores() {
    const unsigned char* from = reinterpret_cast<const unsigned char*>(shape.fill);
#pragma unroll 1
    for (unsigned at = lane * 16; at < shape.stages * shape.tile_bytes; at += LANES * 16)
      ptx::st_shared_v4(slots + at, ptx::ld_global_v4(from + at));
    ptx::fence_proxy_async_shared();
    __syncwarp();
    if (!chosen<ISSUE>()) return;
    // No switch: a jump through a table would hide from the disassembly what can be reached.
    if (shape.stages < 4) {
      if (shape.stages == 1)
        store_all<1>();
      else
        store_all<2>();
    } else {
      if (shape.stages == 4)
        store_all<4>();
      else
        store_all<8>();
    }
  }
};

// grid = CTAs per SM x SMs; block = 32 threads; dynamic shared memory >= stages x (tile_bytes + 8, or + 16 in a
// cluster). `sums` has a float for each CTA; a store has no use for it.
extern "C" __global__ void __launch_bounds__(LANES)
    tma_wall(const __grid_constant__ TileSource source, float* sums, const float* fill, unsigned tiles, unsigned passes,
             unsigned tile_bytes, unsigned stages, unsigned columns_log2, unsigned box_x, unsigned box_y) {
  extern __shared__ __align__(1024) unsigned char bytes[];
  const Shape shape = {tiles, passes, tile_bytes, stages, columns_log2, box_x, box_y, fill};
  Ring ring{source, shape, bytes};
  if (DESCRIPTOR != Descriptor::by_value && chosen<ISSUE>()) make_ready<DESCRIPTOR>(source.tensor_map());
  if constexpr (DIRECTION == Direction::store) {
    ring.run_stores();
  } else {
    float sum = ring.run_loads();
#pragma unroll
    for (int other = LANES / 2; other > 0; other /= 2) sum += __shfl_xor_sync(0xffffffff, sum, other);
    if (ring.lane == 0) sums[blockIdx.x] = sum;
  }
}
