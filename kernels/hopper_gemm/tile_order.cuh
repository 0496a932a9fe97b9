// In which order the tiles of C are walked: what the CTAs in flight share of A and B in L2.
#pragma once

enum class Order { row, grouped, hilbert };

constexpr unsigned BAND = 8;  // tile rows that are walked together

struct TilePlace {
  unsigned row, column;
};

// The d-th place of the Hilbert curve over 8 x 8, from (0, 0) to (0, 7): each place is next to the one before it, also
// from one square to the square on its right.
__device__ __forceinline__ TilePlace hilbert_place(unsigned d) {
  unsigned x = 0, y = 0;
#pragma unroll
  for (unsigned side = 1; side < BAND; side *= 2, d /= 4) {
    const unsigned right = d / 2 & 1, up = (d ^ right) & 1;
    if (!up) {
      if (right) {
        x = side - 1 - x;
        y = side - 1 - y;
      }
      const unsigned held = x;
      x = y;
      y = held;
    }
    x += side * right;
    y += side * up;
  }
  return {y, x};
}

// Tile number `tile` of rows x columns. Grouped: bands of eight rows, column by column. Hilbert: the same bands, in
// squares of eight columns; what no square fits in (the last band, the last columns) as grouped.
template <Order ORDER>
__device__ __forceinline__ TilePlace place_tile(unsigned tile, unsigned rows, unsigned columns) {
  if constexpr (ORDER == Order::row) {
    return {tile / columns, tile % columns};
  } else {
    const unsigned first = tile / (BAND * columns) * BAND, height = min(rows - first, BAND),
                   within = tile % (BAND * columns);
    if (ORDER == Order::hilbert && height == BAND && within / (BAND * BAND) < columns / BAND) {
      const TilePlace in_square = hilbert_place(within % (BAND * BAND));
      return {first + in_square.row, within / (BAND * BAND) * BAND + in_square.column};
    }
    return {first + within % height, within / height};
  }
}
