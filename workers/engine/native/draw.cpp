// From logits to tokens: all rows of a step in one call, each by one thread, from that row and what is asked of it alone.
#include <omp.h>

#include <bit>

#include "crew.h"
#include "scores.h"

using namespace millstream;

extern "C" {

struct Ask {
    const float* row;
    int64_t given;  // the token that is there already and only judged; −1 = draw one
    uint64_t seed_low, seed_high, choice, position;
    double drawn;  // from [0, 1); less = by seed, choice and position
    double temperature, top_p, min_p;
    int64_t top_k;
    double repetition, presence, frequency;
    int64_t seen;  // tokens that occurred
    const int64_t *seen_ids, *seen_counts;
    int64_t biased;
    const int64_t* biased_ids;
    const double* biases;
    int64_t bars_ends;
    int64_t mask_bytes;  // 0 = any token may come
    const uint8_t* mask;
    int64_t shown;  // likeliest tokens whose logprobs are wanted; −1 = not even the drawn one's
};

struct Draw {
    int64_t ids, asks;
    const Ask* ask;
    int64_t ends;
    const int64_t* end_ids;  // ascending
    int64_t threads;
    int64_t most_shown;
    int64_t* tokens;  // out, as all below: −1 = the row has no usable numbers
    double* logprobs;
    int64_t* shown_ids;  // [asks, most shown], the likeliest first
    double* shown_logprobs;
};
}

