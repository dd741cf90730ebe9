// Paged attention for CPUs.
//
// Every query walks its own context, key after key in their order, whatever is computed beside it: a row's bits are a
// function of its own sequence alone, also whether it is decoded or part of a prefill chunk. Sums are in float32, with an
// online softmax (arXiv 1805.02867) that is rescaled once a window of keys.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "native/threads.h"
#include "native/vectors.h"
#include "xla/ffi/api/ffi.h"

namespace native::attention {

namespace ffi = xla::ffi;

constexpr int kWindow = 64;       // most keys between two rescalings
constexpr int kTileQueries = 16;  // queries of one chunk that walk the context together
constexpr int kPiece = 8;         // vectors of a head that are summed in registers at a time
constexpr int kMostHeadDim = 512;
constexpr int kMostGroup = 64;

// 2 ** x for x <= 0, to a few units in the last place; 0 below -126.
inline Vec exp2_of_negative(Vec x) {
  x = x < -127.f ? all(-127.f) : x;
  Ints whole = __builtin_convertvector(x - 0.5f, Ints);  // truncates towards zero: the nearest
  Vec r = x - __builtin_convertvector(whole, Vec);       // in [-0.5, 0.5]
  // Taylor of 2 ** r in powers of ln 2: the error of degree 7 is below 1e-8 there.
  Vec p = all(1.5252733804059841e-5f);
  p = fused(p, r, all(1.5403530393381608e-4f));
  p = fused(p, r, all(1.3333558146428443e-3f));
  p = fused(p, r, all(9.6181291076284772e-3f));
  p = fused(p, r, all(5.5504108664821580e-2f));
  p = fused(p, r, all(2.4022650695910071e-1f));
  p = fused(p, r, all(6.9314718055994531e-1f));
  p = fused(p, r, all(1.f));
  Ints exponent = (whole + 127) << 23;
  Vec scale;
  std::memcpy(&scale, &exponent, sizeof scale);
  return p * scale;  // whole is -127 at least, and its scale 0
}

inline float exp2_of_negative(float x) { return exp2_of_negative(all(x))[0]; }

template <typename T>
struct Problem {
  const T* q;        // [T, H, d]
  const T* k_cache;  // [N, K, b, d]
  const T* v_cache;
  const int32_t* block_tables;  // [S, B]
  T* out;                       // [T, H, d]
  int64_t num_heads, num_kv_heads, group, head_dim, block_size, table_width;
  float scale;     // to base 2
  float soft_cap;  // 0: none
  int64_t sliding_window;
};

// Queries first .. first + count of the batch, the first at `position`, of sequence `row`; one KV head.
struct Task {
  int32_t row, kv_head, first, count, position;
};

// What a query knows of the keys that it has seen.
struct Seen {
  float peak;  // largest score, to base 2
  Vec total;   // of weights, lane by lane
};

template <typename T>
inline void score(const float* query, const T* keys, int64_t head_dim, int count, int last, float* scores) {
  for (int at = 0; at < count; at += kLanes) {
    const T* row[kLanes];
    // Past the block's end the last key stands in; its score is masked.
    for (int i = 0; i < kLanes; ++i) row[i] = keys + (at + i < last ? at + i : last) * head_dim;
    Vec sums[kLanes] = {};
    for (int64_t c = 0; c < head_dim; c += kLanes) {
      Vec part = load(query + c);
      for (int i = 0; i < kLanes; ++i) sums[i] = fused(part, load(row[i] + c), sums[i]);
    }
    store(scores + at, sum_each(sums));
  }
}

template <int kVectors, typename T>
inline void add_values(const float* weights, int from, int to, const T* values, int64_t head_dim, float* sums) {
  Vec acc[kVectors];
  for (int c = 0; c < kVectors; ++c) acc[c] = load(sums + c * kLanes);
  for (int key = from; key < to; ++key) {
    Vec weight = all(weights[key]);
    const T* value = values + key * head_dim;
    for (int c = 0; c < kVectors; ++c) acc[c] = fused(weight, load(value + c * kLanes), acc[c]);
  }
  for (int c = 0; c < kVectors; ++c) store(sums + c * kLanes, acc[c]);
}

template <typename T>
void add_all_values(const float* weights, int from, int to, const T* values, int64_t head_dim, float* sums) {
  int64_t c = 0;
  for (; c + kPiece * kLanes <= head_dim; c += kPiece * kLanes)
    add_values<kPiece>(weights, from, to, values + c, head_dim, sums + c);
  for (; c < head_dim; c += kLanes) add_values<1>(weights, from, to, values + c, head_dim, sums + c);
}

// Keys from .. to of a window (those that the query sees) join what it has seen. Scores are overwritten.
template <typename T>
inline void join(float* scores, int from, int to, const T* values, int64_t head_dim, Seen& seen, float* sums) {
  const int end = (to + kLanes - 1) / kLanes * kLanes;
  for (int i = 0; i < from; ++i) scores[i] = -std::numeric_limits<float>::infinity();
  for (int i = to; i < end; ++i) scores[i] = -std::numeric_limits<float>::infinity();
  float peak = scores[from];
  for (int i = from + 1; i < to; ++i) peak = scores[i] > peak ? scores[i] : peak;
  if (peak > seen.peak) {
    float factor = exp2_of_negative(seen.peak - peak);
    seen.peak = peak;
    seen.total *= factor;
    for (int64_t c = 0; c < head_dim; c += kLanes) store(sums + c, load(sums + c) * factor);
  }
  for (int at = from / kLanes * kLanes; at < end; at += kLanes) {
    Vec weight = exp2_of_negative(load(scores + at) - seen.peak);
    store(scores + at, weight);
    seen.total += weight;
  }
  add_all_values(scores, from, to, values, head_dim, sums);
}

template <typename T>
void attend(const Problem<T>& p, const Task& task) {
  const int64_t d = p.head_dim, group = p.group, queries = task.count * group;
  thread_local std::vector<float> room;
  room.resize(2 * queries * d + kWindow + 4 * kLanes);
  float* query = room.data();
  float* sums = query + queries * d;
  float* scores = sums + queries * d;
  thread_local std::vector<Seen> seen;
  seen.assign(queries, Seen{-std::numeric_limits<float>::max(), all(0.f)});
  std::memset(sums, 0, queries * d * sizeof(float));
  const int64_t first_head = task.kv_head * group;
  for (int64_t i = 0; i < task.count; ++i)
    for (int64_t g = 0; g < group; ++g) {
      const T* from = p.q + ((task.first + i) * p.num_heads + first_head + g) * d;
      for (int64_t c = 0; c < d; c += kLanes) store(query + (i * group + g) * d + c, load(from + c) * p.scale);
    }

  const int64_t last_position = task.position + task.count - 1;
  const int64_t oldest = task.position - p.sliding_window + 1;  // that any of them sees
  const int64_t b = p.block_size;
  const int32_t* table = p.block_tables + task.row * p.table_width;
  for (int64_t block = oldest > 0 ? oldest / b : 0; block * b <= last_position; ++block) {
    const int64_t offset = (int64_t(table[block]) * p.num_kv_heads + task.kv_head) * b * d;
    for (int64_t inside = 0; inside < b && block * b + inside <= last_position; inside += kWindow) {
      const int64_t start = block * b + inside;  // position of the window's first key
      const int64_t room_left = b - inside;
      const T* keys = p.k_cache + offset + inside * d;
      const T* values = p.v_cache + offset + inside * d;
      for (int64_t i = 0; i < task.count; ++i) {
        const int64_t position = task.position + i;
        int64_t to = position + 1 - start, from = position - p.sliding_window + 1 - start;
        to = to < kWindow ? to : kWindow;
        to = to < room_left ? to : room_left;
        from = from > 0 ? from : 0;
        if (from >= to) continue;
        for (int64_t g = 0; g < group; ++g) {
          const int64_t at = i * group + g;
          score(query + at * d, keys, d, int(to), int(to) - 1, scores);
          if (p.soft_cap > 0)
            for (int64_t j = from; j < to; ++j) scores[j] = p.soft_cap * std::tanh(scores[j] / p.soft_cap);
          join(scores, int(from), int(to), values, d, seen[at], sums + at * d);
        }
      }
    }
  }

  for (int64_t i = 0; i < task.count; ++i)
    for (int64_t g = 0; g < group; ++g) {
      const int64_t at = i * group + g;
      const float total = sum(seen[at].total);
      const float inverse = total > 0 ? 1.f / total : 0.f;
      T* to = p.out + ((task.first + i) * p.num_heads + first_head + g) * d;
      for (int64_t c = 0; c < d; c += kLanes) store(to + c, load(sums + at * d + c) * inverse);
    }
}

// The operands and attributes of `api.ragged_paged_attention`.
template <typename T, typename Buffer>
ffi::Error run(ffi::ThreadPool pool, Buffer q, Buffer k_cache, Buffer v_cache, ffi::Buffer<ffi::S32> block_tables,
               ffi::Buffer<ffi::S32> seq_lens, ffi::Buffer<ffi::S32> cu_q_lens, ffi::Buffer<ffi::S32> num_seqs,
               ffi::Result<Buffer> out, float scale, float soft_cap, int64_t sliding_window) {
  auto shape = q.dimensions();
  auto cache = k_cache.dimensions();
  auto tables = block_tables.dimensions();
  Problem<T> p;
  p.q = reinterpret_cast<const T*>(q.untyped_data());
  p.k_cache = reinterpret_cast<const T*>(k_cache.untyped_data());
  p.v_cache = reinterpret_cast<const T*>(v_cache.untyped_data());
  p.block_tables = block_tables.typed_data();
  p.out = reinterpret_cast<T*>(out->untyped_data());
  p.num_heads = shape[1];
  p.num_kv_heads = cache[1];
  p.group = p.num_heads / p.num_kv_heads;
  p.head_dim = shape[2];
  p.block_size = cache[2];
  p.table_width = tables[1];
  const float log2_e = 1.4426950408889634f;
  p.scale = scale * log2_e;
  p.soft_cap = soft_cap * log2_e;
  p.sliding_window = sliding_window;
  if (p.head_dim % kLanes || p.head_dim > kMostHeadDim || p.group > kMostGroup)
    return ffi::Error::InvalidArgument("paged attention for CPUs takes heads of a multiple of 8 up to 512");

  std::vector<Task> tasks;
  int64_t cost = 0;
  const int64_t rows = num_seqs.typed_data()[0] < tables[0] ? num_seqs.typed_data()[0] : tables[0];
  const int64_t row_size = p.num_heads * p.head_dim;
  auto clear = [&](int64_t from, int64_t to) {
    std::memset(static_cast<void*>(p.out + from * row_size), 0, (to - from) * row_size * sizeof(T));
  };
  int64_t end = 0;
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t first = cu_q_lens.typed_data()[row], length = seq_lens.typed_data()[row];
    end = cu_q_lens.typed_data()[row + 1];
    if (length == 0) {
      clear(first, end);
      continue;
    }
    for (int64_t at = first; at < end; at += kTileQueries) {
      const int64_t count = end - at < kTileQueries ? end - at : kTileQueries;
      const int64_t position = length - end + at;
      if (position < 0) return ffi::Error::InvalidArgument("a sequence has more queries than tokens");
      cost += count * (position + count) * p.num_heads * p.head_dim;
      for (int64_t kv_head = 0; kv_head < p.num_kv_heads; ++kv_head)
        tasks.push_back(Task{int32_t(row), int32_t(kv_head), int32_t(at), int32_t(count), int32_t(position)});
    }
  }
  clear(end, shape[0]);

  const size_t count = tasks.size();
  run_all(pool, count, cost, [p, tasks = std::move(tasks)](size_t i) { attend(p, tasks[i]); });
  return ffi::Error::Success();
}

}  // namespace native::attention
