// Products of a few states with a packed matrix, and its rows, on a CPU.
//
// Knows: the packed layout (layout.py), one matrix of states.  Does not know: models, files.
//
// Weights stay the integers that they are in their file.  States are rounded to integers of 16 bits, with a scale for 32
// inputs: two bytes, which the processor multiplies four inputs at a time.  Sums within a group of inputs are exact;
// sums of groups are made in one order, whatever else is multiplied, so they have the same bits in every product:
// that of five states or more in tiles (AMX), that of fewer in registers.
//
// A matrix is a row of blocks of 32 outputs.  Each has a kind of its own, found in the table that begins the matrix.

#include <omp.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "../compiler/kernels/tiles.h"

#define INLINE inline __attribute__((always_inline))

namespace {

using specinfer::InTiles, specinfer::TileShapes, specinfer::tiles_are_allowed;

#ifdef __AVX512F__
constexpr int LANES = 16, MOST_ROWS = 8;  // numbers of a register; states whose sums fit into all registers
#else
constexpr int LANES = 8, MOST_ROWS = 3;
#endif
constexpr int BLOCK = 32, GROUP = 32;              // outputs of a block; inputs of a group
constexpr int LINE = 64;                           // bytes of a word of 16 outputs
constexpr int AHEAD = 8192;                        // bytes of weights that are on their way meanwhile
constexpr int64_t PANEL = 96;                      // states that stay in the cache while weights pass by
constexpr int64_t SMALL = 1 << 15;                 // multiplications that are not worth a second thread

typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef uint32_t Words __attribute__((vector_size(4 * LANES)));
typedef int32_t Integers __attribute__((vector_size(4 * LANES)));

template <class Register>
INLINE Register load(const void* from) {
    Register loaded;
    memcpy(&loaded, from, sizeof loaded);
    return loaded;
}

// ---- kinds ----

enum Scales { HALF, FACTORS, SINGLE };  // float16; float16 for 256 inputs times an integer; float32 for a span

struct Kind {
    int bits, zero, span;  // of a span: groups that it has
    Scales scales;
    bool table, minimum, halves;  // integers look numbers up; numbers have a minimum; 16 inputs share a scale

    INLINE explicit Kind(uint32_t code)
        : bits(code & 15), zero(code >> 16 & 255), span(1 << (code >> 9 & 7)), scales(Scales(code >> 4 & 3)),
          table(code >> 6 & 1), minimum(code >> 7 & 1), halves(code >> 8 & 1) {}
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

    INLINE Block(const uint8_t* matrix, int64_t number)
        : bytes(matrix + load<uint64_t>(matrix + LINE + 16 * number)),
          kind(load<uint32_t>(matrix + LINE + 16 * number + 8)) {}
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
    for (int lane = 0; lane < LANES; lane++) found[lane] = (float)load<_Float16>(from + 2 * lane);
    return found;
#endif
}

INLINE Floats bytes_to_floats(const uint8_t* from) {
#if defined(__AVX512F__)
    return (Floats)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load<__m128i>(from)));
#else
    Floats found;
    for (int lane = 0; lane < LANES; lane++) found[lane] = (int8_t)from[lane];
    return found;
#endif
}

// Four bytes without a sign for each lane, times four with one, added up.
template <int BITS>
INLINE Integers add_products(Integers sum, Words numbers, uint32_t four) {
#if defined(__AVX512VNNI__)
    return (Integers)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)numbers, _mm512_set1_epi32(four));
#elif defined(__AVXVNNI__)
    return (Integers)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)numbers, _mm256_set1_epi32(four));
#elif defined(__AVX2__) && !defined(__AVX512F__)
    const __m256i weights = (__m256i)numbers, states = _mm256_set1_epi32(four);
    if constexpr (BITS < 8) {  // else sums of pairs need more than 16 bits
        const __m256i pairs = _mm256_maddubs_epi16(weights, states);
        return sum + (Integers)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
    }
    const __m256i even = _mm256_and_si256(weights, _mm256_set1_epi16(255)), odd = _mm256_srli_epi16(weights, 8);
    const __m256i first = _mm256_srai_epi16(_mm256_slli_epi16(states, 8), 8), second = _mm256_srai_epi16(states, 8);
    return sum + (Integers)_mm256_madd_epi16(even, first) + (Integers)_mm256_madd_epi16(odd, second);
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
    for (uint8_t& byte : found) byte = table[byte];
    return load<Words>(found);
