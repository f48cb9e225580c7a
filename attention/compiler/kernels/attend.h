// Attention of a few queries over a cache, under masks of any topology, for compiled passes on a CPU.
//
// Knows: queries, keys, values, a mask that is added to the scores.  Does not know: trees, models, graphs.
//
// A query's result has the same bits whatever else a pass holds.  A score is a sum over the dimensions, in their order;
// a result is a sum over the slots, in theirs; a slot that a query does not see adds zero.  So a node of a tree gets
// what its token gets when the path to it was decoded alone, into slots without gaps.
//
// Scores are made for LANES slots at a time, whose keys are transposed once for all queries of a task.  Slots that no
// query of a task sees are skipped.  Memory is asked for in advance, in the order in which it is read: keys, values, the
// next task's keys; but no slots behind the last one that is seen, of which caches have many.
//
// In a packed pass the nodes of all rows are one row, and each has the number of its row of keys and values.

#pragma once

#include <omp.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <utility>
#include <vector>

#include "vectors.h"

#pragma GCC push_options
#pragma GCC optimize("O3", "fp-contract=fast")

namespace specinfer {

constexpr int QUERIES = LANES * 3 / 4;  // of a task at most: registers hold the sums of so many
constexpr int64_t AHEAD = 64;           // slots whose values are asked for in advance, at most, and ...
constexpr int64_t KEYS_AHEAD = 32;      // ... those whose keys are
constexpr float HIDDEN = -1e37f;        // a mask's entries below this hide a slot
constexpr float NOTHING = -INFINITY;    // the score of what is no slot

// A tensor of four dimensions, the last one contiguous.
struct Tensor4 {
    float* data;
    const int64_t *sizes, *strides;

    float* at(int64_t a, int64_t b, int64_t c = 0) const {
        return data + (sizes[0] > 1 ? a * strides[0] : 0) + b * strides[1] + c * strides[2];
    }
};

// e to the power of numbers that are not positive; 0 below e^-87.
SPECINFER_INLINE Floats exponential(Floats x) {
    constexpr float MAGIC = 12582912, LOG2E = 1.44269504f, HIGH = 0.693359375f, LOW = -2.12194440e-4f;  // of ln 2
    const Floats shifted = x * LOG2E + MAGIC, whole = shifted - MAGIC;
    const Floats rest = (x - whole * HIGH) - whole * LOW;
    Floats sum = rest * (1 / 5040.f) + 1 / 720.f;
    sum = sum * rest + 1 / 120.f;
    sum = sum * rest + 1 / 24.f;
    sum = sum * rest + 1 / 6.f;
    sum = sum * rest + 0.5f;
    sum = sum * rest + 1;
    sum = sum * rest + 1;
    const Floats scaled = (Floats)((Words)sum + ((Words)shifted << 23));
    return x < -87.f ? Floats{} : scaled;  // what is not a number stays so
}

#ifndef __has_builtin
#define SPECINFER_OLD_COMPILER
#elif !__has_builtin(__builtin_shufflevector)
#define SPECINFER_OLD_COMPILER  // GCC before 12
#endif

#ifndef SPECINFER_OLD_COMPILER
// Numbers of the lower, or upper, halves of two registers by turns.
template <int FIRST, int... I>
SPECINFER_INLINE Floats alternate(Floats a, Floats b, std::integer_sequence<int, I...>) {
    return __builtin_shufflevector(a, b, (FIRST + I / 2 + I % 2 * LANES)...);
}

SPECINFER_INLINE void transpose(Floats* rows) {
    constexpr auto ALL = std::make_integer_sequence<int, LANES>();
    for (int width = 1; width < LANES; width *= 2) {
        Floats turned[LANES];
#pragma GCC unroll 8
        for (int i = 0; i < LANES / 2; i++) {
            turned[2 * i] = alternate<0>(rows[i], rows[i + LANES / 2], ALL);
            turned[2 * i + 1] = alternate<LANES / 2>(rows[i], rows[i + LANES / 2], ALL);
        }
        memcpy(rows, turned, sizeof turned);
    }
}
#else
inline void transpose(Floats* rows) {
    for (int i = 0; i < LANES; i++)
        for (int j = 0; j < i; j++) {
            const float held = rows[i][j];
            rows[i][j] = rows[j][i];
            rows[j][i] = held;
        }
}
#endif

// Turn keys of `count` slots, LANES at most, into (size, LANES); the last slot stands for those that are missing.
SPECINFER_INLINE void turn(const float* keys, int64_t stride, int64_t count, int64_t size, float* turned) {
    for (int64_t from = 0; from < size; from += LANES) {
        Floats rows[LANES] = {};
        if (const int64_t width = size - from; count < LANES || width < LANES) {
            for (int lane = 0; lane < LANES; lane++)
                memcpy(&rows[lane], keys + std::min<int64_t>(lane, count - 1) * stride + from,
                       4 * std::min<int64_t>(LANES, width));
        } else {
#pragma GCC unroll 16
            for (int lane = 0; lane < LANES; lane++) rows[lane] = load(keys + lane * stride + from);
        }
        transpose(rows);
        memcpy(turned + from * LANES, rows, 4 * LANES * std::min<int64_t>(LANES, size - from));
    }
}

// What a task works in.
struct Buffers {
    int64_t slots, padded;  // slots, and the next multiple of LANES
    float *queries, *keys, *weights, *values;  // (R, size), (size, LANES), (R, padded), (padded, 2 LANES)
    bool* seen;             // of LANES slots each, whether a query sees one
};

// What is read when some slots have been.
struct Next {
    const float* data;
    int64_t stride;

