// Products as functions that compiled XLA programs call (XLA's foreign function interface).

#include "linear/cpu_native.h"
#include "linear/int8_panels.h"

namespace ffi = xla::ffi;

#define LINEAR(name, W, Y, In, Out)                                                                   \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(name, (native::linear::run<W, Y, ffi::Buffer<In>, ffi::Buffer<Out>>), \
                                ffi::Ffi::Bind()                                                      \
                                    .Ctx<ffi::ThreadPool>()                                           \
                                    .Arg<ffi::Buffer<In>>()                                           \
                                    .Arg<ffi::Buffer<In>>()                                           \
                                    .Ret<ffi::Buffer<Out>>())

LINEAR(linear_float32_float32, float, float, ffi::F32, ffi::F32);
LINEAR(linear_bfloat16_bfloat16, native::Bfloat16, native::Bfloat16, ffi::BF16, ffi::BF16);
LINEAR(linear_bfloat16_float32, native::Bfloat16, float, ffi::BF16, ffi::F32);

#define PANELS(name, run, T, DType)                                                 \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(name, (native::linear::run<T, ffi::Buffer<DType>>), \
                                ffi::Ffi::Bind()                                    \
                                    .Ctx<ffi::ThreadPool>()                         \
                                    .Arg<ffi::Buffer<DType>>()                      \
                                    .RemainingArgs()                                \
                                    .RemainingRets())

PANELS(linear_panels_float32, run_panels, float, ffi::F32);
PANELS(linear_panels_bfloat16, run_panels, native::Bfloat16, ffi::BF16);
PANELS(linear_int8_panels_float32, run_int8_panels, float, ffi::F32);
PANELS(linear_int8_panels_bfloat16, run_int8_panels, native::Bfloat16, ffi::BF16);