namespace {

constexpr double COLDEST = 1e-30;  // one over a temperature below this isn't a float; all near it take the likeliest

// As draws.py has it: Philox4x64-10, the upper 53 bits of the first word.
double uniform(uint64_t low, uint64_t high, uint64_t choice, uint64_t position) {
    using Wide = unsigned __int128;
    uint64_t c0 = position, c1 = choice, c2 = 0, c3 = 0;
    for (int round = 0; round < 10; round++) {
        const Wide first = (Wide)0xD2E7470EE14C6C93 * c0, second = (Wide)0xCA5A826395121157 * c2;
        c0 = (uint64_t)(second >> 64) ^ c1 ^ low;
        c1 = (uint64_t)second;
        c2 = (uint64_t)(first >> 64) ^ c3 ^ high;
        c3 = (uint64_t)first;
        low += 0x9E3779B97F4A7C15;
        high += 0xBB67AE8584CAA73B;
    }
    return (double)(c0 >> 11) / (double)(uint64_t{1} << 53);
}

struct Space {  // of one thread
    Scores own, adjusted;
    std::vector<Likely> likely;
    std::vector<float> shares, ranked;
    std::vector<double> buckets;
};

bool adjusts(const Ask& ask) {
    return ask.seen || ask.biased || ask.bars_ends || ask.mask_bytes;
}

// Penalties, bias, endings that may not come yet, and what a grammar forbids, in that order.
void adjust(const Draw& draw, const Ask& ask, Scores& scores) {
    const auto exists = [&](int64_t id) { return id >= 0 && id < draw.ids; };
    const bool counted = ask.presence != 0 || ask.frequency != 0;
    for (int64_t at = 0; at < ask.seen; at++) {
        if (!exists(ask.seen_ids[at])) continue;
        float& score = scores.change(ask.seen_ids[at]);
        if (ask.repetition != 1) score *= (float)(score > 0 ? 1 / ask.repetition : ask.repetition);
        const auto times = (double)ask.seen_counts[at];
        if (counted && times > 0) score -= (float)(ask.presence + ask.frequency * times);
    }
    for (int64_t at = 0; at < ask.biased; at++)
        if (exists(ask.biased_ids[at])) scores.change(ask.biased_ids[at]) += (float)ask.biases[at];
    if (ask.bars_ends)
        for (int64_t at = 0; at < draw.ends; at++)
            if (exists(draw.end_ids[at])) scores.change(draw.end_ids[at]) = NEVER;
    if (ask.mask_bytes) scores.allow(ask.mask, ask.mask_bytes);
    scores.changed();
}

// space.shares of space.likely, as multiples of the likeliest's; their sum.
double weigh(Space& space, const Scores& scores, float factor) {
    const int64_t count = (int64_t)space.likely.size(), padded = (count + 7) / 8 * 8;
    space.shares.assign(padded, NEVER);
    for (int64_t at = 0; at < count; at++) space.shares[at] = space.likely[at].score;
    for (int64_t at = 0; at < padded; at += 8)
        store(&space.shares[at], share(load(&space.shares[at]), all(factor), all(scores.highest() * factor)));
    space.shares.resize(count);
    double reached = 0;
    for (const float each : space.shares) reached += each;
    return reached;
}

// space.likely without what is smaller than its `count` largest.
void keep_largest(Space& space, int64_t count) {
    if ((int64_t)space.likely.size() <= count) return;
    space.ranked.clear();
    for (const Likely& each : space.likely) space.ranked.push_back(each.score);
    const auto last = space.ranked.begin() + count - 1;
    std::nth_element(space.ranked.begin(), last, space.ranked.end(), std::greater<float>());
    std::erase_if(space.likely, [least = *last](const Likely& each) { return each.score < least; });
}

// Shares of one bucket differ in their last 17 bits alone. Larger ones have larger buckets.
int64_t bucket_of(float share) { return std::bit_cast<uint32_t>(share) >> 17; }

// The last of the fewest of the largest shares that add up to what is wanted. No more are sorted than those of a bucket.
float last_of(Space& space, double wanted) {
    space.buckets.assign(bucket_of(1) + 1, 0);
    for (const float each : space.shares) space.buckets[bucket_of(each)] += each;
    int64_t bucket = bucket_of(1);
    double reached = 0;
    for (; bucket > 0 && reached + space.buckets[bucket] < wanted; bucket--) reached += space.buckets[bucket];
    space.ranked.clear();
    for (const float each : space.shares)
        if (bucket_of(each) == bucket) space.ranked.push_back(each);
    std::sort(space.ranked.begin(), space.ranked.end(), std::greater<float>());
    for (const float each : space.ranked)
        if ((reached += each) >= wanted) return each;
    return space.ranked.empty() ? 0 : space.ranked.back();
}

bool limits(const Ask& ask, const Scores& scores) {
    return (ask.top_k > 0 && ask.top_k < scores.ids()) || ask.top_p < 1 || ask.min_p > 0;
}

// space.likely and their shares: what top_k leaves, or at least what top_p or min_p does; how much of it top_p wants.
double gather(const Ask& ask, Scores& scores, float factor, Space& space) {
    const auto within = [&](double reach) {  // of the likeliest, in powers of e
        scores.at_least((float)(scores.highest() - reach / factor), space.likely);
        return weigh(space, scores, factor);
    };
    if (ask.top_k > 0 && ask.top_k < scores.ids()) {
        scores.at_least(scores.reached_by(ask.top_k, space.ranked), space.likely);
        keep_largest(space, ask.top_k);
        return ask.top_p * weigh(space, scores, factor);
    }
    if (ask.top_p < 1) {
        const double wanted = ask.top_p * scores.total(factor);
        for (double reach : {5.0, 10.0})
            if (within(reach) >= wanted) return wanted;
        within(INFINITY);
        return wanted;
    }
    within(1 - std::log(ask.min_p));
    return 0;
}

// As `fall`, among what top_k, top_p and min_p leave, in that order. Equals of the last that is left stay.
int64_t pick(const Ask& ask, Scores& scores, float factor, double drawn, Space& space) {
    const double wanted = gather(ask, scores, factor, space);
    double least = std::clamp(ask.min_p, (double)std::numeric_limits<float>::min(), 1.0);
    if (ask.top_p < 1) least = std::max(least, (double)last_of(space, wanted));
    double kept = 0;
    for (const float each : space.shares) kept += each >= least ? each : 0;
    const double target = drawn * kept;
    int64_t found = scores.likeliest();
    double reached = 0;
    for (size_t at = 0; at < space.likely.size(); at++) {
        if (!(space.shares[at] >= least)) continue;
        found = space.likely[at].id;
        if ((reached += space.shares[at]) > target) break;
    }
    return found;
}

int64_t next(const Draw& draw, const Ask& ask, Space& space) {
    const bool adjusted = adjusts(ask);
    if (adjusted) {
        space.adjusted.follow(space.own);
        adjust(draw, ask, space.adjusted);
    }
    Scores& scores = adjusted ? space.adjusted : space.own;
    if (!std::isfinite(scores.highest()))  // where only an end can follow, it comes
        return scores.highest() == NEVER && draw.ends ? draw.end_ids[0] : -1;
    if (ask.temperature <= 0) return scores.likeliest();
    const auto factor = (float)(1 / std::max(ask.temperature, COLDEST));
    const double drawn = ask.drawn < 0 ? uniform(ask.seed_low, ask.seed_high, ask.choice, ask.position) : ask.drawn;
    return limits(ask, scores) ? pick(ask, scores, factor, drawn, space) : scores.fall(factor, drawn);
}

// Natural logarithms of probabilities under the model itself: of the token, and of the likeliest, by (−probability, id).
void show(const Draw& draw, int64_t index, Space& space) {
    const Ask& ask = draw.ask[index];
    const double whole = space.own.highest() + std::log(space.own.total(1));
    draw.logprobs[index] = space.own.at(draw.tokens[index]) - whole;
    const int64_t count = std::min(ask.shown, draw.ids);
    if (count <= 0) return;
    space.own.at_least(space.own.reached_by(count, space.ranked), space.likely);
    const auto before = [](const Likely& one, const Likely& other) {
        return one.score > other.score || (one.score == other.score && one.id < other.id);
    };
    std::partial_sort(space.likely.begin(), space.likely.begin() + count, space.likely.end(), before);
    for (int64_t at = 0; at < count; at++) {
        draw.shown_ids[index * draw.most_shown + at] = space.likely[at].id;
        draw.shown_logprobs[index * draw.most_shown + at] = space.likely[at].score - whole;
    }
}

void answer(const Draw& draw, int64_t index) {
    thread_local Space space;
    const Ask& ask = draw.ask[index];
    int64_t& token = draw.tokens[index] = -1;
    if (!ask.row || !space.own.read(ask.row, draw.ids)) return;
    token = ask.given >= 0 ? ask.given : next(draw, ask, space);
    if (token >= 0 && ask.shown >= 0) show(draw, index, space);
}

}  // namespace

extern "C" {

void millstream_draw(const Draw* draw) {
    Crew* crew = nullptr;
#pragma omp parallel num_threads((int)std::min(draw->threads, draw->asks))
    {
#pragma omp single
        crew = new Crew(omp_get_num_threads());  // may be fewer than were asked for
        crew->share(draw->asks, 1, [&](int64_t index) { answer(*draw, index); });
    }
    delete crew;
}

double millstream_uniform(uint64_t low, uint64_t high, uint64_t choice, uint64_t position) {
    return uniform(low, high, choice, position);
}
}
