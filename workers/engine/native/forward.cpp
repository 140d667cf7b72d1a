// A model's forward pass over rows of any sequences: one call a step.
//
// Each row is one token of one slot. Between two barriers a thread takes whole rows, or whole blocks of outputs.
#include <omp.h>

#include "attention.h"
#include "linear.h"

using namespace millstream;

extern "C" {

struct Layer {
    const float* attention_norm;
    const float *query_norm, *key_norm;  // or null
    const float* mlp_norm;
    Linear qkv, output, gate_up, down;
};

struct Model {
    int64_t layers, hidden, intermediate;
    Heads heads;
    int64_t slots, positions;  // positions: a multiple of 16
    float epsilon;
    const Layer* layer;
    const float* final_norm;
    Linear head;
    const float *cosines, *sines;  // [positions, size / 2]
    uint16_t* cache;               // [layers, 2, slots, key heads, positions, size]
    void* scratch;
};

struct Step {
    int64_t rows;
    float* hidden;  // [rows, hidden]: embeddings; overwritten
    const int64_t *slots, *at;
    int64_t draws;
    const int64_t* drawing;  // rows whose logits are wanted
    float* logits;           // [draws, head.outputs]
    int64_t threads;
};
}

namespace {

struct Run {  // rows that follow one another in one slot
    int64_t first, count;
};

struct Scratch {
    std::vector<char> numbers;
    std::vector<float> units, wide, narrow, attended;
    std::vector<Run> runs;
    std::vector<std::vector<float>> scores, normed;  // of each thread

