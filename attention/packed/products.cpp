// Products of a few states with a packed matrix, and its rows, on a CPU.
//
// Knows: the packed layout (layout.py), one matrix of states.  Does not know: models, files.
//
// Weights stay the integers that they are in their file.  States are rounded to integers of 16 bits, with a scale for up to
// 256 inputs, or for 32 where weights have one for each 32: two bytes, which the processor multiplies four inputs at a time.
// Where a matrix asks for it, they are rounded to a byte with a scale for 32 inputs.  Inputs that share the scales of states
// and of weights are summed as integers, which is exact; these sums are added up in one order, whatever else is multiplied.
// So an output has the same bits in every product: that of many states in tiles (AMX), that of few in registers.
//
// A matrix is a row of blocks of 32 outputs.  Each has a kind of its own, found in the table that begins the matrix.

#include <omp.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

#include "../compiler/kernels/tiles.h"

#define INLINE inline __attribute__((always_inline))
#if defined(__AVX512BW__)  // the instructions that the widest registers have
#define SIMD(name) _mm512_##name
#define SIMD_INTEGERS __m512i
#elif defined(__AVX2__) && !defined(__AVX512F__)
#define SIMD(name) _mm256_##name
#define SIMD_INTEGERS __m256i
#endif

namespace {

using specinfer::InTiles, specinfer::TileShapes, specinfer::tiles_are_allowed;

// Numbers of a register; by the bytes of a state, how many states' sums fit into all, and are best where there are more.
#ifdef __AVX512F__
constexpr int LANES = 16, MOST_ROWS[] = {0, 8, 5}, OF_MANY[] = {0, 7, 4};
#else
constexpr int LANES = 8, MOST_ROWS[] = {0, 4, 3}, OF_MANY[] = {0, 4, 3};
#endif
constexpr int BLOCK = 32, GROUP = 32;              // outputs of a block; inputs of a group
constexpr int PARTS = BLOCK / LANES;
constexpr int LINE = 64;                           // bytes of a word of 16 outputs
#ifdef __AMX_INT8__  // bytes of weights that are on their way meanwhile, and into which cache
constexpr int AHEAD = 8192, CACHE = 2;
#else  // as is best on an EPYC with Zen 4 (docs/passes.md); other processors without AMX were not measured
constexpr int AHEAD = 4096, CACHE = 3;
#endif
constexpr int64_t PANEL = 96;                      // states that stay in the cache while weights pass by
constexpr int64_t SMALL = 1 << 15;                 // multiplications that are not worth a second thread

#ifdef __aarch64__
typedef __fp16 Half;  // GCC has no other name for it before version 13
#else
typedef _Float16 Half;
#endif
typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef uint32_t Words __attribute__((vector_size(4 * LANES)));
typedef int32_t Integers __attribute__((vector_size(4 * LANES)));

template <class Register>
INLINE Register load(const void* from) {
    Register loaded;
    memcpy(&loaded, from, sizeof loaded);
    return loaded;
}

INLINE void store(float* to, const Floats& found) { memcpy(to, &found, sizeof found); }

// ---- kinds ----

constexpr uint32_t NARROW = 1 << 24;  // stands in the head beside a kind: states have a byte
enum Scales { HALF, FACTORS, SINGLE };  // float16; float16 for 256 inputs times an integer; float32 for a span

struct Kind {
    int bits, zero, span;  // of a span: groups that it has
    Scales scales;
    bool table, minimum, halves;  // integers look numbers up; numbers have a minimum; 16 inputs share a scale
    bool narrow;                  // states have a byte

    INLINE explicit Kind(uint32_t code)
        : bits(code & 15), zero(code >> 16 & 255), span(1 << (code >> 9 & 7)), scales(Scales(code >> 4 & 3)),
          table(code >> 6 & 1), minimum(code >> 7 & 1), halves(code >> 8 & 1), narrow(code & NARROW) {}
    INLINE bool begins_span(int64_t group) const { return scales != HALF && (group & (span - 1)) == 0; }
    INLINE int of_span() const { return LINE * (scales == SINGLE ? 2 + minimum : 1 + minimum); }  // bytes before a span
    INLINE int of_scales() const {                                                                // before 32 inputs
        return scales == SINGLE ? 0 : BLOCK * (scales == HALF ? 2 : 1) * (1 + minimum) * (1 + halves);
    }
    INLINE int of_half() const { return LINE * bits; }  // of the integers of 16 outputs, 32 inputs
};

struct Block {
    const uint8_t* bytes;
    Kind kind;

    INLINE Block(const uint8_t* matrix, int64_t number, bool wide = true)  // states have two bytes in any case
        : bytes(matrix + load<uint64_t>(matrix + LINE + 16 * number)),
          kind(load<uint32_t>(matrix + LINE + 16 * number + 8) & ~(wide ? NARROW : 0)) {}
};

// A block of one of several matrices, and where its outputs stand among those of all.
struct Place {
    const uint8_t* matrix;
    int64_t number, first, outputs;
};

// ---- numbers in registers ----

INLINE Floats halves_to_floats(const uint8_t* from) {
#if defined(__AVX512F__)
    return (Floats)_mm512_cvtph_ps(load<__m256i>(from));
#elif defined(__F16C__)
    return (Floats)_mm256_cvtph_ps(load<__m128i>(from));
#else
    Floats found;
    for (int lane = 0; lane < LANES; lane++) found[lane] = (float)load<Half>(from + 2 * lane);
    return found;
#endif
}

INLINE Integers bytes_to_integers(const uint8_t* from) {
#if defined(__AVX512F__)
    return (Integers)_mm512_cvtepi8_epi32(load<__m128i>(from));
#else
    Integers found;
    for (int lane = 0; lane < LANES; lane++) found[lane] = (int8_t)from[lane];
    return found;
#endif
}

INLINE Floats floats(Integers numbers) { return __builtin_convertvector(numbers, Floats); }

// Four bytes without a sign for each lane, times four with one, added up.
template <int BITS>
INLINE Integers add_products(Integers sum, Words numbers, uint32_t four) {
#if defined(__AVX512VNNI__)
    return (Integers)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)numbers, _mm512_set1_epi32(four));
