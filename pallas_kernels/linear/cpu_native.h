// y = x W^T for CPUs.

#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "linear/panels.h"
#include "linear/tasks.h"
#include "linear/tokens.h"
#include "native/vectors.h"
#include "xla/ffi/api/ffi.h"

namespace native::linear {

namespace ffi = xla::ffi;

template <typename W, typename Y>
struct Matrix {
  const W* w;   // [out, in], or as panels [out / 16, in, 16]
  Y* y;         // [count, out]
  int64_t out;
};

// W as [out, in].
template <typename W, typename Y, typename In, typename Out>
ffi::Error run(ffi::ThreadPool pool, In x, In w, ffi::Result<Out> y) {
  const int64_t out = w.dimensions()[0], in = w.dimensions()[1];
  if (out == 0) return ffi::Error::Success();
  auto tokens = tokens_of(reinterpret_cast<const W*>(x.untyped_data()), int64_t(y->element_count()) / out, in);
  std::vector<Matrix<W, Y>> matrices{
      {reinterpret_cast<const W*>(w.untyped_data()), reinterpret_cast<Y*>(y->untyped_data()), out}};
  multiply_all(pool, tokens, matrices, [](const Tokens& t, const Matrix<W, Y>& m, int64_t row, int64_t rows) {
    thread_local std::vector<float> panel;
    panel.resize(kPanel * t.in);
    make_panel(m.w + row * t.in, rows, t.in, panel.data());
    multiply_panel(t.x, t.count, panel.data(), t.in, m.y + row, m.out, int(rows));
  });
  return ffi::Error::Success();
}

// Each W as [out / 16, in, 16]; a result for each.
template <typename T, typename Buffer>
ffi::Error run_panels(ffi::ThreadPool pool, Buffer x, ffi::RemainingArgs ws, ffi::RemainingRets ys) {
  std::vector<Matrix<T, T>> matrices;
  for (size_t i = 0; i < ws.size(); ++i) {
    auto w = ws.get<Buffer>(i);
    auto y = ys.get<Buffer>(i);
    if (w.has_error()) return w.error();
    if (y.has_error()) return y.error();
    matrices.push_back({reinterpret_cast<const T*>(w->untyped_data()), reinterpret_cast<T*>((*y)->untyped_data()),
                        w->dimensions()[0] * kPanel});
  }
  const int64_t in = x.dimensions().back();
  auto tokens = tokens_of(reinterpret_cast<const T*>(x.untyped_data()), in ? int64_t(x.element_count()) / in : 0, in);
  multiply_all(pool, tokens, std::move(matrices), [](const Tokens& t, const Matrix<T, T>& m, int64_t row, int64_t) {
    multiply_panel(t.x, t.count, m.w + row * t.in, t.in, m.y + row, m.out, kPanel);
  });
  return ffi::Error::Success();
}

}  // namespace native::linear
