// A row of logits in blocks of 64 ids, so that what is sought is sought in few of them.
//
// All is computed from the row alone, in one order: shares are added in eight lanes over a block, blocks in float64.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <vector>

#include "lanes.h"

namespace millstream {

constexpr int64_t BLOCK_IDS = 64;
constexpr float NEVER = -std::numeric_limits<float>::infinity();
constexpr float LOWEST = -87.0f;  // e to this has no share beside 1

struct Likely {
    int64_t id;
    float score;
};

// score · factor relative to `top`, the likeliest's, → a multiple of the likeliest's share: from 0 to 1.
inline Floats share(Floats score, Floats factor, Floats top) {
    const Floats below = _mm256_sub_ps(_mm256_mul_ps(score, factor), top);
    return _mm256_and_ps(exponential_within(below), _mm256_cmp_ps(below, all(LOWEST), _CMP_GT_OQ));
}

// The largest of a block; `odd` collects where one is NaN.
inline float peak_of(const float* block, Floats& odd) {
    Floats peak = all(NEVER);
    for (int64_t at = 0; at < BLOCK_IDS; at += 16) {
        const Floats left = load(block + at), right = load(block + at + 8);
        odd = _mm256_or_ps(odd, _mm256_cmp_ps(left, right, _CMP_UNORD_Q));
        peak = _mm256_max_ps(peak, _mm256_max_ps(left, right));
    }
    return largest(peak);
}

class Scores {
public:
    int64_t ids() const { return ids_; }
    float highest() const { return highest_; }
    float at(int64_t id) const { return blocks_[id / BLOCK_IDS][id % BLOCK_IDS]; }

    // A row as the model gave it; whether its numbers are usable. Only a last block that isn't whole is copied.
    bool read(const float* row, int64_t ids) {
        ids_ = ids;
        const int64_t whole = ids / BLOCK_IDS, count = (ids + BLOCK_IDS - 1) / BLOCK_IDS;
        blocks_.resize(count);
        peaks_.resize(count);
        for (int64_t block = 0; block < whole; block++) blocks_[block] = row + block * BLOCK_IDS;
        if (whole < count) {
            own_.assign(BLOCK_IDS, NEVER);
            std::copy(row + whole * BLOCK_IDS, row + ids, own_.begin());
            blocks_[whole] = own_.data();
        }
        Floats odd = _mm256_setzero_ps();
        for (int64_t block = 0; block < count; block++) peaks_[block] = peak_of(blocks_[block], odd);
        settle();
        return !_mm256_movemask_ps(odd) && std::isfinite(highest_);
    }

    // As another row, until some are changed.
    void follow(const Scores& other) {
        ids_ = other.ids_;
        blocks_ = other.blocks_;
        peaks_ = other.peaks_;
        if (own_.size() < blocks_.size() * BLOCK_IDS) own_.resize(blocks_.size() * BLOCK_IDS);
        highest_ = other.highest_;
        totalled_ = NONE;
    }

    // An id's score, to be changed.
    float& change(int64_t id) { return own(id / BLOCK_IDS)[id % BLOCK_IDS]; }

