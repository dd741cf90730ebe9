// Tokens as floats, whatever they come as.

#pragma once

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "linear/panels.h"
#include "native/vectors.h"

namespace native::linear {

inline void widen(const Bfloat16* from, int64_t count, float* to) {
  const int64_t whole = count / kLanes * kLanes;
  for (int64_t i = 0; i < whole; i += kLanes) store(to + i, load(from + i));
  for (int64_t i = whole; i < count; ++i) to[i] = widened(from[i]);
}

// What matrices are multiplied with.
struct Tokens {
  const float* x;  // [count, in]
  int64_t count, in;
  std::shared_ptr<std::vector<float>> wide;  // owns x, if it had to be widened
};

inline Tokens tokens_of(const float* x, int64_t count, int64_t in) { return {x, count, in, nullptr}; }

inline Tokens tokens_of(const Bfloat16* x, int64_t count, int64_t in) {
  auto wide = std::make_shared<std::vector<float>>(count * in);
  widen(x, count * in, wide->data());
  const float* data = wide->data();
  return {data, count, in, std::move(wide)};
}

}  // namespace native::linear
