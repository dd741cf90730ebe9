// y = x W^T with int8 matrices, a scale for each of their rows, and tokens rounded to int8 likewise. Sums are integers, so
// exact in any order.
//
// A panel: 16 rows of W, two columns at a time, [in / 2, 16, 2]. Pairs widen to int16, and one instruction multiplies
// two pairs and adds up their products.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "linear/panels.h"
#include "linear/tasks.h"
#include "linear/tokens.h"
#include "native/vectors.h"
#include "xla/ffi/api/ffi.h"

namespace native::linear {

namespace ffi = xla::ffi;

constexpr int64_t kDepthPairs = 2048;  // of columns between two visits to the same token

typedef int8_t Chars __attribute__((vector_size(2 * kLanes)));
typedef int16_t Shorts __attribute__((vector_size(2 * kLanes)));
typedef int16_t Pairs __attribute__((vector_size(4 * kLanes)));  // one a lane of `Ints`

inline Pairs load_pairs(const int8_t* from) {
  Chars chars;
  std::memcpy(&chars, from, sizeof chars);
  return __builtin_convertvector(chars, Pairs);
}

// sums + the product of each pair. No pair of int8 overflows an int32.
inline Ints add_products(Pairs a, Pairs b, Ints sums) {
#if defined(__AVX2__)
  return sums + (Ints)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#else
  const Ints x = (Ints)a, y = (Ints)b;  // an arithmetic shift is a number of its own sign
  return sums + ((x << 16) >> 16) * ((y << 16) >> 16) + (x >> 16) * (y >> 16);
#endif
}

// What matrices are multiplied with.
struct Int8Tokens {
  std::shared_ptr<std::vector<int16_t>> x;    // [count, in]
  std::shared_ptr<std::vector<float>> scales;  // [count]
  int64_t count, in;
};

inline Vec magnitude(Vec v) {
  Bits bits;
  std::memcpy(&bits, &v, sizeof bits);
  return vector_of(bits & 0x7fffffffu);
}

// To the nearest integer, ties to even, of magnitudes up to 2^22.
template <typename T>
inline T to_integer(T v) {
  constexpr float kNoFraction = 3 << 22;  // beside it a float has no room for one
  return (v + kNoFraction) - kNoFraction;
}

// x ~ numbers * scale, with the scale that maps the largest magnitude to 127. Returns the scale: NaN where a number is
// not finite.
inline float round_token(const float* x, int64_t in, int16_t* numbers) {
  const int64_t whole = in / kLanes * kLanes;
  Vec most = all(0), spoilt = all(0);
  for (int64_t i = 0; i < whole; i += kLanes) {
    const Vec v = load(x + i), size = magnitude(v);
    most = size > most ? size : most;
    spoilt += v * 0.f;  // NaN, if v is not finite
  }
  float largest = 0, not_finite = sum(spoilt);
  for (int i = 0; i < kLanes; ++i) largest = std::max(largest, most[i]);
  for (int64_t i = whole; i < in; ++i) {
    largest = std::max(largest, std::fabs(x[i]));
    not_finite += x[i] * 0.f;
  }
  const float scale = not_finite == 0 ? largest / 127 : NAN;
  if (!(scale > 0)) {
    std::fill(numbers, numbers + in, int16_t(0));
    return scale;
  }
  for (int64_t i = 0; i < whole; i += kLanes) {
    const auto rounded = __builtin_convertvector(__builtin_convertvector(to_integer(load(x + i) / scale), Ints), Shorts);
    std::memcpy(numbers + i, &rounded, sizeof rounded);
  }
  for (int64_t i = whole; i < in; ++i) numbers[i] = int16_t(to_integer(x[i] / scale));
  return scale;
}

template <typename Y>
struct Int8Matrix {
  const int8_t* panels;  // [out / 16, in / 2, 16, 2]
  const float* scales;   // [out]
  Y* y;                  // [count, out]
  int64_t out;
};

// Pairs from .. to of a panel and of kM tokens join their sums [kM, 16].
template <int kM>
inline void add_pairs(const int16_t* x, int64_t in, const int8_t* panel, int64_t from, int64_t to, int32_t* sums) {
  Ints acc[kM][2];
  std::memcpy(acc, sums, sizeof acc);
  for (int64_t k = from; k < to; ++k) {
    const int8_t* column = panel + 2 * kPanel * k;
    const Pairs a = load_pairs(column), b = load_pairs(column + 2 * kLanes);
    for (int m = 0; m < kM; ++m) {
      int32_t pair;
      std::memcpy(&pair, x + m * in + 2 * k, sizeof pair);
      const Pairs token = (Pairs)Ints{pair, pair, pair, pair, pair, pair, pair, pair};
      acc[m][0] = add_products(a, token, acc[m][0]);
      acc[m][1] = add_products(b, token, acc[m][1]);
    }
  }
  std::memcpy(sums, acc, sizeof acc);
}

inline void add_pairs_of(
    int64_t count, const int16_t* x, int64_t in, const int8_t* panel, int64_t from, int64_t to, int32_t* sums) {
  switch (count) {
    case 6: return add_pairs<6>(x, in, panel, from, to, sums);
    case 5: return add_pairs<5>(x, in, panel, from, to, sums);
    case 4: return add_pairs<4>(x, in, panel, from, to, sums);
    case 3: return add_pairs<3>(x, in, panel, from, to, sums);
    case 2: return add_pairs<2>(x, in, panel, from, to, sums);
    default: return add_pairs<1>(x, in, panel, from, to, sums);
  }
}

// A panel's 16 columns of y, from column `row` on.
template <typename Y>
void multiply_int8_panel(const Int8Tokens& tokens, const Int8Matrix<Y>& matrix, int64_t row) {
  thread_local std::vector<int32_t> sums;
  sums.assign(tokens.count * kPanel, 0);
  const int8_t* panel = matrix.panels + row * tokens.in;
  const int64_t pairs = tokens.in / 2;
  const int64_t tiles = (tokens.count + kTokens - 1) / kTokens;  // about equally large
  for (int64_t from = 0; from < pairs; from += kDepthPairs)
    for (int64_t i = 0; i < tiles; ++i) {
      const int64_t first = tokens.count * i / tiles, end = tokens.count * (i + 1) / tiles;
      add_pairs_of(end - first, tokens.x->data() + first * tokens.in, tokens.in, panel, from,
                   std::min(pairs, from + kDepthPairs), &sums[first * kPanel]);
    }
  const Vec low = load(matrix.scales + row), high = load(matrix.scales + row + kLanes);
  for (int64_t t = 0; t < tokens.count; ++t) {
    Ints a, b;
    std::memcpy(&a, &sums[t * kPanel], sizeof a);
    std::memcpy(&b, &sums[t * kPanel + kLanes], sizeof b);
    const Vec scale = all((*tokens.scales)[t]);
    Y* to = matrix.y + t * matrix.out + row;
    store(to, __builtin_convertvector(a, Vec) * (scale * low));
    store(to + kLanes, __builtin_convertvector(b, Vec) * (scale * high));
  }
}

// Matrices and their scales in turn; a result for each.
template <typename T, typename Buffer>
ffi::Error run_int8_panels(ffi::ThreadPool pool, Buffer x, ffi::RemainingArgs ws, ffi::RemainingRets ys) {
  std::vector<Int8Matrix<T>> matrices;
  for (size_t i = 0; i < ys.size(); ++i) {
    auto w = ws.get<ffi::Buffer<ffi::S8>>(2 * i);
    auto scales = ws.get<ffi::Buffer<ffi::F32>>(2 * i + 1);
    auto y = ys.get<Buffer>(i);
    if (w.has_error()) return w.error();
    if (scales.has_error()) return scales.error();
    if (y.has_error()) return y.error();
    matrices.push_back({w->typed_data(), scales->typed_data(), reinterpret_cast<T*>((*y)->untyped_data()),
                        w->dimensions()[0] * kPanel});
  }
  const int64_t in = x.dimensions().back(), count = in ? int64_t(x.element_count()) / in : 0;
  const Tokens wide = tokens_of(reinterpret_cast<const T*>(x.untyped_data()), count, in);
  Int8Tokens tokens{std::make_shared<std::vector<int16_t>>(count * in), std::make_shared<std::vector<float>>(count),
                    count, in};
  for (int64_t t = 0; t < count; ++t)
    (*tokens.scales)[t] = round_token(wide.x + t * in, in, tokens.x->data() + t * in);
  multiply_all(pool, tokens, std::move(matrices), [](const Int8Tokens& t, const Int8Matrix<T>& m, int64_t row, int64_t) {
    multiply_int8_panel(t, m, row);
  });
  return ffi::Error::Success();
}

}  // namespace native::linear