    // Leave the ids whose bit is set, in so many bytes of eight ids each.
    void allow(const uint8_t* mask, int64_t bytes) {
        alignas(32) static const float none[BLOCK_IDS] = {};
        const Whole bits = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
        for (int64_t block = 0; block < (int64_t)blocks_.size(); block++) {
            uint8_t here[8] = {};
            const int64_t first = block * 8;
            if (first < bytes) std::memcpy(here, mask + first, std::min<int64_t>(8, bytes - first));
            uint64_t all_bits;
            std::memcpy(&all_bits, here, 8);
            if (all_bits == ~uint64_t{0}) continue;
            float* into = all_bits ? own(block) : own_.data() + block * BLOCK_IDS;
            const float* from = all_bits ? into : none;
            for (int64_t at = 0; at < 8; at++) {
                const Whole set = _mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32(here[at]), bits), bits);
                store(into + at * 8, _mm256_blendv_ps(all(NEVER), load(from + at * 8), _mm256_castsi256_ps(set)));
            }
            blocks_[block] = into;
        }
    }

    // To be called once all changes are made.
    void changed() {
        Floats odd = _mm256_setzero_ps();
        for (int64_t block = 0; block < (int64_t)blocks_.size(); block++)
            if (blocks_[block] == own_.data() + block * BLOCK_IDS) peaks_[block] = peak_of(blocks_[block], odd);
        settle();
    }

    // The first of the likeliest.
    int64_t likeliest() const {
        const int64_t block = std::find(peaks_.begin(), peaks_.end(), highest_) - peaks_.begin();
        return block * BLOCK_IDS + (std::find(blocks_[block], blocks_[block] + BLOCK_IDS, highest_) - blocks_[block]);
    }

    // A score that at least `count` ids reach.
    float reached_by(int64_t count, std::vector<float>& space) const {
        if (count > (int64_t)peaks_.size()) return NEVER;
        space.assign(peaks_.begin(), peaks_.end());
        std::nth_element(space.begin(), space.begin() + count - 1, space.end(), std::greater<float>());
        return space[count - 1];
    }

    // All ids whose scores are at least so much, in order.
    void at_least(float least, std::vector<Likely>& out) const {
        out.clear();
        for (int64_t block = 0; block < (int64_t)blocks_.size(); block++) {
            if (!(peaks_[block] >= least)) continue;
            for (int64_t at = 0; at < BLOCK_IDS; at += 8) {
                const Floats enough = _mm256_cmp_ps(load(blocks_[block] + at), all(least), _CMP_GE_OQ);
                for (unsigned found = _mm256_movemask_ps(enough); found; found &= found - 1) {
                    const int64_t within = at + __builtin_ctz(found), id = block * BLOCK_IDS + within;
                    if (id < ids_) out.push_back({id, blocks_[block][within]});
                }
            }
        }
    }

    // The sum of all shares, as multiples of the likeliest's.
    double total(float factor) {
        if (factor == totalled_) return reached_.back();
        reached_.resize(blocks_.size());
        const Floats factors = all(factor), top = all(highest_ * factor);
        double reached = 0;
        for (int64_t block = 0; block < (int64_t)blocks_.size(); block++) {
            const float* scores = blocks_[block];
            Floats left = share(load(scores), factors, top), right = share(load(scores + 8), factors, top);
            for (int64_t at = 16; at < BLOCK_IDS; at += 16) {
                left = _mm256_add_ps(left, share(load(scores + at), factors, top));
                right = _mm256_add_ps(right, share(load(scores + at + 8), factors, top));
            }
            reached_[block] = reached += sum(_mm256_add_ps(left, right));
        }
        totalled_ = factor;
        return reached;
    }

    // The id in whose share `drawn`, from [0, 1), of all shares is reached.
    int64_t fall(float factor, double drawn) {
        const double whole = total(factor), target = drawn * whole;
        // rounding may carry the target past the last share that isn't zero
        const auto last = std::lower_bound(reached_.begin(), reached_.end(), whole);
        const int64_t block = std::min(std::upper_bound(reached_.begin(), reached_.end(), target), last) - reached_.begin();
        alignas(32) float shares[BLOCK_IDS];
        for (int64_t at = 0; at < BLOCK_IDS; at += 8)
            _mm256_store_ps(shares + at, share(load(blocks_[block] + at), all(factor), all(highest_ * factor)));
        double reached = block ? reached_[block - 1] : 0;
        int64_t found = 0;
        for (int64_t at = 0; at < BLOCK_IDS; at++) {
            if (!(shares[at] > 0)) continue;
            found = at;
            if ((reached += shares[at]) > target) break;
        }
        return block * BLOCK_IDS + found;
    }

private:
    static constexpr float NONE = -1;

    float* own(int64_t block) {
        float* copy = own_.data() + block * BLOCK_IDS;
        if (blocks_[block] != copy) {
            std::copy(blocks_[block], blocks_[block] + BLOCK_IDS, copy);
            blocks_[block] = copy;
        }
        return copy;
    }

    void settle() {
        highest_ = *std::max_element(peaks_.begin(), peaks_.end());
        totalled_ = NONE;
    }

    int64_t ids_ = 0;
    float highest_ = NEVER;
    float totalled_ = NONE;  // the factor that `reached_` is for
    std::vector<const float*> blocks_;
    std::vector<float> peaks_, own_;
    std::vector<double> reached_;  // shares up to each block's end
};

}  // namespace millstream
