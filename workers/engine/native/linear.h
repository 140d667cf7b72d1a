// Linear layers: y = x · weightᵀ (+ bias), with the weights packed in tiles of sixteen outputs.
//
// An output is summed in an order that depends on nothing but the number of inputs, so a row's result is the same
// whatever rows are computed beside it, on however many threads.
#pragma once
#include <algorithm>
#include <cmath>
#include <vector>

#include "crew.h"
#include "lanes.h"

namespace millstream {

struct Linear {
    int64_t bits;     // of a weight: 4, 8 or 16
    int64_t inputs;   // a multiple of 32
    int64_t outputs;  // a multiple of BLOCK; what was added to make it one is zeros
    const void* weight;
    const float* scale;  // 8 bits: of each output
    const float* bias;   // or null
    double heaviest;     // 8 bits: the largest norm of an output's whole numbers
};

// Inlined into one another, the tiles get too few registers.
#define ALONE __attribute__((noinline))

constexpr int TILE = 16;    // outputs that are computed at once
constexpr int BLOCK = 32;   // outputs that a thread takes at a time
constexpr int GROUP = 32;   // inputs that share a scale, with 4 bits
constexpr int GROUP_BYTES = GROUP / 2 * 8 + 2 * 8 * 2;  // of eight outputs: their weights, scales and least values

// The rows that a linear layer multiplies, in the numbers it multiplies them in.
struct Operand {
    char* numbers;
    float* units;
    int64_t row_bytes, row_units;

    Operand(const Linear& linear, std::vector<char>& numbers, std::vector<float>& units)
        : numbers(numbers.data()), units(units.data()), row_bytes(bytes_of(linear)), row_units(units_of(linear)) {}

    static int64_t bytes_of(const Linear& linear) {
        return linear.inputs * (linear.bits == 4 ? 1 : linear.bits == 8 ? 2 : 4);
    }
    static int64_t units_of(const Linear& linear) { return linear.bits == 4 ? linear.inputs / GROUP * 2 : 1; }

    template <class Number>
    Number* row(int64_t at) const { return reinterpret_cast<Number*>(numbers + at * row_bytes); }
    float* unit(int64_t at) const { return units + at * row_units; }
};

// At least so many.
template <class Number>
inline void roomy(std::vector<Number>& buffer, int64_t count) {
    if ((int64_t)buffer.size() < count) buffer.resize(count);
}

inline Whole rounded(const float* x, Floats inverse) { return _mm256_cvtps_epi32(_mm256_mul_ps(load(x), inverse)); }

// Whole numbers of eight bits, with a unit for each group of 32; beside it the unit times the numbers' sum.
inline void quantise_groups(const float* x, int64_t count, int8_t* out, float* units) {
    for (int64_t at = 0; at < count; at += GROUP, units += 2) {
        Floats peak = _mm256_setzero_ps();
        for (int k = 0; k < GROUP; k += 8) peak = _mm256_max_ps(peak, magnitude(load(x + at + k)));
        const float unit = largest(peak) / 127.0f;
        const Floats inverse = all(unit > 0 ? 1.0f / unit : 0.0f);
        const Whole a = rounded(x + at, inverse), b = rounded(x + at + 8, inverse);
        const Whole c = rounded(x + at + 16, inverse), d = rounded(x + at + 24, inverse);
        const Whole whole = _mm256_packs_epi16(_mm256_packs_epi32(a, b), _mm256_packs_epi32(c, d));
        _mm256_storeu_si256((Whole*)(out + at), _mm256_permutevar8x32_epi32(whole, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7)));
        units[0] = unit;
        units[1] = unit * sum(_mm256_cvtepi32_ps(_mm256_add_epi32(_mm256_add_epi32(a, b), _mm256_add_epi32(c, d))));
    }
}

// Whole numbers of up to sixteen bits, with one unit: so large that by Cauchy and Schwarz no sum of products leaves 32 bits.
inline void quantise_row(const float* x, int64_t count, double heaviest, int16_t* out, float* unit) {
    Floats peak = _mm256_setzero_ps(), squares = _mm256_setzero_ps();
    for (int64_t k = 0; k < count; k += 8) {
        const Floats value = load(x + k);
        peak = _mm256_max_ps(peak, magnitude(value));
        squares = _mm256_fmadd_ps(value, value, squares);
    }
    const double rounding = std::sqrt((double)count) / 2;  // up to ½ in each place
    const double reach = 2147483647.0 * 0.999 / std::max(heaviest, 1.0) - rounding;
    const double norm = std::sqrt((double)sum(squares));
    *unit = (float)std::max(norm / reach, (double)largest(peak) / 32767.0);
    const Floats inverse = all(*unit > 0 ? 1.0f / *unit : 0.0f);
    for (int64_t k = 0; k < count; k += 16) {
        const Whole whole = _mm256_packs_epi32(rounded(x + k, inverse), rounded(x + k + 8, inverse));
        _mm256_storeu_si256((Whole*)(out + k), _mm256_permute4x64_epi64(whole, 0xD8));
    }
}

inline void quantise(const Linear& linear, const float* x, const Operand& operand, int64_t at) {
    if (linear.bits == 4) {
        quantise_groups(x, linear.inputs, operand.row<int8_t>(at), operand.unit(at));
    } else if (linear.bits == 8) {
        quantise_row(x, linear.inputs, linear.heaviest, operand.row<int16_t>(at), operand.unit(at));
    } else {
        std::copy(x, x + linear.inputs, operand.row<float>(at));
    }
}

