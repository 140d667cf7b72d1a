// Attention of each row to the positions of its slot up to its own.
//
// Keys lie in blocks of sixteen positions, [block, dimension, position]; values as [position, dimension]; both as halves.
// A score is summed over dimensions in order, a mean of values over positions in order: nothing depends on other rows.
#pragma once
#include <algorithm>
#include <limits>

#include "lanes.h"

namespace millstream {

constexpr int TOGETHER = 4;  // rows of a sequence that read its keys and values together

struct Heads {
    int64_t count, key_count, size;  // size: a multiple of 16
};

// e^(score − the largest), in place, then zeros up to `padded`; one over their sum.
inline float soften(float* scores, int64_t count, int64_t padded) {
    for (int64_t at = count; at < padded; at++) scores[at] = -std::numeric_limits<float>::infinity();
    Floats peak = all(-std::numeric_limits<float>::infinity());
    for (int64_t at = 0; at < count; at += 8) peak = _mm256_max_ps(peak, load(scores + at));
    const Floats top = all(largest(peak));
    for (int64_t at = 0; at < count; at += 8) store(scores + at, exponential(_mm256_sub_ps(load(scores + at), top)));
    for (int64_t at = count; at < padded; at++) scores[at] = 0;
    Floats total = _mm256_setzero_ps();
    for (int64_t at = 0; at < count; at += 8) total = _mm256_add_ps(total, load(scores + at));
    return 1.0f / sum(total);
}

// The queries of one key head, in rows that follow one another in one slot.
struct Attention {
    const uint16_t *keys, *values;
    Heads heads;
    int64_t end;             // positions of the last row
    const float** queries;   // scaled
    float** outs;
    float* scores;           // [queries, stride]
    int64_t stride;
    const int64_t* counts;   // positions of each query
    int64_t total;           // queries

    void run() const {
        const int64_t padded = (end + 15) / 16 * 16;
        for (int64_t block = 0; block < padded; block += 16)
            for (int64_t first = 0; first < total; first += TALLEST) by_height(height(first), Scores{*this, first, block});
        float shares[64];
        for (int64_t at = 0; at < total; at++) shares[at] = soften(scores + at * stride, counts[at], padded);
        for (int64_t first = 0; first < total; first += TALLEST)
            for (int64_t column = 0; column < heads.size; column += 16)
                by_height(height(first), Means{*this, first, column, shares});
    }
    int height(int64_t first) const { return (int)std::min<int64_t>(TALLEST, total - first); }

    struct Scores {
        const Attention& of;
        int64_t first, block;
        template <int R>
        __attribute__((noinline)) void run() const {
            Floats out[R][2];
            mix<Half, R>(of.keys + block * of.heads.size, 16, (int)of.heads.size, of.queries + first, out);
            EACH_ROW(r) {
                store(of.scores + (first + r) * of.stride + block, out[r][0]);
                store(of.scores + (first + r) * of.stride + block + 8, out[r][1]);
            }
        }
    };

    struct Means {
        const Attention& of;
        int64_t first, column;
        const float* shares;
        template <int R>
        __attribute__((noinline)) void run() const {
            const float* weights[R];
            Floats out[R][2];
            EACH_ROW(r) weights[r] = of.scores + (first + r) * of.stride;
            mix<Half, R>(of.values + column, of.heads.size, (int)of.end, weights, out);
            EACH_ROW(r) {
                const Floats share = all(shares[first + r]);
                store(of.outs[first + r] + column, _mm256_mul_ps(out[r][0], share));
                store(of.outs[first + r] + column + 8, _mm256_mul_ps(out[r][1], share));
            }
        }
    };
};

}  // namespace millstream