#endif
}

// Integers of LANES outputs: word `index` of 8 holds those of four inputs, a byte each.
template <int BITS>
INLINE Words integers(const uint8_t* half, int index) {
    const auto plane = [&](const uint8_t* from, int bits) {  // of so many bits, whose words share lines
        const int shared = 8 / bits;
        const Words line = load<Words>(from + LINE * (index / shared));
        return line >> (bits * (index % shared)) & (0x01010101u * ((1u << bits) - 1));
    };
    if constexpr (BITS == 8) return load<Words>(half + LINE * index);
    if constexpr (BITS == 6) return plane(half, 4) | plane(half + 4 * LINE, 2) << 4;
    if constexpr (BITS == 5) return plane(half, 4) | plane(half + 4 * LINE, 1) << 4;
    if constexpr (BITS == 4) return plane(half, 4);
    if constexpr (BITS == 3) return plane(half, 2) | plane(half + 2 * LINE, 1) << 2;
    return plane(half, 2);
}

// ---- states ----

// A state's 32 inputs are integers times a scale.  Sums are those of the first and the last 16 integers, and of all.
struct Numbers {
    float scale, scaled_sums[3];
    int32_t sums[3], unused;
};
constexpr float LARGEST = 127 * 256, INFINITE = INFINITY;

// An integer is 256 times a byte plus another one: those of a state's 32 inputs stand one after the other.
struct Bytes {
    int8_t high[GROUP], low[GROUP];
};

// Some rows of states, group by group.
struct Panel {
    Numbers* numbers;  // (groups, rows)
    Bytes* bytes;
    int64_t groups, rows;
    int64_t in_tile;  // of the rows; 0: tiles are not used

    INLINE int64_t at(int64_t group, int64_t row) const { return group * rows + row; }
    INLINE Panel from(int64_t row) const { return {numbers + row, bytes + row, groups, rows, in_tile}; }
};

// Loops are such that compilers make them instructions for many numbers at once.
INLINE void round_state(const float* from, Numbers& to, Bytes& bytes) {
    int32_t largest = 0, integers[GROUP], sums[2] = {};  // numbers without their signs are ordered as their bits are
    for (int k = 0; k < GROUP; k++) largest = std::max(largest, load<int32_t>(from + k) & INT32_MAX);
    const bool finite = largest < load<int32_t>(&INFINITE);
    const float range = finite ? load<float>(&largest) : 0, steps = range > 0 ? LARGEST / range : 0;
    for (int k = 0; k < GROUP; k++) integers[k] = (int32_t)std::rint(finite ? from[k] * steps : 0);
    for (int k = 0; k < GROUP; k++) bytes.high[k] = (int8_t)((integers[k] + 128) >> 8);
    for (int k = 0; k < GROUP; k++) bytes.low[k] = (int8_t)integers[k];
    for (int k = 0; k < GROUP / 2; k++) sums[0] += integers[k], sums[1] += integers[k + GROUP / 2];
    to.scale = finite ? range / LARGEST : NAN;
    to.sums[0] = sums[0], to.sums[1] = sums[1], to.sums[2] = sums[0] + sums[1];
    for (int part = 0; part < 3; part++) to.scaled_sums[part] = to.scale * (float)to.sums[part];
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
    const int first;
    Floats super, super_minimum;

    INLINE Reader(const Kind& kind, const uint8_t* bytes, int first) : kind(kind), bytes(bytes), first(first) {}
    INLINE void begin_span() {
        const bool single = kind.scales == SINGLE;
        super = single ? load<Floats>(bytes + 4 * first) : halves_to_floats(bytes + 2 * first);
        if (kind.minimum) super_minimum = halves_to_floats(bytes + (single ? 2 : 1) * LINE + 2 * first);
        if (kind.minimum && single) super_minimum *= super;
        bytes += kind.of_span();
    }
    INLINE Scaled read(int half) const {
        const int width = kind.scales == HALF ? 2 : 1, step = BLOCK * width;
        const uint8_t* from = bytes + half * step + first * width;
        const uint8_t* least = from + step * (1 + kind.halves);
        Scaled found{};
        if (kind.scales == HALF) {
            found.scale = halves_to_floats(from);
            if (kind.minimum) found.minimum = halves_to_floats(least);
        } else if (kind.scales == SINGLE) {
            found.scale = super;
            if (kind.minimum) found.minimum = super_minimum;
        } else {
            found.scale = super * bytes_to_floats(from);
            if (kind.minimum) found.minimum = super_minimum * bytes_to_floats(least);
        }
        return found;
    }
    INLINE const uint8_t* integers() const {
        return bytes + kind.of_scales() + first / 16 * kind.of_half() + first % 16 * 4;
    }
    INLINE void next() { bytes += kind.of_scales() + 2 * kind.of_half(); }
};