#elif defined(__AVXVNNI__)
    return (Integers)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)numbers, _mm256_set1_epi32(four));
#elif defined(SIMD)
    const auto weights = (SIMD_INTEGERS)numbers, states = SIMD(set1_epi32)(four);
    if constexpr (BITS < 8) {  // else sums of pairs need more than 16 bits
        return sum + (Integers)SIMD(madd_epi16)(SIMD(maddubs_epi16)(weights, states), SIMD(set1_epi16)(1));
    }
    const auto even = (SIMD_INTEGERS)(numbers & 0x00ff00ffu), odd = SIMD(srli_epi16)(weights, 8);
    const auto first = SIMD(srai_epi16)(SIMD(slli_epi16)(states, 8), 8), second = SIMD(srai_epi16)(states, 8);
    return sum + (Integers)SIMD(madd_epi16)(even, first) + (Integers)SIMD(madd_epi16)(odd, second);
#elif defined(__ARM_FEATURE_DOTPROD)
    const int8x16_t states = vreinterpretq_s8_u32(vdupq_n_u32(four)), middle = vdupq_n_s8(64);
    for (int part = 0; part < LANES; part += 4) {
        int32x4_t found = load<int32x4_t>((const int32_t*)&sum + part);
        int8x16_t weights = load<int8x16_t>((const uint32_t*)&numbers + part);
        if constexpr (BITS == 8) {  // 128 less, as both are to have signs; and 128 times the states
            weights = veorq_s8(weights, vdupq_n_s8(-128));
            found = vdotq_s32(vdotq_s32(found, middle, states), middle, states);
        }
        found = vdotq_s32(found, weights, states);
        memcpy((int32_t*)&sum + part, &found, sizeof found);
    }
    return sum;
#else
    for (int k = 0; k < 4; k++) sum += (Integers)(numbers >> (8 * k) & 255u) * (int32_t)(int8_t)(four >> (8 * k));
    return sum;
#endif
}

// Look up four bytes for each lane among 16.
INLINE Words look_up(Words bytes, const uint8_t* table) {
#if defined(__AVX512BW__)
    return (Words)_mm512_shuffle_epi8(_mm512_broadcast_i32x4(load<__m128i>(table)), (__m512i)bytes);
#elif defined(__AVX2__)
    return (Words)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(load<__m128i>(table)), (__m256i)bytes);
#else
    uint8_t found[4 * LANES];
    memcpy(found, &bytes, sizeof found);
#ifdef __ARM_NEON
    for (int part = 0; part < 4 * LANES; part += 16)
        vst1q_u8(found + part, vqtbl1q_u8(vld1q_u8(table), vld1q_u8(found + part)));
#else
    for (uint8_t& byte : found) byte = table[byte];
#endif
    return load<Words>(found);
#endif
}

// Integers of LANES outputs: word `index` of 8 holds those of four inputs, a byte each.
template <int BITS>
INLINE Words integers(const uint8_t* half, int index) {
    const auto plane = [&](const uint8_t* from, int bits, int first = 0) {  // of so many bits; which one is its lowest
        const int shared = 8 / bits, moved = bits * (index % shared) - first;  // words share lines
        const Words line = load<Words>(from + LINE * (index / shared));
        return (moved < 0 ? line << -moved : line >> moved) & (0x01010101u * (((1u << bits) - 1) << first));
    };
    if constexpr (BITS == 8) return load<Words>(half + LINE * index);
    if constexpr (BITS == 6) return plane(half, 4) | plane(half + 4 * LINE, 2, 4);
    if constexpr (BITS == 5) return plane(half, 4) | plane(half + 4 * LINE, 1, 4);
    if constexpr (BITS == 4) return plane(half, 4);
    if constexpr (BITS == 3) return plane(half, 2) | plane(half + 2 * LINE, 1, 2);
    return plane(half, 2);
}

// ---- states ----

constexpr int MOST_TOGETHER = 8, PAIR = 2 * GROUP;  // groups of states that share a scale; inputs of a step in tiles
constexpr float INFINITE = INFINITY;

// A group of a state.  An input is an integer times the scale, and an integer 256 times a byte plus another one, or a byte.
// Sums are those of the first and the last 16 inputs, and of all.
struct Totals {
    float scale, scaled_sums[3];
    int32_t high[3], low[3];

    template <int BYTES>
    INLINE int32_t sum(int part) const { return BYTES == 2 ? 256 * high[part] + low[part] : high[part]; }
};

// The bytes of a state's 64 inputs, one after the other.
struct Bytes {
    int8_t high[PAIR], low[PAIR];
};

// Some rows of states.
struct Panel {
    Totals* totals;  // (groups, rows)
    Bytes* bytes;    // (pairs of groups, rows)
    int64_t groups, rows;
    int shared;       // groups that share a scale: a power of two
    int64_t in_tile;  // of the rows; 0: tiles are not used

