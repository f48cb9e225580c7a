// The largest of many scores, and the logarithm of the sum of all exponentials: in one call and two walks over them,
// where each of torch's operators costs more than the numbers do.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

namespace {

constexpr int64_t LANES = 16, GROUP = 64;  // sums side by side; scores of a group, whose maximum is looked at first
constexpr float LEAST = -87.0f;            // exponentials of less count as 0

// exp(x) for x <= 0, NaN for NaN: 2^n times a polynomial of what is left (Cephes, expf).
inline float exponential(float x) {
    float shifted = x * 1.44269504f + 12582912.0f, n = shifted - 12582912.0f;  // 1.5 * 2^23: rounds to a whole number
    float r = x - n * 0.693359375f + n * 2.12194440e-4f, p = 1.9875691500e-4f;
    for (float c : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f})
        p = p * r + c;
    int32_t bits = (static_cast<int32_t>(n) + 127) << 23;
    float power;
    std::memcpy(&power, &bits, sizeof power);
    return x < LEAST ? 0.0f : (p * r * r + r + 1.0f) * power;
}

float largest_of(const float* values, int64_t count) {
    float best[LANES];
    std::fill_n(best, LANES, -std::numeric_limits<float>::infinity());
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES)
        for (int64_t j = 0; j < LANES; ++j) best[j] = values[i + j] > best[j] ? values[i + j] : best[j];
    for (; i < count; ++i) best[0] = std::max(best[0], values[i]);
    return *std::max_element(best, best + LANES);
}

float sum_of_exponentials(const float* values, int64_t count, float most) {
    float sums[LANES] = {}, rest = 0;
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES)
        for (int64_t j = 0; j < LANES; ++j) sums[j] += exponential(values[i + j] - most);
    for (; i < count; ++i) rest += exponential(values[i] - most);
    for (float sum : sums) rest += sum;
    return rest;
}

void largest(const float* scores, int64_t size, int64_t k, float* values, int64_t* indices, float* total) {
    std::vector<float> maxima((size + GROUP - 1) / GROUP);
    for (int64_t g = 0; g < int64_t(maxima.size()); ++g)
        maxima[g] = largest_of(scores + g * GROUP, std::min(GROUP, size - g * GROUP));
    int64_t found = 0;
    for (int64_t g = 0; g < int64_t(maxima.size()); ++g) {
        if (found == k && !(maxima[g] > values[k - 1])) continue;
        for (int64_t i = g * GROUP, end = std::min(size, i + GROUP); i < end; ++i) {
            if (found == k && !(scores[i] > values[k - 1])) continue;
            int64_t place = found < k ? found++ : k - 1;
            for (; place && scores[i] > values[place - 1]; --place)
                values[place] = values[place - 1], indices[place] = indices[place - 1];
            values[place] = scores[i], indices[place] = i;
        }
    }
    *total = values[0] + std::log(sum_of_exponentials(scores, size, values[0]));
}

}  // namespace

// Of rows of scores, `stride` apart: the k largest, descending, equal ones in order, their indices, and the logarithm.
extern "C" void specinfer_largest(
    const float* scores, int64_t rows, int64_t size, int64_t stride, int64_t k, float* values, int64_t* indices, float* totals) {
#pragma omp parallel for if (rows * size > 1 << 15)
    for (int64_t row = 0; row < rows; ++row)
        largest(scores + row * stride, size, k, values + row * k, indices + row * k, totals + row);
}