// Add the products of 16 or 32 inputs.
INLINE void add_group(
    Floats& sum, Integers high, Integers low, const Numbers& state, const Scaled& scaled, const Kind& kind, int inputs) {
    Integers exact = (high << 8) + low;
    if (kind.zero) exact -= kind.zero * state.sums[inputs];
    sum += __builtin_convertvector(exact, Floats) * state.scale * scaled.scale;
    if (kind.minimum) sum += scaled.minimum * state.scaled_sums[inputs];
}

// Multiply R states with U times LANES outputs of a block.
template <int BITS, bool TABLE, int R, int U>
void multiply(const Block& block, int first, const Panel& states, float* results, int64_t width) {
    const Kind kind = block.kind;
    const uint8_t* table = block.bytes;
    Floats sums[U][R] = {};
    Reader readers[2] = {{kind, block.bytes + (TABLE ? LINE : 0), first},
                         {kind, block.bytes + (TABLE ? LINE : 0), first + (U > 1 ? LANES : 0)}};
    for (int64_t group = 0; group < states.groups; group++) {
        const Numbers* of_states = states.numbers + states.at(group, 0);
        const Bytes* bytes = states.bytes + states.at(group, 0);
#pragma GCC unroll 2
        for (int u = 0; u < U; u++) {
            Reader& reader = readers[u];
            if (kind.begins_span(group)) reader.begin_span();
            const uint8_t* numbers = reader.integers();
#pragma GCC unroll 4
            for (int line = 0; line < 4; line++) __builtin_prefetch(numbers + AHEAD + line * LINE, 0, 2);
            Integers high[R] = {}, low[R] = {};
            const auto finish = [&](int half) {
                const Scaled scaled = reader.read(kind.halves ? half : 0);
                const int inputs = kind.halves ? half : 2;
#pragma GCC unroll 8
                for (int r = 0; r < R; r++) {
                    add_group(sums[u][r], high[r], low[r], of_states[r], scaled, kind, inputs);
                    high[r] = low[r] = Integers{};
                }
            };
#pragma GCC unroll 8
            for (int index = 0; index < 8; index++) {
                Words words = integers<BITS>(numbers, index);
                if constexpr (TABLE) words = look_up(words, table);
#pragma GCC unroll 8
                for (int r = 0; r < R; r++) {
                    const uint32_t four = load<uint32_t>(bytes[r].high + 4 * index);
                    high[r] = add_products<TABLE ? 8 : BITS>(high[r], words, four);
                    low[r] = add_products<TABLE ? 8 : BITS>(low[r], words, load<uint32_t>(bytes[r].low + 4 * index));
                }
                if (index == 3 && kind.halves) finish(0);
            }
            finish(1);
            reader.next();
        }
    }
    for (int u = 0; u < U; u++)
        for (int r = 0; r < R; r++) memcpy(results + r * width + first + u * LANES, &sums[u][r], sizeof(Floats));
}

template <int BITS, bool TABLE, int R>
void multiply_block(const Block& block, const Panel& states, float* results, int64_t width) {
    constexpr int U = LANES == 16 && R <= 4 ? 2 : 1;
    for (int first = 0; first < BLOCK; first += U * LANES)
        multiply<BITS, TABLE, R, U>(block, first, states, results, width);
}

using Multiply = void (*)(const Block&, const Panel&, float*, int64_t);

template <int BITS, bool TABLE, int... R>
Multiply of_rows(int64_t rows, std::integer_sequence<int, R...>) {
    constexpr Multiply all[] = {multiply_block<BITS, TABLE, R + 1>...};
    return all[rows - 1];
}