    INLINE Totals* totals_of(int64_t group, int64_t row) const { return totals + group * rows + row; }
    INLINE int8_t* bytes_of(int64_t group, int64_t row) const {  // the high ones; the low ones are PAIR bytes on
        return bytes[group / 2 * rows + row].high + group % 2 * GROUP;
    }
    INLINE Panel from(int64_t row) const { return {totals + row, bytes + row, groups, rows, shared, in_tile}; }
};

// How states are rounded: to two bytes with a scale for 32 inputs, or for up to 256; to a byte with one for 32.
enum Form { FOR_32, FOR_256, BYTE, FORMS };

INLINE Form form_of(const Kind& kind) { return kind.narrow ? BYTE : kind.scales == HALF ? FOR_32 : FOR_256; }

// How many of a row's groups share a scale.
INLINE int sharing(Form form, int64_t groups) {
    return form == FOR_256 ? (int)std::min<int64_t>(groups & -groups, MOST_TOGETHER) : 1;
}

// Round groups of a row that share a scale.  Loops are such that compilers make them instructions for many numbers at once.
template <int BYTES>
void round_states(const float* from, const Panel& to, int64_t group, int64_t row) {
    constexpr int SHIFT = BYTES == 2 ? 8 : 0, UNIT = 1 << SHIFT;
    constexpr float LARGEST = 127 * UNIT;
    int32_t largest = 0;  // numbers without their signs are ordered as their bits are
    for (int k = 0; k < GROUP * to.shared; k++) largest = std::max(largest, load<int32_t>(from + k) & INT32_MAX);
    const bool finite = largest < load<int32_t>(&INFINITE);
    const float range = finite ? load<float>(&largest) : 0, steps = range > 0 ? LARGEST / range : 0;
    const float scale = finite ? range / LARGEST : NAN;
    for (int64_t end = group + to.shared; group < end; group++, from += GROUP) {
        int8_t *high = to.bytes_of(group, row), *low = high + PAIR;
        int32_t integers[GROUP], highs[GROUP];
        for (int k = 0; k < GROUP; k++) integers[k] = (int32_t)std::rint(finite ? from[k] * steps : 0);
        for (int k = 0; k < GROUP; k++) highs[k] = (integers[k] + UNIT / 2) >> SHIFT;
        for (int k = 0; k < GROUP; k++) high[k] = (int8_t)highs[k];
        if (BYTES == 2)
            for (int k = 0; k < GROUP; k++) low[k] = (int8_t)integers[k];
        Totals totals;
        totals.scale = scale;
        for (int part = 0; part < 2; part++) {
            int32_t sum = 0, high_sum = 0;
            for (int k = GROUP / 2 * part; k < GROUP / 2 * (part + 1); k++) sum += integers[k], high_sum += highs[k];
            totals.high[part] = high_sum, totals.low[part] = sum - UNIT * high_sum;
        }
        totals.high[2] = totals.high[0] + totals.high[1], totals.low[2] = totals.low[0] + totals.low[1];
        for (int part = 0; part < 3; part++) totals.scaled_sums[part] = scale * (float)totals.sum<BYTES>(part);
        *to.totals_of(group, row) = totals;
    }
}

// How groups become floating point numbers: each alone, as sums of integers, or multiplied with factors and summed.
enum Groups { ALONE, SUMMED, FACTORED };

// How many groups' integers are summed, where so many share the scales of states.
INLINE int together(const Kind& kind, int shared) { return kind.scales == HALF ? 1 : std::min(kind.span, shared); }
template <Groups HOW>
INLINE int together(const Kind& kind, int shared) {
    return HOW == ALONE ? 1 : HOW == FACTORED ? shared : together(kind, shared);
}

// ---- a block ----

// What the sums of 16 or 32 inputs are multiplied with, for LANES outputs.
struct Scaled {
    Floats scale, minimum;
};

// Scales are read once for each group: those of LANES outputs from `first` on.
struct Reader {
    const Kind kind;
    const uint8_t* bytes;  // of the group, scales first
    const int first, to_integers = kind.of_scales() + first / 16 * kind.of_half() + first % 16 * 4;
    const int size = kind.of_scales() + 2 * kind.of_half(), to_minima = BLOCK * (1 + kind.halves) + first;
    Floats super, super_minimum;

    INLINE Reader(const Block& block, int first)
        : kind(block.kind), bytes(block.bytes + (block.kind.table ? LINE : 0)), first(first) {}
    INLINE void begin(int64_t group) {
        if (!kind.begins_span(group)) return;
        const bool single = kind.scales == SINGLE;
        super = single ? load<Floats>(bytes + 4 * first) : halves_to_floats(bytes + 2 * first);
        if (kind.minimum) super_minimum = halves_to_floats(bytes + (single ? 2 : 1) * LINE + 2 * first);
        if (kind.minimum && single) super_minimum *= super;
        bytes += kind.of_span();
    }
    INLINE Integers factor(int half) const { return bytes_to_integers(bytes + half * BLOCK + first); }
    template <Groups HOW>
    INLINE Floats minimum(int half) const {
        if (HOW == FACTORED) return super_minimum * floats(bytes_to_integers(bytes + half * BLOCK + to_minima));
        if (kind.scales == SINGLE) return super_minimum;
        return halves_to_floats(bytes + 2 * to_minima);
    }
    INLINE Floats scale() const {  // of a span, or of a group that has its own
        return kind.scales == HALF ? halves_to_floats(bytes + 2 * first) : super;
    }
    INLINE const uint8_t* integers() const { return bytes + to_integers; }
    INLINE void next() { bytes += size; }
};