    Operand operand(const Linear& linear) { return Operand(linear, numbers, units); }
};

void normalise(const float* x, const float* weight, int64_t count, float epsilon, float* out) {
    Floats squares = _mm256_setzero_ps();
    for (int64_t k = 0; k < count; k += 8) squares = _mm256_fmadd_ps(load(x + k), load(x + k), squares);
    const Floats inverse = all(1.0f / std::sqrt(sum(squares) / (float)count + epsilon));
    for (int64_t k = 0; k < count; k += 8) store(out + k, _mm256_mul_ps(_mm256_mul_ps(load(x + k), inverse), load(weight + k)));
}

// hidden += change, then its norm, in the numbers of the layer that comes next.
void enter(const Model& model, const Linear& next, const float* norm, float* hidden, const float* change, float* normed,
           const Operand& operand, int64_t row) {
    if (change) {
        for (int64_t k = 0; k < model.hidden; k += 8) store(hidden + k, _mm256_add_ps(load(hidden + k), load(change + k)));
    }
    normalise(hidden, norm, model.hidden, model.epsilon, normed);
    quantise(next, normed, operand, row);
}

// Rotary embedding: the first half of a head's dimensions are the real parts, the second the imaginary ones.
void rotate(float* head, const float* cosines, const float* sines, int64_t half, float scale) {
    for (int64_t k = 0; k < half; k += 8) {
        const Floats real = load(head + k), imaginary = load(head + half + k), cosine = load(cosines + k), sine = load(sines + k);
        store(head + k, _mm256_mul_ps(all(scale), _mm256_fmsub_ps(real, cosine, _mm256_mul_ps(imaginary, sine))));
        store(head + half + k, _mm256_mul_ps(all(scale), _mm256_fmadd_ps(imaginary, cosine, _mm256_mul_ps(real, sine))));
    }
}

uint16_t* side(const Model& model, int64_t layer, int which, int64_t slot, int64_t head) {
    const int64_t lane = ((layer * 2 + which) * model.slots + slot) * model.heads.key_count + head;
    return model.cache + lane * model.positions * model.heads.size;
}

void keep(const float* from, int64_t size, uint16_t* to, int64_t stride) {
    alignas(16) uint16_t halves[8];
    for (int64_t k = 0; k < size; k += 8) {
        const Floats held = _mm256_max_ps(_mm256_min_ps(load(from + k), all(65504.0f)), all(-65504.0f));
        _mm_store_si128((__m128i*)halves, _mm256_cvtps_ph(held, _MM_FROUND_TO_NEAREST_INT));
        for (int lane = 0; lane < 8; lane++) to[(k + lane) * stride] = halves[lane];
    }
}

// Turn a row's queries and keys to its position; its keys and values into the cache.
void place(const Model& model, const Layer& layer, int64_t index, float* mixed, int64_t slot, int64_t at) {
    const auto [count, key_count, size] = model.heads;
    const float *cosines = model.cosines + at * size / 2, *sines = model.sines + at * size / 2;
    for (int64_t head = 0; head < count + key_count; head++) {
        const bool query = head < count;
        float* numbers = mixed + head * size;
        if (const float* norm = query ? layer.query_norm : layer.key_norm) normalise(numbers, norm, size, model.epsilon, numbers);
        rotate(numbers, cosines, sines, size / 2, query ? 1.0f / std::sqrt((float)size) : 1.0f);
    }
    for (int64_t head = 0; head < key_count; head++) {
        uint16_t* keys = side(model, index, 0, slot, head) + at / 16 * 16 * size + at % 16;
        keep(mixed + (count + head) * size, size, keys, 16);
        keep(mixed + (count + key_count + head) * size, size, side(model, index, 1, slot, head) + at * size, 1);
    }
}

void attend(const Model& model, int64_t index, const Step& step, const Run& run, int64_t key_head, const float* mixed,
            int64_t stride, float* attended, std::vector<float>& scores) {
    const int64_t shared = model.heads.count / model.heads.key_count, size = model.heads.size;
    const int64_t slot = step.slots[run.first], end = step.at[run.first + run.count - 1] + 1, padded = (end + 15) / 16 * 16;
    const float* queries[64];
    float* outs[64];
    int64_t counts[64], total = 0;
    for (int64_t row = run.first; row < run.first + run.count; row++) {
        for (int64_t head = key_head * shared; head < (key_head + 1) * shared; head++, total++) {
            queries[total] = mixed + row * stride + head * size;
            outs[total] = attended + (row * model.heads.count + head) * size;
            counts[total] = step.at[row] + 1;
        }
    }
    roomy(scores, total * padded);
    Attention{side(model, index, 0, slot, key_head), side(model, index, 1, slot, key_head), model.heads, end, queries, outs,
              scores.data(), padded, counts, total}.run();
}

void gate(float* both, int64_t count) {
    for (int64_t k = 0; k < count; k += 8) {
        const Floats x = load(both + k);
        const Floats risen = _mm256_div_ps(x, _mm256_add_ps(all(1.0f), exponential(_mm256_sub_ps(_mm256_setzero_ps(), x))));
        store(both + k, _mm256_mul_ps(risen, load(both + count + k)));
    }
}

void find_runs(const Model& model, const Step& step, std::vector<Run>& runs) {
    const int64_t shared = model.heads.count / model.heads.key_count, most = shared > 16 ? 1 : TOGETHER;
    runs.clear();
    for (int64_t row = 0; row < step.rows; row++) {
        const bool follows = row && step.slots[row] == step.slots[row - 1] && step.at[row] == step.at[row - 1] + 1;
        if (follows && runs.back().count < most) runs.back().count++;
        else runs.push_back({row, 1});
    }
}

void prepare(const Model& model, const Step& step, Scratch& scratch) {
    const Layer& layer = *model.layer;
    roomy(scratch.wide, step.rows * std::max(layer.qkv.outputs, layer.gate_up.outputs));
    roomy(scratch.narrow, step.rows * std::max(layer.output.outputs, layer.down.outputs));
    roomy(scratch.attended, step.rows * model.heads.count * model.heads.size);
    for (const Linear* linear : {&layer.qkv, &layer.output, &layer.gate_up, &layer.down, &model.head}) {
        roomy(scratch.numbers, step.rows * Operand::bytes_of(*linear));
        roomy(scratch.units, step.rows * Operand::units_of(*linear));
    }
    scratch.scores.resize(step.threads);
    scratch.normed.resize(step.threads);
    for (auto& row : scratch.normed) roomy(row, model.hidden);
    find_runs(model, step, scratch.runs);
}

// One thread's part of a forward pass.
struct Hand {
    const Model& model;
    const Step& step;
    Scratch& scratch;
    Crew& crew;
    float* normed;
    std::vector<float>& scores;