Multiply multiplication(const Kind& kind, int64_t rows) {
    constexpr auto R = std::make_integer_sequence<int, MOST_ROWS>();
    switch (kind.bits) {
        case 2: return of_rows<2, false>(rows, R);
        case 3: return of_rows<3, false>(rows, R);
        case 5: return of_rows<5, false>(rows, R);
        case 6: return of_rows<6, false>(rows, R);
        case 8: return of_rows<8, false>(rows, R);
    }
    return kind.table ? of_rows<4, true>(rows, R) : of_rows<4, false>(rows, R);
}

// ---- tiles ----
//
// The rows of a tile are the high and the low bytes of its states by turns, so that a sum's two parts are neighbours.
// A product is that of one or two tiles of as many states.

constexpr int IN_TILE = 8, TILES = 2;  // states of a tile, and tiles of a product, at most
constexpr int FEWEST = 5;                        // from here on tiles are faster

#if defined(SPECINFER_TILES) && defined(__AMX_INT8__) && defined(__AVX512VNNI__)
enum Tile { SUMS_A, SUMS_B, STATES, HALF_STATES, WEIGHTS_A, WEIGHTS_B, HALF_WEIGHTS_A, HALF_WEIGHTS_B };
constexpr bool HAS_TILES = true;
INLINE TileShapes shapes(int64_t states) {
    const auto rows = (uint8_t)(2 * states);
    return {1, 0, {}, {64, 64, 32, 16, 64, 64, 64, 64}, {rows, rows, rows, rows, 8, 8, 4, 4}};
}

#define LOAD(tile, from, stride) SPECINFER_LOAD_TILE(tile, from, stride)
#define STORE(tile, to) SPECINFER_STORE_TILE(tile, to, LINE)
#define ADD_PRODUCTS(first, second, states)                                                     \
    asm volatile("tilezero %%tmm0; tdpbsud %%" first ", %%" states ", %%tmm0; "                 \
                 "tilezero %%tmm1; tdpbsud %%" second ", %%" states ", %%tmm1" ::: "memory")

// Multiply states, EACH in a tile, with the outputs of a block.  While tiles are busy with a group, the integers of the
// next one are made, and the sums of the last one are added up.
template <int BITS, bool TABLE, bool HALVES, int TILES_OF_STATES, int EACH>
void multiply_in_tiles(const Block& block, const Panel& states, int64_t rows, float* results, int64_t width) {
    const Kind kind = block.kind;
    const uint8_t* table = block.bytes;
    constexpr int PARTS = 1 + HALVES, R = TILES_OF_STATES * EACH;
    Floats sums[2][R] = {};
    Reader readers[2] = {{kind, block.bytes + (TABLE ? LINE : 0), 0}, {kind, block.bytes + (TABLE ? LINE : 0), LANES}};
    alignas(64) Words weights[2][2][8];  // of even and odd groups; outputs 0-15 and 16-31
    alignas(64) Integers found[2][2][PARTS][2 * R];
    Scaled scaled[4][2][PARTS];
    const auto read = [&](int64_t group) {
#pragma GCC unroll 2
        for (int u = 0; u < 2; u++) {
            if (kind.begins_span(group)) readers[u].begin_span();
            const uint8_t* numbers = readers[u].integers();
#pragma GCC unroll 8
            for (int line = 0; line < BITS; line++) __builtin_prefetch(numbers + AHEAD + line * LINE, 0, 2);
#pragma GCC unroll 8
            for (int index = 0; index < 8; index++) {
                const Words words = integers<BITS>(numbers, index);
                weights[group % 2][u][index] = TABLE ? look_up(words, table) : words;
            }
            for (int part = 0; part < PARTS; part++) scaled[group % 4][u][part] = readers[u].read(part);
            readers[u].next();
        }
    };
    const auto multiply = [&](int64_t group) {
        const int8_t* bytes = (const int8_t*)(states.bytes + states.at(group, 0));
        const auto& from = weights[group % 2];
        auto& to = found[group % 2];
#pragma GCC unroll 2
        for (int part = 0; part < PARTS; part++) {
            if constexpr (HALVES) {
                LOAD(HALF_WEIGHTS_A, from[0] + 4 * part, LINE);
                LOAD(HALF_WEIGHTS_B, from[1] + 4 * part, LINE);
            } else {
                LOAD(WEIGHTS_A, from[0], LINE);
                LOAD(WEIGHTS_B, from[1], LINE);
            }
#pragma GCC unroll 2
            for (int tile = 0; tile < TILES_OF_STATES; tile++) {
                const int8_t* tile_bytes = bytes + tile * EACH * sizeof(Bytes);
                if constexpr (HALVES) {
                    LOAD(HALF_STATES, tile_bytes + GROUP / 2 * part, GROUP);
                    ADD_PRODUCTS("tmm6", "tmm7", "tmm3");
                } else {
                    LOAD(STATES, tile_bytes, GROUP);
                    ADD_PRODUCTS("tmm4", "tmm5", "tmm2");
                }
                STORE(SUMS_A, to[0][part] + tile * 2 * EACH);
                STORE(SUMS_B, to[1][part] + tile * 2 * EACH);
            }
        }
    };
    const auto finish = [&](int64_t group) {
        const Numbers* of_states = states.numbers + states.at(group, 0);
        const auto& from = found[group % 2];
        const auto& by = scaled[group % 4];
#pragma GCC unroll 2
        for (int part = 0; part < PARTS; part++) {
            const Integers *first = from[0][part], *second = from[1][part];
            const Scaled low = by[0][part], high = by[1][part];
#pragma GCC unroll 4
            for (int r = 0; r < R; r++) {
                add_group(sums[0][r], first[2 * r], first[2 * r + 1], of_states[r], low, kind, HALVES ? part : 2);
                add_group(sums[1][r], second[2 * r], second[2 * r + 1], of_states[r], high, kind, HALVES ? part : 2);
            }
        }
    };
    read(0);
    for (int64_t group = 0; group < states.groups; group++) {
        if (group + 1 < states.groups) read(group + 1);
        multiply(group);
        if (group) finish(group - 1);
    }
    finish(states.groups - 1);
    for (int64_t r = 0; r < rows; r++) memcpy(results + r * width, sums[0] + r, sizeof(Floats));
    for (int64_t r = 0; r < rows; r++) memcpy(results + r * width + LANES, sums[1] + r, sizeof(Floats));
}