// ---- sums ----
//
// Groups that share their scales, those of the states and of the weights, are summed as integers: high and low bytes of
// states each.  Groups with factors of their own are multiplied by them before.  Integers are exact, so they may be found
// in any way; what is done with floating point numbers stands here, once, in one order: minima group by group, then the
// integers.

INLINE Floats add_product(const Floats& sum, const Floats& one, const Floats& other) {  // rounded once, where it can be
#if defined(__AVX512F__)
    return (Floats)_mm512_fmadd_ps((__m512)one, (__m512)other, (__m512)sum);
#elif defined(__FMA__)
    return (Floats)_mm256_fmadd_ps((__m256)one, (__m256)other, (__m256)sum);
#else
    return one * other + sum;
#endif
}

INLINE void add_minimum(Floats& sum, const Floats& minimum, float scaled_sum) {
    sum = add_product(sum, minimum, scaled_sum - Floats{});
}

INLINE void add_bytes(Floats& sum, Integers integers, float scale_of_state, const Floats& scale) {
    sum = add_product(sum, floats(integers) * scale_of_state, scale);
}

INLINE void add_integers(Floats& sum, Integers high, Integers low, float scale_of_state, const Floats& scale) {
    add_bytes(sum, (high << 8) + low, scale_of_state, scale);
}

INLINE void add_large_integers(Floats& sum, Integers high, Integers low, float scale_of_state, const Floats& scale) {
    sum = add_product(sum, add_product(floats(low), floats(high), 256.0f - Floats{}) * scale_of_state, scale);
}

// ---- in registers ----

// LANES outputs of R states: sums so far, minima apart, and integers of groups that are summed together.
template <int R>
struct Sums {
    Floats sums[R] = {}, minima[R] = {};
    Integers high[R] = {}, low[R] = {};
};

// Add what a group makes of R states to sums; ask for weights that come later.
template <int BITS, bool TABLE, Groups HOW, int BYTES, int R>
INLINE void add_group(
    const Block& block, const Panel& states, int64_t group, const uint8_t* ahead, Reader& reader, Sums<R>& to) {
    const Kind kind = block.kind;
    const int last = together<HOW>(kind, states.shared) - 1;
    const Totals* totals = states.totals_of(group, 0);
    const int8_t* bytes = states.bytes_of(group, 0);
    reader.begin(group);
    const uint8_t* integers_of_group = reader.integers();
#pragma GCC unroll 8
    for (int line = 0; line <= 2 * BITS / PARTS; line++) __builtin_prefetch(ahead + line * LINE, 0, CACHE);
    Integers high[R] = {}, low[R] = {};
    const auto finish = [&](int half) {
        const int part = kind.halves ? half : 2;
        if constexpr (HOW == FACTORED) {
            const Integers factor = reader.factor(half);
#pragma GCC unroll 8
            for (int r = 0; r < R; r++) {
                if (kind.zero) high[r] -= kind.zero * totals[r].high[part];
                if (kind.zero && BYTES == 2) low[r] -= kind.zero * totals[r].low[part];
                to.high[r] += factor * high[r], to.low[r] += factor * low[r];
                high[r] = low[r] = Integers{};
            }
        }
        if (!kind.minimum) return;
        const Floats minimum = reader.minimum<HOW>(half);
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) add_minimum(to.minima[r], minimum, totals[r].scaled_sums[part]);
    };
#pragma GCC unroll 8
    for (int index = 0; index < 8; index++) {
        Words words = integers<BITS>(integers_of_group, index);
        if constexpr (TABLE) words = look_up(words, block.bytes);
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
            const int8_t* four = bytes + r * sizeof(Bytes) + 4 * index;
            high[r] = add_products<TABLE ? 8 : BITS>(high[r], words, load<uint32_t>(four));
            if (BYTES == 2) low[r] = add_products<TABLE ? 8 : BITS>(low[r], words, load<uint32_t>(four + PAIR));
        }
        if (HOW == FACTORED && index == 3 && kind.halves) finish(0);
    }
    finish(kind.halves);
    if constexpr (HOW != FACTORED) {
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
            const int32_t zeros = kind.zero ? kind.zero * totals[r].sum<BYTES>(2) : 0;
            to.high[r] += high[r], to.low[r] += low[r] - (BYTES == 2 ? zeros : 0);
            if (BYTES == 1) to.high[r] -= zeros;
        }
    }
    if (BYTES == 1 || (group & last) == last) {  // groups of states of a byte share no scale
        const Floats scale = reader.scale();
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
            if constexpr (BYTES == 1)
                add_bytes(to.sums[r], to.high[r], totals[r].scale, scale);
            else if constexpr (HOW == FACTORED)
                add_large_integers(to.sums[r], to.high[r], to.low[r], totals[r].scale, scale);
            else
                add_integers(to.sums[r], to.high[r], to.low[r], totals[r].scale, scale);
            to.high[r] = to.low[r] = Integers{};
        }
    }
    reader.next();
}

