// Products of a few states with a weight of bfloat16 numbers, or of rounded ones, for compiled passes on a CPU.
//
// Knows: one packed weight, one matrix of states.  Does not know: models, graphs, how numbers were rounded.
//
// The numbers of a weight are bfloat16 numbers.  They become float32 numbers, exactly, in registers.  So products and sums
// are those of float32, but half the bytes are read, and reading is what a product of a few states waits for.  A product
// of many states waits for multiplications.
// States that are bfloat16 numbers, too, take half as many where the processor has AVX512-BF16.  Where it has AMX, a tile
// of 16 states by 32 inputs is multiplied at once with tiles of the weight as it stands.
//
// Or a weight is rounded to integers of 8 bits times a scale for each output, and so is each state.  Then products and
// sums are those of integers, four times as many at a time where the processor has AVX512-VNNI.
//
// A packed weight is a row of blocks of 32 outputs.  Its words have 32 bits.
//
//     bfloat16     32 words, one for each output, hold the numbers of two inputs, the first in the lower bits
//     rounded      32 words, one for each output, hold integers of four inputs, the first in the lowest bits; behind all
//                  of them stand 32 words of scales, float32, and 32 of what the sum of an output's integers times 128
//                  is, for states are stored with 128 added
//
// The last block may be filled up with zeros.  A sum is made in one order of the inputs, whatever else is multiplied, so
// it has the same bits in every pass.

#pragma once

#include <omp.h>

#include <algorithm>
#include <type_traits>
#include <utility>
#include <vector>

#include "tiles.h"
#include "vectors.h"

#pragma GCC push_options
#pragma GCC optimize("O3", "fp-contract=fast")

namespace specinfer {

#ifdef __AVX512F__
constexpr int ROWS = 12;  // states that all registers hold the sums of
#else
constexpr int ROWS = 6;
#endif
constexpr int BLOCK = 32, GROUP = 32;  // outputs of a block, inputs between two steps of prefetching
constexpr int64_t PANEL = 96;          // states that stay in the cache while all weights pass by
constexpr int64_t SMALL = 1 << 16;     // multiplications that are not worth a second thread

// Words that belong to one output each.
struct Whole {
    Words first, second;  // of LANES outputs, and of those 16 after

    SPECINFER_INLINE void take(const uint32_t* words) { first = load(words), second = load(words + BLOCK / 2); }
};

// Such words by states whose numbers fill words in the same way: a form adds the products of two words to a sum.
template <class Form, class Number>
struct WordByWord : Whole {
    using State = Number;
    static constexpr int INPUTS = sizeof(uint32_t) / sizeof(Number);  // of a word
    template <int R>
    SPECINFER_INLINE void add(const Number* states, int64_t size, Floats* low, Floats* high) const {
#pragma GCC unroll 16
        for (int r = 0; r < R; r++) {
            uint32_t word;
            memcpy(&word, states + r * size, sizeof word);
            low[r] = Form::add_products(low[r], first, word);
            high[r] = Form::add_products(high[r], second, word);
        }
    }
};

// Pairs of bfloat16 numbers, by float32 states.
struct Bfloat16 : Whole {
    using State = float;
    static constexpr int INPUTS = 2;
    template <int R>
    SPECINFER_INLINE void add(const float* states, int64_t size, Floats* low, Floats* high) const {
        const Floats even[2] = {(Floats)(first << 16), (Floats)(second << 16)};
        const Floats odd[2] = {(Floats)(first & 0xffff0000u), (Floats)(second & 0xffff0000u)};
#pragma GCC unroll 16
        for (int r = 0; r < R; r++) {
            low[r] += even[0] * states[r * size];
            high[r] += even[1] * states[r * size];
        }
#pragma GCC unroll 16
        for (int r = 0; r < R; r++) {
            low[r] += odd[0] * states[r * size + 1];
            high[r] += odd[1] * states[r * size + 1];
        }
    }
};

// The same by bfloat16 states.
struct Bfloat16Pairs : WordByWord<Bfloat16Pairs, uint16_t> {
    SPECINFER_INLINE static Floats add_products(Floats sum, Words numbers, uint32_t pair) {
#ifdef __AVX512BF16__
        return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)numbers, (__m512bh)_mm512_set1_epi32(pair));
#else
        const Words states = pair + Words{};
        sum += (Floats)(numbers << 16) * (Floats)(states << 16);
        return sum + (Floats)(numbers & 0xffff0000u) * (Floats)(states & 0xffff0000u);
#endif
    }
};

