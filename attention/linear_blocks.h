// Products of a few float32 states with a weight of few bits, for compiled passes on a CPU.
//
// Knows: one packed weight, one matrix of states.  Does not know: models, graphs, how numbers were rounded.
//
// The numbers of a weight are bfloat16 numbers, or integers of 8 or 4 bits times a scale that 32 inputs share.  They
// become float32 numbers, exactly, in registers.  So products and sums are those of float32, but far fewer bytes are
// read, and reading is what a product of a few states waits for.
//
// A packed weight is a row of blocks of 32 outputs.  Its words have 32 bits and come by 16: word i of these belongs to
// the outputs i and 16 + i of the block, and holds one number of each (bfloat16), two (8 bits) or four (4 bits) for as
// many inputs, the first in the lowest bits.  Before each group of 32 inputs stand 16 words of scales, bfloat16.
// Bfloat16 numbers have no scales.  The last block may be filled up with zeros.

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
constexpr int BLOCK = 32, WORDS = 16, GROUP = 32;  // outputs of a block, words of a row, inputs that share a scale
constexpr int64_t PANEL = 96;                      // states that stay in the cache while all weights pass by
constexpr int64_t SMALL = 1 << 16;                 // multiplications that are not worth a second thread

typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef uint32_t Words __attribute__((vector_size(4 * LANES)));

#define SPECINFER_INLINE inline __attribute__((always_inline))  // Inductor asks for little optimisation

SPECINFER_INLINE Words load(const uint32_t* words) {
    Words loaded;
    memcpy(&loaded, words, sizeof loaded);
    return loaded;
}

// The two bfloat16 numbers of a word.
struct Bfloat16 {
    static constexpr int INPUTS = 1, SCALES = 0;  // inputs of a word, and words of scales before a group
    SPECINFER_INLINE explicit Bfloat16(const uint32_t*) {}
    SPECINFER_INLINE Floats low(Words words, int) const { return (Floats)(words << 16); }
    SPECINFER_INLINE Floats high(Words words, int) const { return (Floats)(words & 0xffff0000u); }
};

// Integers of some bits, half their range added, times the scales of a group.
template <int BITS>
struct Integers {
    static constexpr int INPUTS = 16 / BITS, SCALES = WORDS, TOP = 23 - BITS;  // mantissas have 23 bits
    static constexpr uint32_t MASK = ((1u << BITS) - 1) << TOP, EXPONENT = (127u + BITS) << 23;
    static constexpr float ZERO = 1.5f * (1 << BITS);  // as integers begin a mantissa, behind its implicit one
    Floats low_scales, high_scales;

    SPECINFER_INLINE explicit Integers(const uint32_t* words)
        : low_scales((Floats)(load(words) << 16)), high_scales((Floats)(load(words) & 0xffff0000u)) {}
    SPECINFER_INLINE Floats low(Words words, int input) const { return times(words, 2 * BITS * input, low_scales); }
    SPECINFER_INLINE Floats high(Words words, int input) const {
        return times(words, 2 * BITS * input + BITS, high_scales);
    }

    SPECINFER_INLINE static Floats times(Words words, int from, Floats scales) {
        const Words shifted = from > TOP ? words >> (from - TOP) : words << (TOP - from);
        const Floats integers = (Floats)((shifted & MASK) | EXPONENT);
#if defined(__FMA__) && !defined(__clang__)
        return integers * scales + -ZERO * scales;  // one fused instruction, which rounds nothing here
#else
        return (integers - ZERO) * scales;
#endif
    }
};

struct Weights {
    const uint32_t* block;
    const uint32_t* next;  // to prefetch meanwhile: a part, 1 / share of a block
    int64_t share;
};

// The words of a block for so many inputs.
template <class Form>
constexpr int64_t words_of(int64_t size) {
    return WORDS * (size / Form::INPUTS) + Form::SCALES * (size / GROUP);
}

// Add the products of R states with the numbers of a word, from one of its inputs on.
template <class Form, int R, int INPUT = 0>
SPECINFER_INLINE void add(
    const Form& form, Words words, const float* states, int64_t size, Floats* low, Floats* high) {
    const Floats even = form.low(words, INPUT), odd = form.high(words, INPUT);
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) {
        low[r] += even * states[r * size + INPUT];
        high[r] += odd * states[r * size + INPUT];
    }
    if constexpr (INPUT + 1 < Form::INPUTS) add<Form, R, INPUT + 1>(form, words, states, size, low, high);
}