// Multiply R states with a block.  Sums of few states leave registers for all outputs; those of many take them by turns,
// for as many groups as may share a scale.
template <int BITS, bool TABLE, Groups HOW, int BYTES, int R>
void multiply_block(const Block& block, const Panel& states, float* results, int64_t width) {
    constexpr int U = LANES == 16 && R < 3 ? 2 : 1;
    Sums<R> all[PARTS];
    Reader readers[4] = {{block, 0}, {block, LANES % BLOCK}, {block, 2 * LANES % BLOCK}, {block, 3 * LANES % BLOCK}};
    const int size = readers[0].size / PARTS;
    for (int64_t first = 0; first < states.groups; first += MOST_TOGETHER) {
        const int64_t end = std::min(states.groups, first + MOST_TOGETHER);
        const uint8_t* ahead = readers[0].bytes + AHEAD;
        for (int part = 0; part < PARTS; part += U) {
            Sums<R> one = all[part], other = all[part + U - 1];
            for (int64_t group = first; group < end; group++) {
                add_group<BITS, TABLE, HOW, BYTES, R>(block, states, group, ahead, readers[part], one);
                ahead += size;
                if (U == 1) continue;
                asm volatile("" ::: "memory");  // states are read again, with the products, in place of being kept
                add_group<BITS, TABLE, HOW, BYTES, R>(block, states, group, ahead, readers[part + 1], other);
                ahead += size;
            }
            all[part + U - 1] = other, all[part] = one;
        }
    }
    for (int part = 0; part < PARTS; part++)
        for (int r = 0; r < R; r++) store(results + r * width + part * LANES, all[part].sums[r] + all[part].minima[r]);
}

using Multiply = void (*)(const Block&, const Panel&, float*, int64_t);

template <int BITS, bool TABLE, Groups HOW, int BYTES, int... R>
Multiply of_rows(int64_t rows, std::integer_sequence<int, R...>) {
    constexpr Multiply all[] = {multiply_block<BITS, TABLE, HOW, BYTES, R + 1>...};
    return all[rows - 1];
}

// ---- in tiles ----
//
// The rows of a tile are the high and the low bytes of its states by turns, so that a sum's two parts are neighbours.  States
// of one byte are multiplied as fast in registers: their groups have scales of their own, so each would be a step in tiles.
// Weights with factors are sums of two bytes, the high one times a power of two, and those of 16 outputs fill two tiles, low
// and high ones; others are bytes, and their two tiles hold those of 32 outputs.

constexpr int IN_TILE = 8;  // states of a tile, at most
constexpr int FEWEST = 5;   // states from which on tiles are used

#if defined(SPECINFER_TILES) && defined(__AMX_INT8__) && defined(__AVX512VNNI__)
enum Tile { SUMS, STATES = 4, WEIGHTS };  // four of sums, one of states, two of weights
constexpr bool HAS_TILES = true;
INLINE TileShapes shapes(int64_t states, bool pairs) {
    const auto rows = (uint8_t)(2 * states), in_step = (uint8_t)(pairs ? PAIR : GROUP), lines = (uint8_t)(in_step / 4);
    return {1, 0, {}, {64, 64, 64, 64, in_step, 64, 64}, {rows, rows, rows, rows, rows, lines, lines}};
}

typedef uint16_t Shorts __attribute__((vector_size(LINE)));

// Four integers of each word, times factors, as two bytes each.
struct Products {
    Words low, high;
};

// Products of integers less zero have 16 bits: the low and the high ones.
INLINE Products multiply_integers(Words words, int zero, Integers factor) {
    constexpr uint64_t EVEN = 0x5555555555555555;
    const __m512i up = _mm512_set4_epi32(0x0e800c80, 0x0a800880, 0x06800480, 0x02800080);  // bytes 2k to 2k + 1
    const __m512i down = _mm512_set4_epi32(0x800f800d, 0x800b8009, 0x80078005, 0x80038001);
    const auto by = (Shorts)((factor & 0xffff) * 0x10001);
    Shorts even = (Shorts)_mm512_maskz_mov_epi8(EVEN, (__m512i)words);
    Shorts odd = (Shorts)_mm512_shuffle_epi8((__m512i)words, down);
    if (zero) even -= (uint16_t)zero, odd -= (uint16_t)zero;
    even *= by, odd *= by;
    return {(Words)_mm512_mask_shuffle_epi8((__m512i)even, ~EVEN, (__m512i)odd, up),
            (Words)_mm512_mask_shuffle_epi8((__m512i)odd, EVEN, (__m512i)even, down)};
}

// Products with the lowest 3 bits of factors of 6 bits, and with the 3 others: those of integers of 5 bits are bytes, so two of
// them are multiplied as one number of 16 bits, which takes half as many instructions.
INLINE Products multiply_by_parts(Words words, Integers factor) {
    const auto low = (Shorts)((factor & 7) * 0x10001), high = (Shorts)((factor >> 3) * 0x10001);
    return {(Words)((Shorts)words * low), (Words)((Shorts)words * high)};
}

