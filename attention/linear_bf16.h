// Products of a few float32 states with a weight whose numbers are bfloat16, for compiled passes on a CPU.
//
// Knows: one packed weight, one matrix of states.  Does not know: models, graphs.
//
// A bfloat16 number is a float32 number with 16 zero bits at its end.  So products and sums are those of float32, but
// only half the bytes are read, and reading is what a product of a few states waits for.
//
// The packed weight is (blocks, K, 32): the numbers of 32 outputs for each of K inputs.  A word of 32 bits holds
// output i in its lower half and output 16 + i in its upper half.  The last block may be filled up with zeros.

#pragma once

#include <omp.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <utility>

#pragma GCC push_options
#pragma GCC optimize("O3", "fp-contract=fast")

namespace specinfer {

#ifdef __AVX512F__
constexpr int LANES = 16, ROWS = 12;  // floats of a register, and states that all registers hold the sums of
#else
constexpr int LANES = 8, ROWS = 6;
#endif
constexpr int BLOCK = 32, AHEAD = 16;    // outputs of a block, and inputs between two rounds of prefetching
constexpr int64_t PANEL = 96;            // states that stay in the cache while all weights pass by
constexpr int64_t SMALL = 1 << 16;       // multiplications that are not worth a second thread

typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef uint32_t Words __attribute__((vector_size(4 * LANES)));

struct Weights {
    const uint16_t* block;  // (K, 32)
    const uint16_t* next;   // (K / share, 32) to prefetch meanwhile
    int64_t share;
};

// Multiply R states (R, K) with a block: sums of 2 LANES outputs, LANES of them 16 after the others, `width` a row.
template <int R>
void multiply(const float* states, const Weights& weights, float* sums, int64_t size, int64_t width) {
    Floats low[R] = {}, high[R] = {};
    for (int64_t from = 0; from < size; from += AHEAD) {
        const int64_t to = std::min<int64_t>(from + AHEAD, size);
        for (int64_t k = from / weights.share; k < to / weights.share; k++)
            __builtin_prefetch(weights.next + BLOCK * k, 0, 2);
        for (int64_t k = from; k < to; k++) {
            Words pairs;
            memcpy(&pairs, weights.block + BLOCK * k, sizeof pairs);
            const Floats even = (Floats)(pairs << 16), odd = (Floats)(pairs & 0xffff0000u);
#pragma GCC unroll 16
            for (int r = 0; r < R; r++) {
                low[r] += even * states[r * size + k];
                high[r] += odd * states[r * size + k];
            }
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) {
        memcpy(sums + r * width, &low[r], sizeof low[r]);
        memcpy(sums + r * width + BLOCK / 2, &high[r], sizeof high[r]);
    }
}

using Multiply = void (*)(const float*, const Weights&, float*, int64_t, int64_t);

template <int... R>
Multiply multiplication(int64_t rows, std::integer_sequence<int, R...>) {
    constexpr Multiply all[] = {multiply<R + 1>...};
    return all[rows - 1];
}

// One block's outputs (rows, outputs) of states (rows, K).
inline void multiply_block(
    const float* states, const uint16_t* block, float* results, int64_t rows, int64_t size, int64_t outputs) {
    const int64_t groups = (rows + ROWS - 1) / ROWS;
    for (int64_t group = 0; group < groups; group++) {
        const int64_t from = rows * group / groups, to = rows * (group + 1) / groups;
        const auto run = multiplication(to - from, std::make_integer_sequence<int, ROWS>());
        for (int half = 0; half < BLOCK / 2; half += LANES) {
            const Weights weights{block + 2 * half, block + BLOCK * (size + size * group / groups), groups};
            run(states + from * size, weights, results + from * outputs + half, size, outputs);
        }
    }
}

// results (rows, outputs) = states (rows, size) times the transpose of the packed weight.
inline void linear_bf16(
    const float* states, const uint16_t* packed, float* results, int64_t rows, int64_t size, int64_t outputs) {
    const int64_t blocks = (outputs + BLOCK - 1) / BLOCK;
    const int threads = rows * size * outputs < SMALL ? 1 : omp_get_max_threads();
#pragma omp parallel num_threads(threads)
    {
        const int64_t part = omp_get_thread_num(), parts = omp_get_num_threads();
        const int64_t from = blocks * part / parts, to = blocks * (part + 1) / parts;
        for (int64_t top = 0; top < rows; top += PANEL) {
            const int64_t count = std::min(PANEL, rows - top);
            const float* panel = states + top * size;
            for (int64_t block = from; block < to; block++) {
                const uint16_t* weights = packed + block * BLOCK * size;
                float* found = results + top * outputs + block * BLOCK;
                if (const int64_t last = outputs - block * BLOCK; last < BLOCK) {
                    float sums[PANEL * BLOCK];
                    multiply_block(panel, weights, sums, count, size, BLOCK);
                    for (int64_t row = 0; row < count; row++)
                        std::copy_n(sums + row * BLOCK, last, found + row * outputs);
                } else {
                    multiply_block(panel, weights, found, count, size, outputs);
                }
            }
        }
    }
}

}  // namespace specinfer

#pragma GCC pop_options

// Called by the code that Inductor writes; returns 0.
inline AOTITorchError aoti_torch_specinfer_linear_bf16(
    AtenTensorHandle results, AtenTensorHandle states, AtenTensorHandle packed) {
    void *to, *from, *weight;
    int64_t *shape, *sizes;
    aoti_torch_get_data_ptr(results, &to);
    aoti_torch_get_data_ptr(states, &from);
    aoti_torch_get_data_ptr(packed, &weight);
    aoti_torch_get_sizes(results, &shape);
    aoti_torch_get_sizes(states, &sizes);
    specinfer::linear_bf16(
        (const float*)from, (const uint16_t*)weight, (float*)to, shape[0], sizes[1], shape[1]);
    return 0;
}
