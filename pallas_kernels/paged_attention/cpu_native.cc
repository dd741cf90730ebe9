// Attention as functions that compiled XLA programs call (XLA's foreign function interface).

#include "paged_attention/cpu_native.h"

namespace ffi = xla::ffi;

#define PAGED_ATTENTION(name, T, DType)                                                   \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(name, (native::attention::run<T, ffi::Buffer<DType>>),    \
                                ffi::Ffi::Bind()                                          \
                                    .Ctx<ffi::ThreadPool>()                               \
                                    .Arg<ffi::Buffer<DType>>()                            \
                                    .Arg<ffi::Buffer<DType>>()                            \
                                    .Arg<ffi::Buffer<DType>>()                            \
                                    .Arg<ffi::Buffer<ffi::S32>>()                         \
                                    .Arg<ffi::Buffer<ffi::S32>>()                         \
                                    .Arg<ffi::Buffer<ffi::S32>>()                         \
                                    .Arg<ffi::Buffer<ffi::S32>>()                         \
                                    .Ret<ffi::Buffer<DType>>()                            \
                                    .Attr<float>("scale")                                 \
                                    .Attr<float>("soft_cap")                              \
                                    .Attr<int64_t>("sliding_window"))

PAGED_ATTENTION(paged_attention_float32, float, ffi::F32);
PAGED_ATTENTION(paged_attention_bfloat16, native::Bfloat16, ffi::BF16);