// Sixteen outputs of R rows.
struct Tile {
    const Linear& linear;
    const Operand& operand;
    int64_t first_row, column;
    float* out;  // [rows, linear.outputs]

    template <int R>
    void run() const {
        if (linear.bits == 4) {
            four<R>(column);
            four<R>(column + 8);
        } else if (linear.bits == 8) {
            eight<R>();
        } else {
            sixteen<R>();
        }
    }

    void write(int row, int64_t at, Floats value) const {
        if (linear.bias) value = _mm256_add_ps(value, load(linear.bias + at));
        store(out + (first_row + row) * linear.outputs + at, value);
    }

    // A group of 32 has products of up to 15 · 127; four of a column's eight pairs fit sixteen bits with room to spare.
    template <int R>
    ALONE void four(int64_t at) const {
        const int64_t groups = linear.inputs / GROUP;
        const uint8_t* weight = (const uint8_t*)linear.weight + at / 8 * groups * GROUP_BYTES;
        const int8_t* rows[R];
        const float* units[R];
        Floats total[R];
        EACH_ROW(r) {
            rows[r] = operand.row<int8_t>(first_row + r);
            units[r] = operand.unit(first_row + r);
            total[r] = _mm256_setzero_ps();
        }
        const Whole low = _mm256_set1_epi8(15), ones = _mm256_set1_epi16(1);
        for (int64_t group = 0; group < groups; group++, weight += GROUP_BYTES) {
            Whole pairs[R];
#pragma GCC unroll 4
            for (int part = 0; part < 4; part++) {
                const Whole both = _mm256_loadu_si256((const Whole*)(weight + 32 * part));
                const Whole first = _mm256_and_si256(both, low), second = _mm256_and_si256(_mm256_srli_epi16(both, 4), low);
                EACH_ROW(r) {
                    const int8_t* x = rows[r] + GROUP * group + 8 * part;
                    const Whole products = _mm256_add_epi16(
                        _mm256_maddubs_epi16(first, spread(x)), _mm256_maddubs_epi16(second, spread(x + 4)));
                    pairs[r] = part ? _mm256_add_epi16(pairs[r], products) : products;
                }
            }
            const Floats scale = Half::load((const uint16_t*)(weight + 128));
            const Floats least = Half::load((const uint16_t*)(weight + 144));
            EACH_ROW(r) {
                const Floats whole = _mm256_cvtepi32_ps(_mm256_madd_epi16(pairs[r], ones));
                total[r] = _mm256_fmadd_ps(least, _mm256_broadcast_ss(units[r] + 2 * group + 1), total[r]);
                total[r] = _mm256_fmadd_ps(whole, _mm256_mul_ps(scale, _mm256_broadcast_ss(units[r] + 2 * group)), total[r]);
            }
        }
        EACH_ROW(r) write(r, at, total[r]);
    }

    template <int R>
    ALONE void eight() const {
        const int8_t* weight = (const int8_t*)linear.weight + column * linear.inputs;
        const int16_t* rows[R];
        Whole total[R][2];
        EACH_ROW(r) {
            rows[r] = operand.row<int16_t>(first_row + r);
            total[r][0] = total[r][1] = _mm256_setzero_si256();
        }
        for (int64_t k = 0; k < linear.inputs; k += 2, weight += 2 * TILE) {
            const Whole left = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)weight));
            const Whole right = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)(weight + TILE)));
            EACH_ROW(r) {
                const Whole x = spread(rows[r] + k);
                total[r][0] = _mm256_add_epi32(total[r][0], _mm256_madd_epi16(left, x));
                total[r][1] = _mm256_add_epi32(total[r][1], _mm256_madd_epi16(right, x));
            }
        }
        EACH_ROW(r) {
            const Floats unit = all(*operand.unit(first_row + r));
            EACH_HALF(half) {
                const Floats scale = load(linear.scale + column + 8 * half);
                write(r, column + 8 * half, _mm256_mul_ps(_mm256_mul_ps(_mm256_cvtepi32_ps(total[r][half]), unit), scale));
            }
        }
    }

    template <int R>
    ALONE void sixteen() const {
        const float* rows[R];
        Floats total[R][2];
        EACH_ROW(r) rows[r] = operand.row<float>(first_row + r);
        mix<Brain, R>((const uint16_t*)linear.weight + column * linear.inputs, TILE, (int)linear.inputs, rows, total);
        EACH_ROW(r) {
            write(r, column, total[r][0]);
            write(r, column + 8, total[r][1]);
        }
    }
};

// All outputs of all rows, by the whole crew.
inline void multiply(Crew& crew, const Linear& linear, const Operand& operand, int64_t rows, float* out) {
    // measured: a product of whole numbers takes registers of its own before it is added
    const int64_t tallest = linear.bits == 8 ? 3 : linear.bits == 4 ? 4 : TALLEST;
    crew.share(linear.outputs / BLOCK, 1, [&](int64_t block) {
        for (int64_t row = 0; row < rows; row += tallest) {
            const int height = (int)std::min(tallest, rows - row);
            for (int64_t column = block * BLOCK; column < (block + 1) * BLOCK; column += TILE) {
                by_height(height, Tile{linear, operand, row, column, out});
            }
        }
    });
}

}  // namespace millstream
