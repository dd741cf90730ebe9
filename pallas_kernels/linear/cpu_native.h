// y = x W^T for CPUs.

#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <type_traits>
#include <vector>

#include "linear/panels.h"
#include "native/threads.h"
#include "native/vectors.h"
#include "xla/ffi/api/ffi.h"

namespace native::linear {

namespace ffi = xla::ffi;

constexpr int64_t kTaskPanels = 3;

inline void widen(const Bfloat16* from, int64_t count, float* to) {
  const int64_t whole = count / kLanes * kLanes;
  for (int64_t i = 0; i < whole; i += kLanes) store(to + i, load(from + i));
  for (int64_t i = whole; i < count; ++i) to[i] = widened(from[i]);
}

template <typename W, typename Y>
struct Problem {
  const float* x;  // [tokens, in]
  const W* w;      // [out, in], or as panels [out / 16, in, 16]
  Y* y;            // [tokens, out]
  int64_t tokens, in, out;
};

// Shares out the panels; `multiply(problem, first row of W, rows)` does one.
template <typename W, typename Y, typename In, typename Out, typename Multiply>
ffi::Error run_problem(ffi::ThreadPool pool, In x, In w, ffi::Result<Out> y, Problem<W, Y> p, Multiply multiply) {
  if (p.out == 0) return ffi::Error::Success();
  p.w = reinterpret_cast<const W*>(w.untyped_data());
  p.y = reinterpret_cast<Y*>(y->untyped_data());
  p.tokens = int64_t(y->element_count()) / p.out;
  auto given = reinterpret_cast<const W*>(x.untyped_data());
  std::shared_ptr<std::vector<float>> wide;
  if constexpr (std::is_same_v<W, float>) {
    p.x = given;
  } else {
    wide = std::make_shared<std::vector<float>>(p.tokens * p.in);
    widen(given, p.tokens * p.in, wide->data());
    p.x = wide->data();
  }
  constexpr int64_t kTaskRows = kTaskPanels * kPanel;
  const int64_t tasks = (p.out + kTaskRows - 1) / kTaskRows;
  run_all(pool, tasks, p.tokens * p.in * p.out, [p, wide, multiply](size_t i) {
    const int64_t end = std::min(p.out, int64_t(i + 1) * kTaskRows);
    for (int64_t row = int64_t(i) * kTaskRows; row < end; row += kPanel)
      multiply(p, row, std::min<int64_t>(kPanel, end - row));
  });
  return ffi::Error::Success();
}

// W as [out, in].
template <typename W, typename Y, typename In, typename Out>
ffi::Error run(ffi::ThreadPool pool, In x, In w, ffi::Result<Out> y) {
  auto shape = w.dimensions();
  Problem<W, Y> problem{};
  problem.out = shape[0];
  problem.in = shape[1];
  return run_problem(pool, x, w, y, problem, [](const Problem<W, Y>& p, int64_t row, int64_t rows) {
    thread_local std::vector<float> panel;
    panel.resize(kPanel * p.in);
    make_panel(p.w + row * p.in, rows, p.in, panel.data());
    multiply_panel(p.x, p.tokens, panel.data(), p.in, p.y + row, p.out, int(rows));
  });
}

// W as [out / 16, in, 16].
template <typename W, typename Buffer>
ffi::Error run_panels(ffi::ThreadPool pool, Buffer x, Buffer w, ffi::Result<Buffer> y) {
  auto shape = w.dimensions();
  Problem<W, W> problem{};
  problem.out = shape[0] * kPanel;
  problem.in = shape[1];
  return run_problem(pool, x, w, y, problem, [](const Problem<W, W>& p, int64_t row, int64_t) {
    multiply_panel(p.x, p.tokens, p.w + row * p.in, p.in, p.y + row, p.out, kPanel);
  });
}

}  // namespace native::linear
