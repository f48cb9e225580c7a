// Registers of floats, for the kernels of compiled passes on a CPU.

#pragma once

#include <cstdint>
#include <cstring>
#if defined(__AVX512BF16__) || defined(__AVX512VNNI__)
#include <immintrin.h>
#endif

#define SPECINFER_INLINE inline __attribute__((always_inline))  // Inductor asks for little optimisation

#pragma GCC push_options
#pragma GCC optimize("O3", "fp-contract=fast")

namespace specinfer {

#ifdef __AVX512F__
constexpr int LANES = 16;  // floats of a register
#else
constexpr int LANES = 8;
#endif
constexpr int LINE = 16;  // numbers of 32 bits that memory hands over at a time

typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef uint32_t Words __attribute__((vector_size(4 * LANES)));
typedef int32_t Integers32 __attribute__((vector_size(4 * LANES)));

SPECINFER_INLINE Words load(const uint32_t* words) {
    Words loaded;
    memcpy(&loaded, words, sizeof loaded);
    return loaded;
}

SPECINFER_INLINE Floats load(const float* numbers) {
    Floats loaded;
    memcpy(&loaded, numbers, sizeof loaded);
    return loaded;
}

SPECINFER_INLINE void store(float* numbers, Floats stored) { memcpy(numbers, &stored, sizeof stored); }

}  // namespace specinfer

#pragma GCC pop_options
