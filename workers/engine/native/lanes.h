// Eight floats at a time. Every operation is an explicit instruction, so that no compiler's choice changes a bit.
#pragma once
#include <immintrin.h>
#include <cstdint>

namespace millstream {

// Loops that the compiler must undo, or it keeps the totals of a tile in memory.
#define EACH_ROW(r) _Pragma("GCC unroll 6") for (int r = 0; r < R; r++)
#define EACH_HALF(half) _Pragma("GCC unroll 2") for (int half = 0; half < 2; half++)

using Floats = __m256;
using Whole = __m256i;

inline Floats load(const float* at) { return _mm256_loadu_ps(at); }
inline void store(float* at, Floats value) { _mm256_storeu_ps(at, value); }
inline Floats all(float value) { return _mm256_set1_ps(value); }

// The four bytes at `at`, in every lane.
inline Whole spread(const void* at) { return _mm256_castps_si256(_mm256_broadcast_ss(static_cast<const float*>(at))); }

struct Half {  // IEEE half precision
    static Floats load(const uint16_t* at) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)at)); }
};

struct Brain {  // bfloat16: the upper half of a float
    static Floats load(const uint16_t* at) {
        const Whole wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)at));
        return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
    }
};

inline Floats magnitude(Floats value) { return _mm256_andnot_ps(all(-0.0f), value); }

inline float sum(Floats value) {
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(value), _mm256_extractf128_ps(value, 1));
    four = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(four, _mm_movehdup_ps(four)));
}

inline float largest(Floats value) {
    __m128 four = _mm_max_ps(_mm256_castps256_ps128(value), _mm256_extractf128_ps(value, 1));
    four = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(four, _mm_movehdup_ps(four)));
}

// e^x within 2 units in the last place: 2^n times a polynomial in the rest (Cephes, expf). x is within ±87.
inline Floats exponential_within(Floats x) {
    const Floats n = _mm256_round_ps(_mm256_mul_ps(x, all(1.44269504088896341f)), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    x = _mm256_fnmadd_ps(n, all(0.693359375f), x);
    x = _mm256_fnmadd_ps(n, all(-2.12194440e-4f), x);
    Floats y = all(1.9875691500e-4f);
    y = _mm256_fmadd_ps(y, x, all(1.3981999507e-3f));
    y = _mm256_fmadd_ps(y, x, all(8.3334519073e-3f));
    y = _mm256_fmadd_ps(y, x, all(4.1665795894e-2f));
    y = _mm256_fmadd_ps(y, x, all(1.6666665459e-1f));
    y = _mm256_fmadd_ps(y, x, all(5.0000001201e-1f));
    y = _mm256_add_ps(_mm256_fmadd_ps(y, _mm256_mul_ps(x, x), x), all(1.0f));
    const Whole power = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
    return _mm256_mul_ps(y, _mm256_castsi256_ps(power));
}

// x is held to ±87.
inline Floats exponential(Floats x) {
    return exponential_within(_mm256_max_ps(_mm256_min_ps(x, all(87.0f)), all(-87.0f)));
}

// Calls work.run<R>() with R = rows, from 1 to 6: what the sixteen registers hold of sixteen columns.
constexpr int TALLEST = 6;
template <class Work>
inline void by_height(int rows, const Work& work) {
    switch (rows) {
        case 1: return work.template run<1>();
        case 2: return work.template run<2>();
        case 3: return work.template run<3>();
        case 4: return work.template run<4>();
        case 5: return work.template run<5>();
        default: return work.template run<6>();
    }
}

// Sixteen columns of a matrix of 16-bit numbers, its rows weighted: out[r] = Σ_k factors[r][k] · matrix[k], k ascending.
template <class Number, int R>
inline void mix(const uint16_t* matrix, int64_t stride, int count, const float* const* factors, Floats (&out)[R][2]) {
    EACH_ROW(r) out[r][0] = out[r][1] = _mm256_setzero_ps();
    for (int k = 0; k < count; k++, matrix += stride) {
        const Floats left = Number::load(matrix), right = Number::load(matrix + 8);
        EACH_ROW(r) {
            const Floats factor = _mm256_broadcast_ss(factors[r] + k);
            out[r][0] = _mm256_fmadd_ps(left, factor, out[r][0]);
            out[r][1] = _mm256_fmadd_ps(right, factor, out[r][1]);
        }
    }
}

}  // namespace millstream