// Multiply R states (R, K) with a block: sums of 2 LANES outputs, LANES of them 16 after the others, `width` a row.
template <class Form, int R>
void multiply(const float* states, const Weights& weights, float* sums, int64_t size, int64_t width) {
    Floats low[R] = {}, high[R] = {};
    const uint32_t* words = weights.block;
    for (int64_t from = 0; from < size; from += GROUP) {
        const int64_t to = std::min<int64_t>(from + GROUP, size);
        const int64_t begin = words_of<Form>(from) / weights.share, end = words_of<Form>(to) / weights.share;
        for (int64_t word = begin; word < end; word += WORDS) __builtin_prefetch(weights.next + word, 0, 2);
        const Form form(words);
        words += Form::SCALES;
#pragma GCC unroll 1
        for (int64_t k = from; k < to; k += Form::INPUTS, words += WORDS)
            add<Form, R>(form, load(words), states + k, size, low, high);
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) {
        memcpy(sums + r * width, &low[r], sizeof low[r]);
        memcpy(sums + r * width + BLOCK / 2, &high[r], sizeof high[r]);
    }
}

using Multiply = void (*)(const float*, const Weights&, float*, int64_t, int64_t);

template <class Form, int... R>
Multiply multiplication(int64_t rows, std::integer_sequence<int, R...>) {
    constexpr Multiply all[] = {multiply<Form, R + 1>...};
    return all[rows - 1];
}

// One block's outputs (rows, outputs) of states (rows, K).
template <class Form>
void multiply_block(
    const float* states, const uint32_t* block, float* results, int64_t rows, int64_t size, int64_t outputs) {
    const int64_t groups = (rows + ROWS - 1) / ROWS, words = words_of<Form>(size);
    for (int64_t group = 0; group < groups; group++) {
        const int64_t from = rows * group / groups, to = rows * (group + 1) / groups;
        const auto run = multiplication<Form>(to - from, std::make_integer_sequence<int, ROWS>());
        for (int half = 0; half < BLOCK / 2; half += LANES) {
            const Weights weights{block + half, block + words + words * group / groups, groups};
            run(states + from * size, weights, results + from * outputs + half, size, outputs);
        }
    }
}

// results (rows, outputs) = states (rows, size) times the transpose of the packed weight.
template <class Form>
void linear(
    const float* states, const uint32_t* packed, float* results, int64_t rows, int64_t size, int64_t outputs) {
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
                const uint32_t* weights = packed + block * words_of<Form>(size);
                float* found = results + top * outputs + block * BLOCK;
                if (const int64_t last = outputs - block * BLOCK; last < BLOCK) {
                    float sums[PANEL * BLOCK];
                    multiply_block<Form>(panel, weights, sums, count, size, BLOCK);
                    for (int64_t row = 0; row < count; row++)
                        std::copy_n(sums + row * BLOCK, last, found + row * outputs);
                } else {
                    multiply_block<Form>(panel, weights, found, count, size, outputs);
                }
            }
        }
    }
}

template <class Form>
AOTITorchError call(AtenTensorHandle results, AtenTensorHandle states, AtenTensorHandle packed) {
    void *to, *from, *weight;
    int64_t *shape, *sizes;
    aoti_torch_get_data_ptr(results, &to);
    aoti_torch_get_data_ptr(states, &from);
    aoti_torch_get_data_ptr(packed, &weight);
    aoti_torch_get_sizes(results, &shape);
    aoti_torch_get_sizes(states, &sizes);
    linear<Form>((const float*)from, (const uint32_t*)weight, (float*)to, shape[0], sizes[1], shape[1]);
    return 0;
}

}  // namespace specinfer

#pragma GCC pop_options
#undef SPECINFER_INLINE

// Called by the code that Inductor writes; they return 0.
inline AOTITorchError aoti_torch_specinfer_linear_bf16(AtenTensorHandle a, AtenTensorHandle b, AtenTensorHandle c) {
    return specinfer::call<specinfer::Bfloat16>(a, b, c);
}
inline AOTITorchError aoti_torch_specinfer_linear_int8(AtenTensorHandle a, AtenTensorHandle b, AtenTensorHandle c) {
    return specinfer::call<specinfer::Integers<8>>(a, b, c);
}
inline AOTITorchError aoti_torch_specinfer_linear_int4(AtenTensorHandle a, AtenTensorHandle b, AtenTensorHandle c) {
    return specinfer::call<specinfer::Integers<4>>(a, b, c);
}
