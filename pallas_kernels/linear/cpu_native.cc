// Products as functions that compiled XLA programs call (XLA's foreign function interface).

#include "linear/cpu_native.h"

namespace ffi = xla::ffi;

#define LINEAR(name, X, Y, ...)                                      \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(name, (native::linear::__VA_ARGS__), \
                                ffi::Ffi::Bind()                     \
                                    .Ctx<ffi::ThreadPool>()          \
                                    .Arg<ffi::Buffer<X>>()           \
                                    .Arg<ffi::Buffer<X>>()           \
                                    .Ret<ffi::Buffer<Y>>())

#define PROJECT(name, W, Y, X, Out) LINEAR(name, X, Out, run<W, Y, ffi::Buffer<X>, ffi::Buffer<Out>>)
#define PANELS(name, W, X) LINEAR(name, X, X, run_panels<W, ffi::Buffer<X>>)

PROJECT(linear_float32_float32, float, float, ffi::F32, ffi::F32);
PROJECT(linear_bfloat16_bfloat16, native::Bfloat16, native::Bfloat16, ffi::BF16, ffi::BF16);
PROJECT(linear_bfloat16_float32, native::Bfloat16, float, ffi::BF16, ffi::F32);
PANELS(linear_panels_float32, float, ffi::F32);
PANELS(linear_panels_bfloat16, native::Bfloat16, ffi::BF16);