using MultiplyInTiles = void (*)(const Block&, const Panel&, int64_t, float*, int64_t);

template <int BITS, bool TABLE, bool HALVES, int... EACH>
MultiplyInTiles of_tiles(int64_t tiles, int64_t in_tile, std::integer_sequence<int, EACH...>) {
    constexpr MultiplyInTiles all[][TILES] = {
        {multiply_in_tiles<BITS, TABLE, HALVES, 1, FEWEST + EACH>, multiply_in_tiles<BITS, TABLE, HALVES, 2, FEWEST + EACH>}...};
    return all[in_tile - FEWEST][tiles - 1];
}

template <int BITS, bool TABLE = false>
MultiplyInTiles of_tiles(const Kind& kind, int64_t tiles, int64_t in_tile) {
    constexpr auto EACH = std::make_integer_sequence<int, IN_TILE - FEWEST + 1>();
    return kind.halves ? of_tiles<BITS, TABLE, true>(tiles, in_tile, EACH)
                       : of_tiles<BITS, TABLE, false>(tiles, in_tile, EACH);
}

MultiplyInTiles multiplication_in_tiles(const Kind& kind, int64_t tiles, int64_t in_tile) {
    switch (kind.bits) {
        case 2: return of_tiles<2>(kind, tiles, in_tile);
        case 3: return of_tiles<3>(kind, tiles, in_tile);
        case 5: return of_tiles<5>(kind, tiles, in_tile);
        case 6: return of_tiles<6>(kind, tiles, in_tile);
        case 8: return of_tiles<8>(kind, tiles, in_tile);
    }
    return kind.table ? of_tiles<4, true>(kind, tiles, in_tile) : of_tiles<4>(kind, tiles, in_tile);
}

void multiply_any_in_tiles(const Block& block, const Panel& states, int64_t rows, float* results, int64_t width) {
    const int64_t tiles = (rows + states.in_tile - 1) / states.in_tile;
    multiplication_in_tiles(block.kind, tiles, states.in_tile)(block, states, rows, results, width);
}
#else
constexpr bool HAS_TILES = false;