    void run_layer(int64_t index) const {
        const Layer& layer = model.layer[index];
        float *wide = scratch.wide.data(), *narrow = scratch.narrow.data(), *attended = scratch.attended.data();
        const int64_t head_count = model.heads.key_count, attended_size = model.heads.count * model.heads.size;

        const Operand mixing = scratch.operand(layer.qkv);
        crew.share(step.rows, 4, [&](int64_t row) {
            const float* change = index ? narrow + row * model.layer[index - 1].down.outputs : nullptr;
            enter(model, layer.qkv, layer.attention_norm, hidden(row), change, normed, mixing, row);
        });
        multiply(crew, layer.qkv, mixing, step.rows, wide);
        crew.share(step.rows, 4, [&](int64_t row) {
            place(model, layer, index, wide + row * layer.qkv.outputs, step.slots[row], step.at[row]);
        });
        crew.share((int64_t)scratch.runs.size() * head_count, 1, [&](int64_t item) {
            const Run& run = scratch.runs[item / head_count];
            attend(model, index, step, run, item % head_count, wide, layer.qkv.outputs, attended, scores);
        });
        const Operand leaving = scratch.operand(layer.output);
        crew.share(step.rows, 4, [&](int64_t row) { quantise(layer.output, attended + row * attended_size, leaving, row); });
        multiply(crew, layer.output, leaving, step.rows, narrow);

        const Operand widening = scratch.operand(layer.gate_up);
        crew.share(step.rows, 4, [&](int64_t row) {
            enter(model, layer.gate_up, layer.mlp_norm, hidden(row), narrow + row * layer.output.outputs, normed, widening, row);
        });
        multiply(crew, layer.gate_up, widening, step.rows, wide);
        const Operand narrowing = scratch.operand(layer.down);
        crew.share(step.rows, 4, [&](int64_t row) {
            gate(wide + row * layer.gate_up.outputs, model.intermediate);
            quantise(layer.down, wide + row * layer.gate_up.outputs, narrowing, row);
        });
        multiply(crew, layer.down, narrowing, step.rows, narrow);
    }

    void run_head() const {
        const int64_t stride = model.layer[model.layers - 1].down.outputs;
        const Operand last = scratch.operand(model.head);
        crew.share(step.draws, 4, [&](int64_t draw) {
            const int64_t row = step.drawing[draw];
            enter(model, model.head, model.final_norm, hidden(row), scratch.narrow.data() + row * stride, normed, last, draw);
        });
        multiply(crew, model.head, last, step.draws, step.logits);
    }

    float* hidden(int64_t row) const { return step.hidden + row * model.hidden; }
};

}  // namespace

extern "C" {

void* millstream_scratch() { return new Scratch; }
void millstream_free(void* scratch) { delete static_cast<Scratch*>(scratch); }

void millstream_forward(const Model* model, const Step* step) {
    Scratch& scratch = *static_cast<Scratch*>(model->scratch);
    prepare(*model, *step, scratch);
    Crew* crew = nullptr;
#pragma omp parallel num_threads(step->threads)
    {
#pragma omp single
        crew = new Crew(omp_get_num_threads());  // may be fewer than were asked for
        const int thread = omp_get_thread_num();
        const Hand hand{*model, *step, scratch, *crew, scratch.normed[thread].data(), scratch.scores[thread]};
        for (int64_t index = 0; index < model->layers; index++) hand.run_layer(index);
        if (step->draws) hand.run_head();
    }
    delete crew;
}

// y = x · weightᵀ alone; for checks.
void millstream_multiply(const Linear* linear, const float* x, int64_t rows, float* out) {
    std::vector<char> numbers(rows * Operand::bytes_of(*linear));
    std::vector<float> units(rows * Operand::units_of(*linear));
    const Operand operand(*linear, numbers, units);
    for (int64_t row = 0; row < rows; row++) quantise(*linear, x + row * linear->inputs, operand, row);
    Crew alone(1);
    multiply(alone, *linear, operand, rows, out);
}
}