// Multiply all states of a panel with the outputs of a block, tile by tile.  Outputs 0-15 and 16-31 have sums of their own, by
// turns: while products of one half go on, the sums of the other are stored and added up, and weights of the next groups made.
template <int BITS, bool TABLE, Groups HOW, bool IN_PARTS>
void multiply_in_tiles(const Block& block, const Panel& states, int64_t rows, float* results, int64_t width) {
    constexpr int BYTES = HOW == FACTORED ? 2 : 1;  // of a weight, each in a tile
    constexpr int SHIFT = IN_PARTS ? 3 : 8;         // of the high one
    const Kind kind = block.kind;
    const int groups = HOW == FACTORED ? MOST_TOGETHER : together<HOW>(kind, states.shared), in_step = HOW == ALONE ? 1 : 2;
    const int steps = groups / in_step;
    const int64_t units = states.groups / groups, each = states.in_tile;
    Reader readers[2] = {{block, 0}, {block, LANES}};
    alignas(64) Words weights[MOST_TOGETHER / 2][2][BYTES][PAIR / 4];  // steps; halves of the outputs
    alignas(64) Integers found[2][BYTES][2 * IN_TILE];
    Floats scales[4][2], minima[4][2][2 * MOST_TOGETHER], sums[2][PANEL], of_minima[2][PANEL];
    for (auto* all : {&sums, &of_minima})
        for (auto& of_outputs : *all) std::fill_n(of_outputs, rows, Floats{});

    const auto make = [&](int64_t unit, int step, int u) {
        Reader& reader = readers[u];
        Words(*to)[PAIR / 4] = weights[step][u];
        if (step == 0) reader.begin(unit * groups), scales[unit % 4][u] = reader.scale();  // which all of its groups share
        for (int in = 0; in < in_step; in++) {
            const uint8_t* bytes = reader.integers();
#pragma GCC unroll 8
            for (int line = 0; line < BITS; line++) __builtin_prefetch(bytes + AHEAD + line * LINE, 0, CACHE);
            Integers factor{};
            if constexpr (HOW == FACTORED) factor = reader.factor(0);
#pragma GCC unroll 8
            for (int index = 0; index < 8; index++) {
                Words words = integers<BITS>(bytes, index);
                if constexpr (TABLE) words = look_up(words, block.bytes);
                if constexpr (HOW == FACTORED) {
                    if (index == 4 && kind.halves) factor = reader.factor(1);
                    const Products products =
                        IN_PARTS ? multiply_by_parts(words, factor) : multiply_integers(words, kind.zero, factor);
                    to[0][8 * in + index] = products.low, to[1][8 * in + index] = products.high;
                } else {
                    to[0][8 * in + index] = words;
                }
            }
            if (kind.minimum)
                for (int half = 0; half <= kind.halves; half++)
                    minima[unit % 4][u][2 * (step * in_step + in) + half] = reader.minimum<HOW>(half);
            reader.next();
        }
    };
    const auto add_minima = [&](int64_t unit, int u, int64_t row, auto halves) {
        const Totals* totals = states.totals_of(unit * groups, row);
        const Floats* minimum = minima[unit % 4][u];
        for (Floats* sum = of_minima[u] + row; sum < of_minima[u] + row + each; sum++, totals++) {
            Floats found = *sum;
#pragma GCC unroll 8
            for (int group = 0; group < groups; group++) {
                const float* of_states = totals[group * states.rows].scaled_sums;
                add_minimum(found, minimum[2 * group], of_states[halves ? 0 : 2]);
                if (halves) add_minimum(found, minimum[2 * group + 1], of_states[1]);
            }
            *sum = found;
        }
    };
    const auto finish = [&](int64_t unit, int u, int64_t row) {
        const Floats scale = scales[unit % 4][u];
        const Totals* totals = states.totals_of(unit * groups, row);
        if (kind.minimum && kind.halves) add_minima(unit, u, row, std::true_type());
        if (kind.minimum && !kind.halves) add_minima(unit, u, row, std::false_type());
        const Integers *low = found[u][0], *high = found[u][BYTES - 1];
        Floats* sum = sums[u] + row;
        for (int64_t r = 0; r < each; r++, totals++, low += 2, high += 2, sum++) {
            if constexpr (HOW == FACTORED) {
                const Integers high_bytes = (high[0] << SHIFT) + low[0], low_bytes = (high[1] << SHIFT) + low[1];
                add_large_integers(*sum, high_bytes, low_bytes, totals->scale, scale);
            } else {
                int32_t zeros = 0;
                if (kind.zero)
                    for (int group = 0; group < groups; group++)
                        zeros += kind.zero * totals[group * states.rows].sum<2>(2);
                add_integers(*sum, low[0], low[1] - zeros, totals->scale, scale);
            }
        }
    };
    for (int step = 0; step < steps; step++) make(0, step, 0), make(0, step, 1);
    int64_t last_unit = -1, last_row = 0;
    for (int64_t unit = 0; unit < units; unit++) {
        for (int64_t row = 0; row < rows; row += each) {
            const bool last = row + each >= rows && unit + 1 < units;
#pragma GCC unroll 2
            for (int u = 0; u < 2; u++) {
                const int to = SUMS + 2 * u, before = SUMS + 2 * (1 - u);
                SPECINFER_ZERO_TILE(to);
                if constexpr (HOW == FACTORED) SPECINFER_ZERO_TILE(to + 1);
                for (int step = 0; step < steps; step++) {
                    SPECINFER_LOAD_TILE(STATES, states.bytes_of(unit * groups + step * in_step, row), PAIR);
                    SPECINFER_LOAD_TILE(WEIGHTS, weights[step][u][0], LINE);
                    SPECINFER_ADD_PRODUCTS("tdpbsud", WEIGHTS, STATES, to);
                    if constexpr (HOW == FACTORED) {
                        SPECINFER_LOAD_TILE(WEIGHTS + 1, weights[step][u][1], LINE);
                        if constexpr (IN_PARTS) SPECINFER_ADD_PRODUCTS("tdpbsud", WEIGHTS + 1, STATES, to + 1);
                        else SPECINFER_ADD_PRODUCTS("tdpbssd", WEIGHTS + 1, STATES, to + 1);
                    }
                    if (step == 0 && last_unit >= 0) {
                        SPECINFER_STORE_TILE(before, found[1 - u][0], LINE);
                        if constexpr (HOW == FACTORED) SPECINFER_STORE_TILE(before + 1, found[1 - u][1], LINE);
                    }
                    if (last) make(unit + 1, step, u);
                }
                if (last_unit >= 0) finish(last_unit, 1 - u, last_row);
                last_unit = unit, last_row = row;
            }
        }
    }
    SPECINFER_STORE_TILE(SUMS + 2, found[1][0], LINE);
    if constexpr (HOW == FACTORED) SPECINFER_STORE_TILE(SUMS + 3, found[1][1], LINE);
    finish(last_unit, 1, last_row);
    for (int u = 0; u < 2; u++) {
        for (int64_t row = 0; row < rows; row++) store(results + row * width + u * LANES, sums[u][row] + of_minima[u][row]);
    }
}
#else
constexpr bool HAS_TILES = false;

