// y = x W^T of few tokens for CPUs; W is [out, in].
//
// What counts is to read W once, at the memory's speed. An output is the sum, lane by lane of a vector along `in`, of one
// token's products with one row of W, and then of the lanes: its bits depend neither on the number of tokens nor on how
// they are tiled.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <type_traits>
#include <vector>

#include "native/threads.h"
#include "native/vectors.h"
#include "xla/ffi/api/ffi.h"

namespace native::linear {

namespace ffi = xla::ffi;

constexpr int kTokens = 4, kOuts = 3;  // of a tile in registers: 12 sums, 3 rows of W and a token
constexpr int kTaskOuts = 48;          // rows of W that a task takes
constexpr int kReused = 8;             // so many tokens make it worth while to widen a task's rows of W first

// y[m][n], kM tokens and kN rows of W.
template <int kM, int kN, typename W, typename Y>
inline void multiply_tile(const float* x, const W* w, int64_t in, Y* y, int64_t stride) {
  Vec acc[kM][kN] = {};
  const int64_t whole = in / kLanes * kLanes;
  for (int64_t k = 0; k < whole; k += kLanes) {
    Vec row[kN];
    for (int n = 0; n < kN; ++n) row[n] = load(w + n * in + k);
    for (int m = 0; m < kM; ++m) {
      Vec token = load(x + m * in + k);
      for (int n = 0; n < kN; ++n) acc[m][n] = fused(token, row[n], acc[m][n]);
    }
  }
  if (const int64_t left = in - whole)
    for (int m = 0; m < kM; ++m)
      for (int n = 0; n < kN; ++n)
        acc[m][n] = fused(load_some(x + m * in + whole, left), load_some(w + n * in + whole, left), acc[m][n]);
  constexpr int kRounds = (kM * kN + kLanes - 1) / kLanes;
  Vec each[kRounds * kLanes] = {};
  for (int m = 0; m < kM; ++m)
    for (int n = 0; n < kN; ++n) each[m * kN + n] = acc[m][n];
  Y sums[kRounds * kLanes];
  for (int i = 0; i < kRounds; ++i) store(sums + i * kLanes, sum_each(each + i * kLanes));
  for (int m = 0; m < kM; ++m) std::memcpy(y + m * stride, sums + m * kN, kN * sizeof(Y));
}

template <int kN, typename W, typename Y>
inline void multiply_rows(const float* x, int64_t tokens, const W* w, int64_t in, Y* y, int64_t stride) {
  switch (tokens) {
    case 4: return multiply_tile<4, kN>(x, w, in, y, stride);
    case 3: return multiply_tile<3, kN>(x, w, in, y, stride);
    case 2: return multiply_tile<2, kN>(x, w, in, y, stride);
    default: return multiply_tile<1, kN>(x, w, in, y, stride);
  }
}

// `rows` rows of W, and their columns of y.
template <typename W, typename Y>
void multiply(const float* x, int64_t tokens, const W* w, int64_t rows, int64_t in, Y* y, int64_t stride) {
  for (int64_t t = 0; t < tokens; t += kTokens) {
    const int64_t count = std::min<int64_t>(kTokens, tokens - t);
    int64_t o = 0;
    for (; o + kOuts <= rows; o += kOuts)
      multiply_rows<kOuts>(x + t * in, count, w + o * in, in, y + t * stride + o, stride);
    for (; o < rows; ++o) multiply_rows<1>(x + t * in, count, w + o * in, in, y + t * stride + o, stride);
  }
}

inline void widen(const Bfloat16* from, int64_t count, float* to) {
  const int64_t whole = count / kLanes * kLanes;
  for (int64_t i = 0; i < whole; i += kLanes) store(to + i, load(from + i));
  if (whole < count) store_some(to + whole, load_some(from + whole, count - whole), int(count - whole));
}

template <typename W, typename Y>
struct Problem {
  const float* x;  // [tokens, in]
  const W* w;  // [out, in]
  Y* y;        // [tokens, out]
  int64_t tokens, in, out;
};

template <typename Y>
void run_task(const Problem<float, Y>& p, int64_t from, int64_t rows) {
  multiply(p.x, p.tokens, p.w + from * p.in, rows, p.in, p.y + from, p.out);
}

template <typename Y>
void run_task(const Problem<Bfloat16, Y>& p, int64_t from, int64_t rows) {
  const Bfloat16* w = p.w + from * p.in;
  if (p.tokens < kReused) return multiply(p.x, p.tokens, w, rows, p.in, p.y + from, p.out);
  thread_local std::vector<float> wide;
  wide.resize(rows * p.in);
  widen(w, rows * p.in, wide.data());
  multiply(p.x, p.tokens, wide.data(), rows, p.in, p.y + from, p.out);
}

template <typename W, typename Y, typename In, typename Out>
ffi::Error run(ffi::ThreadPool pool, In x, In w, ffi::Result<Out> y) {
  auto shape = w.dimensions();
  Problem<W, Y> p;
  p.out = shape[0];
  p.in = shape[1];
  p.tokens = p.in ? int64_t(x.element_count()) / p.in : 0;
  p.w = reinterpret_cast<const W*>(w.untyped_data());
  p.y = reinterpret_cast<Y*>(y->untyped_data());
  auto given = reinterpret_cast<const W*>(x.untyped_data());
  std::shared_ptr<std::vector<float>> widened;
  if constexpr (std::is_same_v<W, float>) {
    p.x = given;
  } else {
    widened = std::make_shared<std::vector<float>>(p.tokens * p.in);
    widen(given, p.tokens * p.in, widened->data());
    p.x = widened->data();
  }
  const int64_t tasks = (p.out + kTaskOuts - 1) / kTaskOuts;
  run_all(pool, tasks, p.tokens * p.in * p.out, [p, widened](size_t i) {
    const int64_t from = int64_t(i) * kTaskOuts;
    run_task(p, from, std::min<int64_t>(kTaskOuts, p.out - from));
  });
  return ffi::Error::Success();
}

}  // namespace native::linear
