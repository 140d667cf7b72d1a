// A choice's arithmetic over all engines at once: what routing/loss.py and routing/board.py say of arrays, row by row.
// Doubles throughout, no contraction: it differs from them by the last bits of exp and of sums alone.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

namespace {

constexpr int kStandins = 8;

// in the order of the board's columns
enum Column {
    kAt, kBacklog, kShare, kDecode, kDecodeToken, kFixed, kToken, kSquare, kPiece, kPieceMs, kGained, kRested,
    kWaiting, kDecoding, kSlots, kOwn, kRoom, kPenalty, kPenaltyAt, kTrip, kSent
};

struct Ask {
    int64_t count;  // candidates
    int64_t stride;  // rows that there is room for
    int64_t buckets;  // of the table
    const double* numbers;  // [columns][stride]
    const double* slacks;  // [stride][standins]
    const double* weights;  // [stride][standins + 1]
    const double* table;  // the share of answers shorter than n buckets
    const int64_t* places;  // [count] each candidate's row
    const uint8_t* able;  // [count]
    const double* shares;  // [count] of the traffic
    const int64_t* blocks;  // [rows] of the prompt's beginning, thought to be cached
    double now_ms, prompt_tokens, block_tokens, waited_ms, mean_tokens, sent_scale, binding;
    double ttft_ms, tbt_ms;
    int64_t blamed, far;  // whether to look at penalties, and at trips
    // the constants of routing.loss, routing.policy and routing.penalties
    double trust_ms, prefill_price, decode_price, wait_price, calm, ttft_doubt, tbt_doubt, least_margin, stall,
        logistic, bucket_tokens, half_life_ms, clearly, noise, excess_price, tie;
    int64_t tried;
    // answers
    int64_t* tied;  // [count] candidates with the least loss, or as good as that
    int64_t ties;
    double loss, busy;
    int64_t most_blocks;
    double* waits_ms;  // [count]
};

struct Engine {
    double backlog_ms, slot_ms, gained_ms, prompt_ms, after_ms, own;
};

double exceeds(double ms, double target_ms, double doubt, double logistic) {
    const double slope = logistic / (doubt * target_ms);
    return 1 / (1 + std::exp(std::min((target_ms - ms) * slope, 50.0)));
}

// How many of those at an engine miss their pace.
double missed(const double* behind_ms, double step_ms, const double* weights, const Ask& ask) {
    const double margin_ms = ask.tbt_ms - step_ms;
    const bool slow = margin_ms < 0;  // then it is who is ahead that may lose what he has
    const double scale =
        1 / (ask.bucket_tokens * std::max(std::fabs(margin_ms), ask.least_margin * ask.tbt_ms));
    double sum = 0, all = 0;
    for (int n = 0; n <= kStandins; ++n) {
        const double behind = slow ? -behind_ms[n] : behind_ms[n];
        const double bucket = std::min(std::max(behind * scale, 0.0), double(ask.buckets) - 1.5) + 0.5;
        sum += ask.table[int64_t(bucket)] * weights[n];
        all += weights[n];
    }
    return slow ? all - sum : sum;
}

double rise(int64_t row, const Engine& engine, const Ask& ask) {
    const double* slacks = ask.slacks + row * kStandins;
    const double* weights = ask.weights + row * (kStandins + 1);
    const double before_ms = ask.numbers[kDecode * ask.stride + row];
    double behind[kStandins + 1], then[kStandins + 1];
    for (int n = 0; n < kStandins; ++n) behind[n] = (engine.backlog_ms - engine.gained_ms) - slacks[n];
    behind[kStandins] = ask.stall * engine.backlog_ms - ask.numbers[kRested * ask.stride + row];
    for (int n = 0; n <= kStandins; ++n) then[n] = behind[n] + engine.prompt_ms;
    return missed(then, engine.after_ms, weights, ask) - missed(behind, before_ms, weights, ask);
}

double speed(int64_t row, const Ask& ask) {
    return ask.numbers[kPiece * ask.stride + row] / ask.numbers[kPieceMs * ask.stride + row];
}

// `mean_speed`: of those that are able
Engine weighed(int64_t row, double mean_speed, const Ask& ask) {
    const auto at = [&](Column column) { return ask.numbers[column * ask.stride + row]; };
    const double decode_ms = at(kDecode), decoding = at(kDecoding), piece_ms = at(kPieceMs);
    const double passed_ms = std::min(std::max(ask.now_ms - at(kAt), 0.0), ask.trust_ms);
    const double stalled_ms = std::min(passed_ms * at(kShare), at(kBacklog));
    const double over = at(kWaiting) + decoding - at(kSlots) + 1;
    Engine engine;
    engine.backlog_ms = at(kBacklog) - stalled_ms;
    engine.slot_ms = std::max(over, 0.0) * (decode_ms / at(kSlots)) * ask.mean_tokens;
    engine.gained_ms = at(kGained) + (passed_ms - stalled_ms) * (ask.tbt_ms / decode_ms) - passed_ms;

    const double tokens = std::max(ask.prompt_tokens - double(ask.blocks[row]) * ask.block_tokens, 1.0);
    const double pieces = std::max(std::ceil(tokens / at(kPiece)), 1.0);
    const double rest = tokens - (pieces - 1) * at(kPiece);
    engine.prompt_ms = (pieces - 1) * piece_ms + (at(kSquare) * rest + at(kToken)) * rest + at(kFixed);
    engine.after_ms = decode_ms + at(kDecodeToken) * ask.prompt_tokens;

    const double wait_ms = engine.backlog_ms + engine.slot_ms;
    const double between_ms = decoding > 0 ? (engine.backlog_ms / piece_ms + pieces + 0.5) * decode_ms : 0.0;
    const double waited_ms = ask.waited_ms + (ask.far ? at(kTrip) : 0.0);
    engine.own = exceeds(waited_ms + wait_ms + engine.prompt_ms + between_ms, ask.ttft_ms, ask.ttft_doubt, ask.logistic);
    engine.own += exceeds(engine.after_ms, ask.tbt_ms, ask.tbt_doubt, ask.logistic);
    const double worth = speed(row, ask) / mean_speed;
    engine.own += worth * engine.prompt_ms * (ask.prefill_price / ask.ttft_ms) + wait_ms * (ask.wait_price / ask.ttft_ms);
    engine.own += std::sqrt(worth) * std::min(engine.after_ms, ask.calm * ask.tbt_ms) * (ask.decode_price / ask.tbt_ms);
    if (ask.blamed) {
        const double age_ms = std::max(ask.now_ms - at(kPenaltyAt), 0.0);
        engine.own += 1 - std::exp2(-at(kPenalty) * std::exp2(-age_ms / ask.half_life_ms));
    }
    return engine;
}

}  // namespace