TileShapes shapes(int64_t, bool) { return {}; }
template <int BITS, bool TABLE, Groups HOW, bool IN_PARTS>
void multiply_in_tiles(const Block&, const Panel&, int64_t, float*, int64_t) {}
#endif

// How many states a tile has: at least FEWEST, if there are so many, and as few as the fewest tiles need.
int64_t states_of_tile(int64_t rows) {
    const int64_t some = std::min(rows, PANEL), tiles = (some + IN_TILE - 1) / IN_TILE;
    return (some + tiles - 1) / tiles;
}

// ---- a block and some states ----

thread_local bool is_wide = false;  // whether states of a byte have two, in products of this thread

template <int BITS, bool TABLE, Groups HOW, int BYTES>
void multiply_rows(const Block& block, const Panel& states, int64_t rows, float* to, int64_t width) {
    if constexpr (BYTES == 2) {
        constexpr bool MAY_HAVE_PARTS = HOW == FACTORED && BITS <= 5 && !TABLE;
        if (MAY_HAVE_PARTS && states.in_tile && block.kind.minimum)  // then factors have 6 bits without a sign, and zero is 0
            return multiply_in_tiles<BITS, TABLE, HOW, MAY_HAVE_PARTS>(block, states, rows, to, width);
        if (states.in_tile) return multiply_in_tiles<BITS, TABLE, HOW, false>(block, states, rows, to, width);
    }
    constexpr int MOST = MOST_ROWS[BYTES];
    constexpr auto R = std::make_integer_sequence<int, MOST>();
    const int64_t parts = rows <= MOST ? 1 : (rows + OF_MANY[BYTES] - 1) / OF_MANY[BYTES];
    for (int64_t part = 0; part < parts; part++) {
        const int64_t from = rows * part / parts, end = rows * (part + 1) / parts;
        of_rows<BITS, TABLE, HOW, BYTES>(end - from, R)(block, states.from(from), to + from * width, width);
    }
}

using MultiplyRows = void (*)(const Block&, const Panel&, int64_t, float*, int64_t);

template <int BITS, bool TABLE = false>
MultiplyRows multiplication(Groups how, bool narrow) {
    constexpr MultiplyRows wide[] = {
        multiply_rows<BITS, TABLE, ALONE, 2>, multiply_rows<BITS, TABLE, SUMMED, 2>, multiply_rows<BITS, TABLE, FACTORED, 2>};
    if (narrow) return how == FACTORED ? multiply_rows<BITS, TABLE, FACTORED, 1> : multiply_rows<BITS, TABLE, ALONE, 1>;
    return wide[how];
}

// Outputs of a block for some states, of which so many groups share a scale.
MultiplyRows multiplication(const Kind& kind, int shared) {
    const Groups how = kind.scales == FACTORS ? FACTORED : together(kind, shared) > 1 ? SUMMED : ALONE;
    switch (kind.bits) {
        case 2: return multiplication<2>(how, kind.narrow);
        case 3: return multiplication<3>(how, kind.narrow);
        case 5: return multiplication<5>(how, kind.narrow);
        case 6: return multiplication<6>(how, kind.narrow);
        case 8: return multiplication<8>(how, kind.narrow);
    }
    return kind.table ? multiplication<4, true>(how, kind.narrow) : multiplication<4>(how, kind.narrow);
}

// One row of a block, as numbers.
template <int BITS>
void read_row(const Block& block, int row, int64_t groups, float* to) {
    const Kind kind = block.kind;
    const int first = row / LANES * LANES, lane = row % LANES;
    Reader reader(block, first);
    for (int64_t group = 0; group < groups; group++, reader.next()) {
        reader.begin(group);
        for (int index = 0; index < 8; index++) {
            const int half = kind.halves ? index / 4 : 0;
            const float scale = reader.scale()[lane] * (kind.scales == FACTORS ? (float)reader.factor(half)[lane] : 1);
            const uint32_t four = integers<BITS>(reader.integers(), index)[lane];
            for (int k = 0; k < 4; k++) {
                const uint8_t integer = four >> 8 * k & 255;
                const float number = (float)((kind.table ? block.bytes[integer] : integer) - kind.zero);
                const float product = scale * number;
                *to++ = kind.minimum ? product + (kind.scales == FACTORS ? reader.minimum<FACTORED>(half) : reader.minimum<ALONE>(half))[lane] : product;
            }
        }
    }
}