TileShapes shapes(int64_t) { return {}; }
void multiply_any_in_tiles(const Block&, const Panel&, int64_t, float*, int64_t) {}
#endif

// How many states a tile has: at least FEWEST, if there are so many, and as few as the fewest tiles need.
int64_t states_of_tile(int64_t rows) {
    const int64_t some = std::min(rows, PANEL), tiles = (some + IN_TILE - 1) / IN_TILE;
    return (some + tiles - 1) / tiles;
}

// Outputs of a block for some states.
void multiply_rows(const Block& block, const Panel& states, int64_t rows, float* to, int64_t width) {
    if (const int64_t step = TILES * states.in_tile) {
        for (int64_t from = 0; from < rows; from += step)
            multiply_any_in_tiles(block, states.from(from), std::min(step, rows - from), to + from * width, width);
        return;
    }
    const int64_t parts = (rows + MOST_ROWS - 1) / MOST_ROWS;
    for (int64_t part = 0; part < parts; part++) {
        const int64_t from = rows * part / parts, end = rows * (part + 1) / parts;
        multiplication(block.kind, end - from)(block, states.from(from), to + from * width, width);
    }
}

// One row of a block, as numbers.
template <int BITS>
void read_row(const Block& block, int row, int64_t groups, float* to) {
    const Kind kind = block.kind;
    const int first = row / LANES * LANES, lane = row % LANES;
    Reader reader(kind, block.bytes + (kind.table ? LINE : 0), first);
    for (int64_t group = 0; group < groups; group++, reader.next()) {
        if (kind.begins_span(group)) reader.begin_span();
        for (int index = 0; index < 8; index++) {
            const Scaled scaled = reader.read(kind.halves ? index / 4 : 0);
            const uint32_t four = integers<BITS>(reader.integers(), index)[lane];
            for (int k = 0; k < 4; k++) {
                const uint8_t integer = four >> 8 * k & 255;
                const float number = (float)((kind.table ? block.bytes[integer] : integer) - kind.zero);
                const float product = scaled.scale[lane] * number;
                *to++ = kind.minimum ? product + scaled.minimum[lane] : product;
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

// results (rows, outputs) = states (rows, K) times the transposes of packed matrices, side by side.
void specinfer_packed_linear(
    const float* states, const uint8_t* const* matrices, int64_t count, float* results, int64_t rows, int64_t size,
    int64_t outputs) {
    const int64_t groups = size / GROUP;
    const int threads = rows * size * outputs < SMALL ? 1 : omp_get_max_threads();
    const int64_t in_tile = HAS_TILES && rows >= FEWEST && tiles_are_allowed() ? states_of_tile(rows) : 0;
    const int64_t all = in_tile ? (rows + in_tile - 1) / in_tile * in_tile : rows;  // filled up with zeros
    std::vector<Numbers> numbers(all * groups);
    std::vector<Bytes> bytes(all * groups);
    const auto panel = [&](int64_t top) {
        return Panel{
            numbers.data() + top * groups, bytes.data() + top * groups, groups, std::min(PANEL, all - top), in_tile};
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
#pragma omp for schedule(static)
        for (int64_t index = 0; index < rows * groups; index++) {
            const int64_t row = index / groups, group = index % groups, top = row / PANEL * PANEL;
            const Panel to = panel(top);
            const int64_t place = to.at(group, row - top);
            round_state(states + index * GROUP, to.numbers[place], to.bytes[place]);
        }
        const int64_t part = omp_get_thread_num(), parts = omp_get_num_threads(), blocks = places.size();
        const int64_t from = blocks * part / parts, to = blocks * (part + 1) / parts;
        const InTiles in_tiles(in_tile, shapes(in_tile));
        for (int64_t top = 0; top < rows; top += PANEL) {
            const int64_t some = std::min(PANEL, rows - top);
            for (int64_t index = from; index < to; index++) {
                const Place& place = places[index];
                const Block block(place.matrix, place.number);
                float* found = results + top * outputs + place.first;
                if (place.outputs < BLOCK) {
                    float sums[PANEL * BLOCK];
                    multiply_rows(block, panel(top), some, sums, BLOCK);
                    for (int64_t row = 0; row < some; row++)
                        std::copy_n(sums + row * BLOCK, place.outputs, found + row * outputs);
                } else {
                    multiply_rows(block, panel(top), some, found, outputs);
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
