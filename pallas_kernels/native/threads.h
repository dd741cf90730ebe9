// Tasks shared out among the threads of XLA's pool.

#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <thread>
#include <utility>

#include "xla/ffi/api/ffi.h"

namespace native {

constexpr int64_t kWorthAThread = 1 << 15;  // multiply-adds; less is done sooner than another thread wakes up

// Runs job(0) .. job(count - 1), in any order, on this thread and others, and returns when all are done. A thread that
// comes late finds nothing left: it touches only what it shares the ownership of.
//
// `cost`: multiply-adds in all.
template <typename Job>
void run_all(xla::ffi::ThreadPool& pool, size_t count, int64_t cost, Job job) {
  struct Shared {
    explicit Shared(Job&& job, size_t count) : job(std::move(job)), count(count) {}
    Job job;
    size_t count;
    std::atomic<size_t> next{0}, done{0};

    void run() {
      for (size_t i; (i = next.fetch_add(1)) < count;) {
        job(i);
        done.fetch_add(1, std::memory_order_release);
      }
    }
  };
  auto shared = std::make_shared<Shared>(std::move(job), count);
  const int64_t threads = pool.num_threads();
  for (int64_t i = 1; i < threads && i < int64_t(count) && cost > i * kWorthAThread; ++i)
    pool.Schedule([shared] { shared->run(); });
  shared->run();
  while (shared->done.load(std::memory_order_acquire) < count) std::this_thread::yield();
}

}  // namespace native
