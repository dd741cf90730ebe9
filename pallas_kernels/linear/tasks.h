// Products of some tokens with several matrices, shared out among threads.

#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "linear/panels.h"
#include "native/threads.h"
#include "xla/ffi/api/ffi.h"

namespace native::linear {

constexpr int64_t kTaskRows = 3 * kPanel;  // of W that a task takes

// `multiply(tokens, matrix, first row of W, rows)` does up to 16 rows. Tokens have `count` and `in`, matrices `out`.
template <typename Tokens, typename Matrix, typename Multiply>
void multiply_all(xla::ffi::ThreadPool& pool, Tokens tokens, std::vector<Matrix> matrices, Multiply multiply) {
  int64_t rows = 0;
  std::vector<std::pair<size_t, int64_t>> tasks;  // a matrix, its first row
  for (size_t i = 0; i < matrices.size(); ++i) {
    rows += matrices[i].out;
    for (int64_t row = 0; row < matrices[i].out; row += kTaskRows) tasks.emplace_back(i, row);
  }
  const int64_t cost = tokens.count * tokens.in * rows;
  const size_t count = tasks.size();
  run_all(pool, count, cost, [tokens, multiply, matrices = std::move(matrices), tasks = std::move(tasks)](size_t i) {
    const Matrix& matrix = matrices[tasks[i].first];
    const int64_t first = tasks[i].second, end = std::min(matrix.out, first + kTaskRows);
    for (int64_t row = first; row < end; row += kPanel)
      multiply(tokens, matrix, row, std::min<int64_t>(kPanel, end - row));
  });
}

}  // namespace native::linear