    // What is read `ahead` slots after one, which `left` slots end with.
    const float* after(const float* slot, int64_t slot_stride, int64_t left, int64_t ahead) const {
        return ahead < left ? slot + ahead * slot_stride : data + (ahead - left) * stride;
    }
};

// Whether one of R queries sees one of `count` slots, LANES at most.
template <int R>
SPECINFER_INLINE bool sees(const float* const* masks, int64_t first, int64_t count) {
    if (count < LANES) {
        for (int r = 0; r < R; r++)
            if (std::any_of(masks[r] + first, masks[r] + first + count, [](float entry) { return entry > HIDDEN; }))
                return true;
        return false;
    }
    Floats largest = load(masks[0] + first);
    for (int r = 1; r < R; r++) {
        const Floats next = load(masks[r] + first);
        largest = next > largest ? next : largest;
    }
    bool seen = false;
    for (int lane = 0; lane < LANES; lane++) seen |= largest[lane] > HIDDEN;
    return seen;
}

// Scores of R queries over LANES slots, with the keys of those; the masks are in their place.  Other keys are asked
// for meanwhile.
template <int R>
SPECINFER_INLINE void score(const Buffers& own, int64_t first, int64_t size, float scale, const float* next) {
    Floats sums[R] = {};
    for (int64_t d = 0; d < size; d++) {
        __builtin_prefetch(next + d * LINE, 0, 2);
        const Floats key = load(own.keys + d * LANES);
#pragma GCC unroll 16
        for (int r = 0; r < R; r++) sums[r] += key * own.queries[r * size + d];
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) {
        float* scores = own.weights + r * own.padded + first;
        store(scores, sums[r] * scale + load(scores));
    }
}

// Turn scores into weights that are not divided by their sum yet.
SPECINFER_INLINE void weigh(float* scores, int64_t end) {
    Floats largest = load(scores);
    for (int64_t s = LANES; s < end; s += LANES) {
        const Floats next = load(scores + s);
        largest = next > largest ? next : largest;
    }
    float most = largest[0];
    for (int lane = 1; lane < LANES; lane++) most = std::max(most, (float)largest[lane]);
    for (int64_t s = 0; s < end; s += LANES) store(scores + s, exponential(load(scores + s) - most));
}

// Sums of 2 LANES dimensions of the values, (R, 2 LANES).
template <int R>
SPECINFER_INLINE void mix(const Buffers& own, const float* values, int64_t stride, int64_t slots, const Next& next,
                          float* sums) {
    const int64_t ahead = std::min(AHEAD, slots);
    Floats low[R] = {}, high[R] = {};
    for (int64_t from = 0; from < slots; from += LANES) {
        if (!own.seen[from / LANES]) continue;
        const int64_t to = std::min(from + LANES, slots);
        for (int64_t s = from; s < to; s++) {
            const float* later = next.after(values + s * stride, stride, slots - s, ahead);
            __builtin_prefetch(later, 0, 2);
            __builtin_prefetch(later + LINE, 0, 2);
            const Floats first = load(values + s * stride), second = load(values + s * stride + LANES);
#pragma GCC unroll 16
            for (int r = 0; r < R; r++) {
                const float weight = own.weights[r * own.padded + s];
                low[r] += weight * first;
                high[r] += weight * second;
            }
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) {
        store(sums + 2 * r * LANES, low[r]);
        store(sums + (2 * r + 1) * LANES, high[r]);
    }
}

// Sums of the weights of R queries.
template <int R>
SPECINFER_INLINE void add_up(const Buffers& own, int64_t slots, float* totals) {
    float sums[R] = {};
    for (int64_t s = 0; s < slots; s++)
#pragma GCC unroll 16
        for (int r = 0; r < R; r++) sums[r] += own.weights[r * own.padded + s];
    memcpy(totals, sums, sizeof sums);
}

// Nodes of one row that lie together.
struct Run {
    int64_t batch, from, count;  // of queries
    int64_t row;                 // of keys and values
};

// Queries first .. first + R - 1 of a run's that read the keys of one head; they are ordered by head, then by node.
template <int R>
void attend(const Buffers& own, const Tensor4& results, const Tensor4& queries, const Tensor4& keys,
            const Tensor4& values, const Tensor4& mask, const Run& run, int64_t head, int64_t first, float scale,
            const float* next) {
    const int64_t size = queries.sizes[3], width = values.sizes[3], row = run.row, stride = keys.strides[2];
    const int64_t group = queries.sizes[1] / keys.sizes[1];
    const float* masks[R];
    for (int r = 0; r < R; r++) {
        const int64_t node = run.from + (first + r) % run.count, of = head * group + (first + r) / run.count;
        std::copy_n(queries.at(run.batch, of, node), size, own.queries + r * size);
        masks[r] = mask.at(run.batch, 0, node);
    }
    int64_t end = 0;  // of the last LANES slots that are seen
    for (int64_t s = 0; s < own.slots; s += LANES)
        if ((own.seen[s / LANES] = sees<R>(masks, s, std::min<int64_t>(LANES, own.slots - s)))) end = s + LANES;
    if (!end) own.seen[0] = true, end = LANES;  // what a query that sees nothing gets is not read, but is a number
    const int64_t slots = std::min(end, own.slots);
    for (int r = 0; r < R; r++)
        std::fill_n(std::copy_n(masks[r], slots, own.weights + r * own.padded), end - slots, NOTHING);
    const Next first_values{values.at(row, head), values.strides[2]};
    for (int64_t s = 0; s < end; s += LANES)
        if (own.seen[s / LANES]) {
            const float* block = keys.at(row, head, s);
            turn(block, stride, std::min<int64_t>(LANES, own.slots - s), size, own.keys);
            score<R>(own, s, size, scale, first_values.after(block, stride, end - s, std::min(KEYS_AHEAD, end)));
        }
    for (int r = 0; r < R; r++) weigh(own.weights + r * own.padded, end);
    float totals[R], sums[R * 2 * LANES];
    add_up<R>(own, slots, totals);
    for (int64_t from = 0; from < width; from += 2 * LANES) {
        const int64_t count = std::min<int64_t>(2 * LANES, width - from);
        const float* part = values.at(row, head) + from;
        int64_t stride = values.strides[2];
        if (count < 2 * LANES) {  // the last dimensions do not fill two registers
            for (int64_t s = 0; s < slots; s++) std::copy_n(part + s * stride, count, own.values + s * 2 * LANES);
            part = own.values, stride = 2 * LANES;
        }
        const bool last = from + 2 * LANES >= width;
        mix<R>(own, part, stride, slots, last ? Next{next, 2 * LINE} : Next{part + 2 * LANES, stride}, sums);
        for (int r = 0; r < R; r++) {
            const int64_t node = run.from + (first + r) % run.count, of = head * group + (first + r) / run.count;
            float* result = results.at(run.batch, of, node) + from;
            for (int64_t d = 0; d < count; d++) result[d] = sums[r * 2 * LANES + d] / totals[r];
        }
    }
}

using Attend = void (*)(const Buffers&, const Tensor4&, const Tensor4&, const Tensor4&, const Tensor4&, const Tensor4&,
                        const Run&, int64_t, int64_t, float, const float*);

template <int... R>
Attend attention(int64_t queries, std::integer_sequence<int, R...>) {
    constexpr Attend all[] = {attend<R + 1>...};
    return all[queries - 1];
}

// The runs of (B, T) nodes; `rows` are those of the keys of B * T nodes, or nothing where they are those of the queries.
inline std::vector<Run> runs_of(int64_t batches, int64_t nodes, const int64_t* rows) {
    std::vector<Run> runs;
    for (int64_t batch = 0; batch < batches; batch++)
        for (int64_t node = 0; node < nodes; node++) {
            const int64_t row = rows ? rows[batch * nodes + node] : batch;
            if (!node || row != runs.back().row) runs.push_back({batch, node, 0, row});
            runs.back().count++;
        }
    return runs;
}

// Queries of one head's keys, for one thread.
struct Task {
    int64_t run, head, from, to;
};

inline std::vector<Task> tasks_of(const std::vector<Run>& runs, int64_t heads, int64_t group, int64_t threads) {
    std::vector<Task> tasks;
    const int64_t least = (threads + runs.size() * heads - 1) / (runs.size() * heads);  // parts, so that none is idle
    for (size_t run = 0; run < runs.size(); run++) {
        const int64_t each = group * runs[run].count;
        const int64_t parts = std::max((each + QUERIES - 1) / QUERIES, std::min(each, least));
        for (int64_t head = 0; head < heads; head++)
            for (int64_t part = 0; part < parts; part++)
                tasks.push_back({(int64_t)run, head, each * part / parts, each * (part + 1) / parts});
    }
    return tasks;
}

// results (B, H, T, V) = attention of queries (B, H, T, D) over keys (R, heads, L, D) and values (R, heads, L, V) of
// rows (B, T), with a mask (B or 1, 1, T, L).
inline void attend_all(const Tensor4& results, const Tensor4& queries, const Tensor4& keys, const Tensor4& values,
                       const Tensor4& mask, const int64_t* rows, float scale) {
    const int64_t heads = keys.sizes[1], slots = keys.sizes[2], size = queries.sizes[3];
    const int64_t padded = (slots + LANES - 1) / LANES * LANES, threads = omp_get_max_threads();
    const std::vector<Run> runs = runs_of(queries.sizes[0], queries.sizes[2], rows);
    const std::vector<Task> tasks = tasks_of(runs, heads, queries.sizes[1] / heads, threads);
#pragma omp parallel num_threads(threads)
    {
        const int64_t values_size = values.sizes[3] % (2 * LANES) ? padded * 2 * LANES : 0;
        std::unique_ptr<float[]> numbers(new float[QUERIES * (size + padded) + size * LANES + values_size]);
        std::unique_ptr<bool[]> seen(new bool[padded / LANES]);
        float *keys_at = numbers.get() + QUERIES * size, *weights_at = keys_at + size * LANES;
        const Buffers own{slots, padded, numbers.get(), keys_at, weights_at, weights_at + QUERIES * padded, seen.get()};
#pragma omp for
        for (size_t index = 0; index < tasks.size(); index++) {
            const Task &task = tasks[index], &next = tasks[std::min(index + 1, tasks.size() - 1)];
            const auto run = attention(task.to - task.from, std::make_integer_sequence<int, QUERIES>());
            run(own, results, queries, keys, values, mask, runs[task.run], task.head, task.from, scale,
                keys.at(runs[next.run].row, next.head));
        }
    }
}

inline Tensor4 tensor4(AtenTensorHandle handle) {
    void* data;
    int64_t *sizes, *strides;
    aoti_torch_get_data_ptr(handle, &data);
    aoti_torch_get_sizes(handle, &sizes);
    aoti_torch_get_strides(handle, &strides);
    return {(float*)data, sizes, strides};
}

}  // namespace specinfer

#pragma GCC pop_options

// Called by the code that Inductor writes; it returns 0.
inline AOTITorchError aoti_torch_specinfer_attend(AtenTensorHandle results, AtenTensorHandle queries,
                                                  AtenTensorHandle keys, AtenTensorHandle values,
                                                  AtenTensorHandle mask, double scale) {
    using specinfer::tensor4;
    specinfer::attend_all(
        tensor4(results), tensor4(queries), tensor4(keys), tensor4(values), tensor4(mask), nullptr, scale);
    return 0;
}

// The same of a packed pass: queries (1, H, T, D), and for each of the T nodes its row of keys and values, int64.
inline AOTITorchError aoti_torch_specinfer_attend_packed(AtenTensorHandle results, AtenTensorHandle queries,
                                                         AtenTensorHandle keys, AtenTensorHandle values,
                                                         AtenTensorHandle mask, AtenTensorHandle rows, double scale) {
    using specinfer::tensor4;
    void* data;
    aoti_torch_get_data_ptr(rows, &data);
    specinfer::attend_all(
        tensor4(results), tensor4(queries), tensor4(keys), tensor4(values), tensor4(mask), (const int64_t*)data, scale);
    return 0;
}