extern "C" void millstream_weigh(Ask* asked) {
    Ask& ask = *asked;
    const double infinite = std::numeric_limits<double>::infinity();
    thread_local std::vector<Engine> engines;
    thread_local std::vector<double> sorted;
    engines.resize(ask.count);
    sorted.clear();
    double sent = 0;
    if (ask.binding > 0)
        for (int64_t n = 0; n < ask.count; ++n) sent += ask.numbers[kSent * ask.stride + ask.places[n]] * ask.sent_scale;
    int64_t able = 0, busy = 0;
    double speeds = 0;
    for (int64_t n = 0; n < ask.count; ++n) {
        if (!ask.able[n]) continue;
        ++able;
        speeds += speed(ask.places[n], ask);
    }
    ask.most_blocks = 0;
    for (int64_t n = 0; n < ask.count; ++n) {
        const int64_t row = ask.places[n];
        ask.most_blocks = std::max(ask.most_blocks, ask.blocks[row]);
        Engine& engine = engines[n];
        engine.own = infinite;
        if (!ask.able[n]) continue;
        engine = weighed(row, speeds / double(able), ask);
        ask.waits_ms[n] = engine.backlog_ms + engine.slot_ms;
        busy += ask.waits_ms[n] > 0 || engine.after_ms > ask.calm * ask.tbt_ms;
        if (ask.binding > 0) {  // the price of going clearly over a share
            const double due = ask.shares[n] * (sent + 1);
            const double over =
                ask.numbers[kSent * ask.stride + row] * ask.sent_scale - ask.clearly * due - ask.noise * std::sqrt(due);
            if (over > 0) engine.own += ask.binding * (ask.excess_price * over / (due + 1));
        }
        sorted.push_back(engine.own);
    }
    ask.ties = 0;
    if (!able) return;
    ask.busy = double(busy) / double(able);
    double limit = infinite;
    if (int64_t(sorted.size()) > ask.tried) {
        std::nth_element(sorted.begin(), sorted.begin() + (ask.tried - 1), sorted.end());
        limit = sorted[ask.tried - 1] + ask.tie;
    }
    ask.loss = infinite;
    for (int64_t n = 0; n < ask.count; ++n) {
        Engine& engine = engines[n];
        if (engine.own == infinite || engine.own > limit) {
            engine.own = infinite;
            continue;
        }
        engine.own += rise(ask.places[n], engine, ask);
        ask.loss = std::min(ask.loss, engine.own);
    }
    for (int64_t n = 0; n < ask.count; ++n)
        if (engines[n].own <= ask.loss + ask.tie) ask.tied[ask.ties++] = n;
}
