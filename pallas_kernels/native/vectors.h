// Vectors of eight floats, in the compiler's own terms (GCC and Clang), so that one source serves all instruction sets.

#pragma once

#include <cstdint>
#include <cstring>

#if defined(__FMA__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace native {

constexpr int kLanes = 8;

typedef float Vec __attribute__((vector_size(4 * kLanes)));
typedef int32_t Ints __attribute__((vector_size(4 * kLanes)));
typedef uint32_t Bits __attribute__((vector_size(4 * kLanes)));
typedef uint16_t Halves __attribute__((vector_size(2 * kLanes)));

struct Bfloat16 {
  uint16_t bits;
};

inline Vec load(const float* from) {
  Vec v;
  std::memcpy(&v, from, sizeof v);
  return v;
}

inline Vec vector_of(Bits bits) {
  Vec v;
  std::memcpy(&v, &bits, sizeof v);
  return v;
}

inline Vec load(const Bfloat16* from) {
  Halves half;
  std::memcpy(&half, from, sizeof half);
  return vector_of(__builtin_convertvector(half, Bits) << 16);
}

inline void store(float* to, Vec v) { std::memcpy(to, &v, sizeof v); }

// To the nearest, ties to even; a NaN stays one.
inline Halves rounded(Vec v) {
  Bits bits, nan = Bits(v != v);
  std::memcpy(&bits, &v, sizeof bits);
  bits += 0x7fff + ((bits >> 16) & 1);
  bits = (bits & ~nan) | (nan & 0x7fc00000);
  return __builtin_convertvector(bits >> 16, Halves);
}

inline void store(Bfloat16* to, Vec v) {
  Halves half = rounded(v);
  std::memcpy(to, &half, sizeof half);
}

// The first `count` lanes.
template <typename T>
inline void store_some(T* to, Vec v, int count) {
  T lanes[kLanes];
  store(lanes, v);
  std::memcpy(to, lanes, count * sizeof(T));
}

// a * b + c, rounded once where the CPU can. Compilers are told to fuse nothing by themselves (-ffp-contract=off): what
// they fuse differs from one copy of a loop to the next, and so would a row's bits.
inline Vec fused(Vec a, Vec b, Vec c) {
#if defined(__FMA__)
  return (Vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
  typedef float Half __attribute__((vector_size(16)));
  Half x[2], y[2], z[2];
  std::memcpy(x, &a, sizeof a);
  std::memcpy(y, &b, sizeof b);
  std::memcpy(z, &c, sizeof c);
  for (int i = 0; i < 2; ++i) z[i] = (Half)vfmaq_f32((float32x4_t)z[i], (float32x4_t)x[i], (float32x4_t)y[i]);
  std::memcpy(&c, z, sizeof c);
  return c;
#else
  return a * b + c;
#endif
}

inline Vec all(float x) { return Vec{x, x, x, x, x, x, x, x}; }

inline float sum(Vec v) { return ((v[0] + v[4]) + (v[2] + v[6])) + ((v[1] + v[5]) + (v[3] + v[7])); }

// Lanes of a (0 to 7) and b (8 to 15).
template <int... kFrom>
inline Vec shuffled(Vec a, Vec b) {
#if defined(__clang__)
  return __builtin_shufflevector(a, b, kFrom...);
#else
  return __builtin_shuffle(a, b, Ints{kFrom...});  // GCC knows the other from 12 on
#endif
}

// The lanes of eight vectors summed: lane i is the sum of v[i].
inline Vec sum_each(const Vec* v) {
  Vec pairs[4];
  for (int i = 0; i < 4; ++i) {
    Vec a = v[2 * i], b = v[2 * i + 1];
    pairs[i] = shuffled<0, 8, 2, 10, 4, 12, 6, 14>(a, b) + shuffled<1, 9, 3, 11, 5, 13, 7, 15>(a, b);
  }
  Vec fours[2];
  for (int i = 0; i < 2; ++i) {
    Vec a = pairs[2 * i], b = pairs[2 * i + 1];
    fours[i] = shuffled<0, 1, 8, 9, 4, 5, 12, 13>(a, b) + shuffled<2, 3, 10, 11, 6, 7, 14, 15>(a, b);
  }
  return shuffled<0, 1, 2, 3, 8, 9, 10, 11>(fours[0], fours[1]) +
         shuffled<4, 5, 6, 7, 12, 13, 14, 15>(fours[0], fours[1]);
}

}  // namespace native
