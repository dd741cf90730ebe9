// y = x W^T of a panel: 16 rows of W turned so that their numbers of one column lie side by side, [in, 16].
//
// An output is the sum of its products in the order of `in`: its bits depend neither on the number of tokens nor on how
// they are tiled.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "native/vectors.h"

namespace native::linear {

constexpr int kPanel = 16;         // rows of W in a panel: two vectors
constexpr int kTokens = 6;         // of a tile in registers: 12 sums, two vectors of W and a token
constexpr int64_t kDepth = 2048;   // columns of a panel between two visits to the same token, so that they stay cached

// A column of a panel. Float: rows 0 to 7 and 8 to 15. Bfloat16: the even rows and the odd ones, which widen without
// being moved.
inline void load_column(const float* from, Vec& a, Vec& b) {
  a = load(from);
  b = load(from + kLanes);
}

inline void load_column(const Bfloat16* from, Vec& a, Vec& b) {
  Bits pairs;
  std::memcpy(&pairs, from, sizeof pairs);
  a = vector_of(pairs << 16);
  b = vector_of(pairs & 0xffff0000u);
}

// Undoes what `load_column` did to the order.
inline void in_order(const float*, Vec&, Vec&) {}

inline void in_order(const Bfloat16*, Vec& a, Vec& b) {
  Vec low = shuffled<0, 8, 1, 9, 2, 10, 3, 11>(a, b);
  b = shuffled<4, 12, 5, 13, 6, 14, 7, 15>(a, b);
  a = low;
}

// Columns from .. to of a panel and of kM tokens join their sums [kM, 16].
template <int kM, typename W>
inline void add_tile(const float* x, int64_t in, const W* panel, int64_t from, int64_t to, float* sums) {
  Vec acc[kM][2];
  for (int m = 0; m < kM; ++m)
    for (int n = 0; n < 2; ++n) acc[m][n] = load(sums + m * kPanel + n * kLanes);
  for (int64_t k = from; k < to; ++k) {
    Vec a, b;
    load_column(panel + k * kPanel, a, b);
    for (int m = 0; m < kM; ++m) {
      const Vec token = all(x[m * in + k]);
      acc[m][0] = fused(token, a, acc[m][0]);
      acc[m][1] = fused(token, b, acc[m][1]);
    }
  }
  for (int m = 0; m < kM; ++m)
    for (int n = 0; n < 2; ++n) store(sums + m * kPanel + n * kLanes, acc[m][n]);
}

template <typename W>
inline void add_tokens(int64_t count, const float* x, int64_t in, const W* panel, int64_t from, int64_t to, float* sums) {
  switch (count) {
    case 6: return add_tile<6>(x, in, panel, from, to, sums);
    case 5: return add_tile<5>(x, in, panel, from, to, sums);
    case 4: return add_tile<4>(x, in, panel, from, to, sums);
    case 3: return add_tile<3>(x, in, panel, from, to, sums);
    case 2: return add_tile<2>(x, in, panel, from, to, sums);
    default: return add_tile<1>(x, in, panel, from, to, sums);
  }
}

// A panel's first `columns` columns of y.
template <typename W, typename Y>
void multiply_panel(const float* x, int64_t tokens, const W* panel, int64_t in, Y* y, int64_t stride, int columns) {
  thread_local std::vector<float> sums;
  sums.assign(tokens * kPanel, 0.f);
  const int64_t tiles = (tokens + kTokens - 1) / kTokens;  // about equally large
  for (int64_t from = 0; from < in; from += kDepth)
    for (int64_t i = 0; i < tiles; ++i) {
      const int64_t first = tokens * i / tiles, end = tokens * (i + 1) / tiles;
      add_tokens(end - first, x + first * in, in, panel, from, std::min(in, from + kDepth), &sums[first * kPanel]);
    }
  for (int64_t t = 0; t < tokens; ++t) {
    Vec a = load(&sums[t * kPanel]), b = load(&sums[t * kPanel + kLanes]);
    in_order(panel, a, b);
    Y* to = y + t * stride;
    if (columns == kPanel) {
      store(to, a);
      store(to + kLanes, b);
    } else {
      store_some(to, a, std::min(columns, kLanes));
      if (columns > kLanes) store_some(to + kLanes, b, columns - kLanes);
    }
  }
}

// Eight vectors as the rows of a matrix, which is turned.
inline void turn(Vec* v) {
  Vec twos[8], fours[8];
  for (int i = 0; i < 8; i += 2) {
    twos[i] = shuffled<0, 8, 1, 9, 4, 12, 5, 13>(v[i], v[i + 1]);
    twos[i + 1] = shuffled<2, 10, 3, 11, 6, 14, 7, 15>(v[i], v[i + 1]);
  }
  for (int i = 0; i < 8; i += 4)
    for (int j = 0; j < 2; ++j) {
      fours[i + 2 * j] = shuffled<0, 1, 8, 9, 4, 5, 12, 13>(twos[i + j], twos[i + j + 2]);
      fours[i + 2 * j + 1] = shuffled<2, 3, 10, 11, 6, 7, 14, 15>(twos[i + j], twos[i + j + 2]);
    }
  for (int i = 0; i < 4; ++i) {
    v[i] = shuffled<0, 1, 2, 3, 8, 9, 10, 11>(fours[i], fours[i + 4]);
    v[i + 4] = shuffled<4, 5, 6, 7, 12, 13, 14, 15>(fours[i], fours[i + 4]);
  }
}

inline float widened(float x) { return x; }

inline float widened(Bfloat16 x) {
  const uint32_t bits = uint32_t(x.bits) << 16;
  float wide;
  std::memcpy(&wide, &bits, sizeof wide);
  return wide;
}

// Eight rows' next columns, as many as fit into vectors, to a panel's columns.
inline void turn_columns(const float* const* row, int64_t k, float* panel) {
  Vec v[kLanes];
  for (int i = 0; i < kLanes; ++i) v[i] = load(row[i] + k);
  turn(v);
  for (int i = 0; i < kLanes; ++i) store(panel + (k + i) * kPanel, v[i]);
}

inline void turn_columns(const Bfloat16* const* row, int64_t k, float* panel) {
  Vec v[kLanes];  // of pairs
  for (int i = 0; i < kLanes; ++i) std::memcpy(&v[i], row[i] + k, sizeof(Vec));
  turn(v);
  for (int i = 0; i < kLanes; ++i) {
    Bits pairs;
    std::memcpy(&pairs, &v[i], sizeof pairs);
    store(panel + (k + 2 * i) * kPanel, vector_of(pairs << 16));
    store(panel + (k + 2 * i + 1) * kPanel, vector_of(pairs & 0xffff0000u));
  }
}

// Up to 16 rows of W as a panel of floats; where rows are missing the last one stands in.
template <typename W>
void make_panel(const W* w, int64_t rows, int64_t in, float* panel) {
  constexpr int64_t kColumns = sizeof(Vec) / sizeof(W);
  const W* row[kPanel];
  for (int64_t i = 0; i < kPanel; ++i) row[i] = w + std::min(i, rows - 1) * in;
  const int64_t whole = in / kColumns * kColumns;
  for (int64_t k = 0; k < whole; k += kColumns)
    for (int half = 0; half < kPanel; half += kLanes) turn_columns(row + half, k, panel + half);
  for (int64_t k = whole; k < in; ++k)
    for (int i = 0; i < kPanel; ++i) panel[k * kPanel + i] = widened(row[i][k]);
}

}  // namespace native::linear