// Integers of 8 bits times the scale of their output, by states of 8 bits with 128 added.
struct Rounded : WordByWord<Rounded, uint8_t> {

    // Sums are integers, which stand in registers of floats.
    SPECINFER_INLINE static Floats add_products(Floats sum, Words numbers, uint32_t four) {
#ifdef __AVX512VNNI__
        return (Floats)_mm512_dpbusd_epi32((__m512i)sum, _mm512_set1_epi32(four), (__m512i)numbers);
#else
        Integers32 total = (Integers32)sum;
        for (int k = 0; k < 4; k++)
            total += ((Integers32)(numbers << (24 - 8 * k)) >> 24) * (int32_t)(four >> 8 * k & 255);
        return (Floats)total;
#endif
    }

    SPECINFER_INLINE static Floats scaled(Floats sum, const uint32_t* scales, float scale) {
        const Integers32 integers = (Integers32)((Words)sum - load(scales + BLOCK));
        return __builtin_convertvector(integers, Floats) * ((Floats)load(scales) * scale);
    }
};

template <class Form>
constexpr bool IS_ROUNDED = std::is_same_v<Form, Rounded>;

// States (rows, K) as a form takes them, and the scale of each if they are rounded.
template <class Form>
struct States {
    const typename Form::State* numbers;
    const float* scales;
    int64_t size;  // K