void read_any_row(const Block& block, int row, int64_t groups, float* to) {
    switch (block.kind.bits) {
        case 2: return read_row<2>(block, row, groups, to);
        case 3: return read_row<3>(block, row, groups, to);
        case 4: return read_row<4>(block, row, groups, to);
        case 5: return read_row<5>(block, row, groups, to);
        case 6: return read_row<6>(block, row, groups, to);
    }
    read_row<8>(block, row, groups, to);
}

}  // namespace

extern "C" {

// Whether states have two bytes in this thread's products, also where a matrix asks for one; as it was before.
bool specinfer_wide_states(bool wide) { return std::exchange(is_wide, wide); }

// results (rows, outputs) = states (rows, K) times the transposes of packed matrices, side by side.
void specinfer_packed_linear(
    const float* states, const uint8_t* const* matrices, int64_t count, float* results, int64_t rows, int64_t size,
    int64_t outputs) {
    const int64_t groups = size / GROUP;
    const int threads = rows * size * outputs < SMALL ? 1 : omp_get_max_threads();
    const int64_t pairs = (groups + 1) / 2;
    const bool wide = is_wide;
    bool is_used[FORMS] = {};
    for (int64_t matrix = 0; matrix < count; matrix++) is_used[form_of(Block(matrices[matrix], 0, wide).kind)] = true;
    const bool tiled = HAS_TILES && (is_used[FOR_32] || is_used[FOR_256]) && rows >= FEWEST && tiles_are_allowed();
    const int64_t in_tile = tiled ? states_of_tile(rows) : 0;
    const int64_t all = tiled ? (rows + in_tile - 1) / in_tile * in_tile : rows;  // the last one again
    std::unique_ptr<Totals[]> totals[FORMS];
    std::unique_ptr<Bytes[]> bytes[FORMS];
    for (const Form form : {FOR_32, FOR_256, BYTE}) {
        if (!is_used[form]) continue;
        totals[form].reset(new Totals[all * groups]), bytes[form].reset(new Bytes[all * pairs]);
    }
    const auto panel = [&](int64_t top, Form form) {
        return Panel{
            totals[form].get() + top * groups, bytes[form].get() + top * pairs, groups, std::min(PANEL, all - top),
            sharing(form, groups), form == BYTE ? 0 : in_tile};
    };
    std::vector<Place> places;
    for (int64_t matrix = 0, first = 0; matrix < count; matrix++) {
        const int64_t own = std::min<int64_t>(load<uint64_t>(matrices[matrix]), outputs - first);  // of the last maybe fewer
        for (int64_t number = 0; number * BLOCK < own; number++)
            places.push_back({matrices[matrix], number, first + number * BLOCK, std::min<int64_t>(BLOCK, own - number * BLOCK)});
        first += own;
    }
#pragma omp parallel num_threads(threads)
    {
        for (const Form form : {FOR_32, FOR_256, BYTE}) {
            if (!is_used[form]) continue;
            const auto round = form == BYTE ? round_states<1> : round_states<2>;
            const int64_t shared = sharing(form, groups), spans = groups / shared;
#pragma omp for schedule(static) nowait
            for (int64_t index = 0; index < all * spans; index++) {
                const int64_t row = index / spans, top = row / PANEL * PANEL, span = index % spans;
                const float* from = states + std::min(row, rows - 1) * size + span * shared * GROUP;
                round(from, panel(top, form), span * shared, row - top);
            }
        }
#pragma omp barrier
        const int64_t part = omp_get_thread_num(), parts = omp_get_num_threads(), blocks = places.size();
        const int64_t from = blocks * part / parts, to = blocks * (part + 1) / parts;
        bool in_pairs = true;
        InTiles in_tiles(in_tile, shapes(in_tile, in_pairs));
        for (int64_t top = 0; top < rows; top += PANEL) {
            const int64_t some = std::min(PANEL, rows - top);
            for (int64_t index = from; index < to; index++) {
                const Place& place = places[index];
                const Block block(place.matrix, place.number, wide);
                const Form form = form_of(block.kind);
                const int shared = sharing(form, groups);
                const bool pairs = together(block.kind, shared) > 1;
                if (tiled && in_pairs != pairs) in_tiles.reshape(shapes(in_tile, in_pairs = pairs));
                const MultiplyRows multiply = multiplication(block.kind, shared);
                float* found = results + top * outputs + place.first;
                if (place.outputs < BLOCK) {
                    float sums[PANEL * BLOCK];
                    multiply(block, panel(top, form), some, sums, BLOCK);
                    for (int64_t row = 0; row < some; row++)
                        std::copy_n(sums + row * BLOCK, place.outputs, found + row * outputs);
                } else {
                    multiply(block, panel(top, form), some, found, outputs);
                }
            }
        }
    }
}

// results (count, K) = rows of a packed matrix (outputs, K), float32; no numbers for rows that it lacks.
void specinfer_packed_rows(const int64_t* rows, const uint8_t* matrix, float* results, int64_t count, int64_t size) {
    const auto outputs = (int64_t)load<uint64_t>(matrix);
#pragma omp parallel for num_threads(count * size < SMALL ? 1 : omp_get_max_threads())
    for (int64_t index = 0; index < count; index++) {
        const int64_t row = rows[index];
        float* found = results + index * size;
        if (row < 0 || row >= outputs)
            std::fill_n(found, size, NAN);
        else
            read_any_row(Block(matrix, row / BLOCK), row % BLOCK, size / GROUP, found);
    }
}

}