    SPECINFER_INLINE States after(int64_t rows) const {
        return {numbers + rows * size, scales ? scales + rows : nullptr, size};
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
    return BLOCK * (size / Form::INPUTS);
}

// All words of a block.
template <class Form>
constexpr int64_t words_of_block(int64_t size) {
    return words_of<Form>(size) + (IS_ROUNDED<Form> ? 2 * BLOCK : 0);
}

// Multiply R states with a block: sums of 2 LANES outputs, LANES of them 16 after the others, `width` a row.
template <class Form, int R>
void multiply(const States<Form>& states, const Weights& weights, float* sums, int64_t width) {
    Floats low[R] = {}, high[R] = {};
    const uint32_t* words = weights.block;
    const int64_t size = states.size;
    for (int64_t from = 0; from < size; from += GROUP) {
        const int64_t to = std::min<int64_t>(from + GROUP, size);
        const int64_t begin = words_of<Form>(from) / weights.share, end = words_of<Form>(to) / weights.share;
        for (int64_t word = begin; word < end; word += LINE) __builtin_prefetch(weights.next + word, 0, 2);
        Form form;
#pragma GCC unroll 1
        for (int64_t k = from; k < to; k += Form::INPUTS, words += BLOCK) {
            form.take(words);
            form.template add<R>(states.numbers + k, size, low, high);
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) {
        if constexpr (IS_ROUNDED<Form>) {
            low[r] = Form::scaled(low[r], words, states.scales[r]);
            high[r] = Form::scaled(high[r], words + BLOCK / 2, states.scales[r]);
        }
        store(sums + r * width, low[r]);
        store(sums + r * width + BLOCK / 2, high[r]);
    }
}

template <class Form>
using Multiply = void (*)(const States<Form>&, const Weights&, float*, int64_t);

template <class Form, int... R>
Multiply<Form> multiplication(int64_t rows, std::integer_sequence<int, R...>) {
    constexpr Multiply<Form> all[] = {multiply<Form, R + 1>...};
    return all[rows - 1];
}

// One block's outputs (rows, outputs) of some states.
template <class Form>
void multiply_block(
    const States<Form>& states, const uint32_t* block, float* results, int64_t rows, int64_t outputs) {
    const int64_t groups = (rows + ROWS - 1) / ROWS, words = words_of_block<Form>(states.size);
    for (int64_t group = 0; group < groups; group++) {
        const int64_t from = rows * group / groups, to = rows * (group + 1) / groups;
        const auto run = multiplication<Form>(to - from, std::make_integer_sequence<int, ROWS>());
        for (int half = 0; half < BLOCK / 2; half += LANES) {
            const Weights weights{block + half, block + words + words * group / groups, groups};
            run(states.after(from), weights, results + from * outputs + half, outputs);
        }
    }
}

#if defined(SPECINFER_TILES) && defined(__AMX_BF16__)
// ---- tiles of bfloat16 numbers ----

template <class Form>
constexpr bool HAS_TILES = std::is_same_v<Form, Bfloat16Pairs>;
constexpr int64_t TILED = 32, INPUTS_OF_TILE = 32;  // states of a product; inputs of a tile
constexpr int64_t BYTES_AHEAD = 8192;               // of a weight that are on their way meanwhile

// Sums: two of 16 states by 16 outputs, then two of the other states; states: two; weights: two.
inline TileShapes shapes_for(int64_t rows) {
    const uint8_t first = std::min<int64_t>(rows, 16), second = std::max<int64_t>(rows - 16, 1);
    return {1, 0, {}, {64, 64, 64, 64, 64, 64, 64, 64}, {first, first, second, second, first, second, 16, 16}};
}

// Multiply up to 32 states (rows, K) with a block: sums of its outputs, `width` a row.
template <bool MANY>
void multiply_in_tiles(const uint16_t* states, int64_t size, const uint32_t* block, float* sums, int64_t width) {
    asm volatile("tilezero %%tmm0; tilezero %%tmm1; tilezero %%tmm2; tilezero %%tmm3" ::: "memory");
    const int64_t stride = size * sizeof *states;
    for (int64_t k = 0; k < size; k += INPUTS_OF_TILE, block += BLOCK * INPUTS_OF_TILE / 2) {
        for (int64_t line = 0; line < BLOCK; line++)
            __builtin_prefetch((const char*)block + BYTES_AHEAD + line * 4 * LINE, 0, 2);
        SPECINFER_LOAD_TILE(6, block, 4 * BLOCK);
        SPECINFER_LOAD_TILE(7, block + BLOCK / 2, 4 * BLOCK);
        SPECINFER_LOAD_TILE(4, states + k, stride);
        asm volatile("tdpbf16ps %%tmm6, %%tmm4, %%tmm0; tdpbf16ps %%tmm7, %%tmm4, %%tmm1" ::: "memory");
        if constexpr (MANY) {
            SPECINFER_LOAD_TILE(5, states + 16 * size + k, stride);
            asm volatile("tdpbf16ps %%tmm6, %%tmm5, %%tmm2; tdpbf16ps %%tmm7, %%tmm5, %%tmm3" ::: "memory");
        }
    }
    SPECINFER_STORE_TILE(0, sums, 4 * width);
    SPECINFER_STORE_TILE(1, sums + BLOCK / 2, 4 * width);
    if constexpr (MANY) {
        SPECINFER_STORE_TILE(2, sums + 16 * width, 4 * width);
        SPECINFER_STORE_TILE(3, sums + 16 * width + BLOCK / 2, 4 * width);
    }
}

// One block's outputs (rows, outputs) of some states.
inline void multiply_block_in_tiles(
    InTiles& tiles, const States<Bfloat16Pairs>& states, const uint32_t* block, float* results, int64_t rows,
    int64_t outputs) {
    for (int64_t from = 0; from < rows; from += TILED) {
        const int64_t some = std::min(TILED, rows - from);
        const uint16_t* numbers = states.numbers + from * states.size;
        if (some < TILED && rows > TILED) tiles.reshape(shapes_for(some));
        if (some > 16)
            multiply_in_tiles<true>(numbers, states.size, block, results + from * outputs, outputs);
        else
            multiply_in_tiles<false>(numbers, states.size, block, results + from * outputs, outputs);
        if (some < TILED && rows > TILED) tiles.reshape(shapes_for(TILED));
    }
}
#else
template <class Form>
constexpr bool HAS_TILES = false;
constexpr int64_t TILED = 1, INPUTS_OF_TILE = 1;

inline TileShapes shapes_for(int64_t) { return {}; }

template <class Form>
void multiply_block_in_tiles(InTiles&, const States<Form>&, const uint32_t*, float*, int64_t, int64_t) {}
#endif

// results (rows, outputs) = states (rows, K) times the transpose of the packed weight.
template <class Form>
void linear(const States<Form>& states, const uint32_t* packed, float* results, int64_t rows, int64_t outputs) {
    const int64_t blocks = (outputs + BLOCK - 1) / BLOCK;
    const int threads = rows * states.size * outputs < SMALL ? 1 : omp_get_max_threads();
    const bool in_tiles = HAS_TILES<Form> && states.size % INPUTS_OF_TILE == 0 && tiles_are_allowed();
#pragma omp parallel num_threads(threads)
    {
        const int64_t part = omp_get_thread_num(), parts = omp_get_num_threads();
        const int64_t from = blocks * part / parts, to = blocks * (part + 1) / parts;
        for (int64_t top = 0; top < rows; top += PANEL) {
            const int64_t count = std::min(PANEL, rows - top);
            const auto panel = states.after(top);
            InTiles tiles(in_tiles, shapes_for(std::min(count, TILED)));
            const auto multiply = [&](const uint32_t* weights, float* to, int64_t width) {
                if constexpr (HAS_TILES<Form>)
                    if (in_tiles) return multiply_block_in_tiles(tiles, panel, weights, to, count, width);
                multiply_block<Form>(panel, weights, to, count, width);
            };
            for (int64_t block = from; block < to; block++) {
                const uint32_t* weights = packed + block * words_of_block<Form>(states.size);
                float* found = results + top * outputs + block * BLOCK;
                if (const int64_t last = outputs - block * BLOCK; last < BLOCK) {
                    float sums[PANEL * BLOCK];
                    multiply(weights, sums, BLOCK);
                    for (int64_t row = 0; row < count; row++)
                        std::copy_n(sums + row * BLOCK, last, found + row * outputs);
                } else {
                    multiply(weights, found, outputs);
                }
            }
        }
    }
}

// Round a state to 8 bits with 128 added; return its scale, which is no number if a number of the state is none.
inline float round_state(const float* state, uint8_t* numbers, int64_t size) {
    Floats most = {}, nothing = {};
    for (int64_t k = 0; k < size; k += LANES) {
        Floats some = {};
        memcpy(&some, state + k, sizeof(float) * std::min<int64_t>(LANES, size - k));
        const Floats magnitudes = (Floats)((Words)some & 0x7fffffffu);
        most = magnitudes > most ? magnitudes : most;
        nothing += 0 * some;
    }
    float largest = 1e-12f, unknown = 0;
    for (int lane = 0; lane < LANES; lane++) {
        largest = std::max(largest, most[lane]);
        unknown += nothing[lane];
    }
    const float steps = 127 / largest;
    for (int64_t k = 0; k < size; k++) {
        const float shifted = state[k] * steps + (0x1.8p23f + 128);  // an integer in the lowest bits
        uint32_t bits;
        memcpy(&bits, &shifted, sizeof bits);
        numbers[k] = bits;
    }
    return largest / 127 + unknown;
}

template <class Form>
void multiply_all(const float* states, const uint32_t* packed, float* results, int64_t rows, int64_t size, int64_t n) {
    if constexpr (IS_ROUNDED<Form>) {
        std::vector<uint8_t> numbers(rows * size);
        std::vector<float> scales(rows);
#pragma omp parallel for num_threads(rows * size < SMALL ? 1 : omp_get_max_threads())
        for (int64_t row = 0; row < rows; row++)
            scales[row] = round_state(states + row * size, numbers.data() + row * size, size);
        linear<Form>({numbers.data(), scales.data(), size}, packed, results, rows, n);
    } else {
        linear<Form>({(const typename Form::State*)states, nullptr, size}, packed, results, rows, n);
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
    multiply_all<Form>((const float*)from, (const uint32_t*)weight, (float*)to, shape[0], sizes[1], shape[1]);
    return 0;
}

}  // namespace specinfer

#pragma GCC pop_options

// Called by the code that Inductor writes; they return 0.
inline AOTITorchError aoti_torch_specinfer_linear_bf16(AtenTensorHandle a, AtenTensorHandle b, AtenTensorHandle c) {
    return specinfer::call<specinfer::Bfloat16>(a, b, c);
}
inline AOTITorchError aoti_torch_specinfer_linear_bf16_states(
    AtenTensorHandle a, AtenTensorHandle b, AtenTensorHandle c) {
    return specinfer::call<specinfer::Bfloat16Pairs>(a, b, c);
}
inline AOTITorchError aoti_torch_specinfer_linear_dynamic_int8(
    AtenTensorHandle a, AtenTensorHandle b, AtenTensorHandle c) {
    return specinfer::call<specinfer::Rounded>(a, b, c);
}
