#include "decoder.h"

#include <chrono>
#include <cstring>

#include "kv.h"
#include "linear.h"
#include "ops.h"
#include "threads.h"

namespace cue {
namespace {

constexpr int64_t kLine = 64;

class Clock {
   public:
    explicit Clock(double* seconds) : seconds_(seconds) { start_ = now(); }

    // What has passed since the last time belongs to this part.
    void lap(CuePart part) {
        if (seconds_ == nullptr) return;
        const double end = now();
        seconds_[part] += end - start_;
        start_ = end;
    }

   private:
    double now() const {
        if (seconds_ == nullptr) return 0;
        return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
    }

    double* seconds_;
    double start_;
};

// Hands out pieces of the scratch memory; without any, counts what they take.
class Scratch {
   public:
    explicit Scratch(void* memory) : memory_(static_cast<char*>(memory)) {}

    void* bytes(int64_t count) {
        void* piece = memory_ == nullptr ? nullptr : memory_ + used_;
        used_ += (count + kLine - 1) / kLine * kLine;
        return piece;
    }
    float* floats(int64_t count) { return static_cast<float*>(bytes(count * static_cast<int64_t>(sizeof(float)))); }
    int64_t used() const { return used_; }

   private:
    char* memory_;
    int64_t used_ = 0;
};

struct Widths {
    explicit Widths(const CueDecoder& d)
        : queries(static_cast<int64_t>(d.heads) * d.head_dim), keys(static_cast<int64_t>(d.kv_heads) * d.head_dim) {}
    int64_t queries, keys;
    int64_t qkv() const { return queries + 2 * keys; }
};

// The step's intermediate results, each [tokens, width].
struct Buffers {
    Buffers(const CueDecoder& d, int64_t tokens, Scratch& scratch) {
        const Widths widths(d);
        stream = scratch.floats(tokens * d.hidden);
        normed = scratch.floats(tokens * d.hidden);
        qkv = scratch.floats(tokens * widths.qkv());
        attended = scratch.floats(tokens * widths.queries);
        if (d.quantized) {
            narrow = scratch.bytes(cue_quantized_bytes(tokens, d.hidden));
            wide = scratch.bytes(cue_quantized_bytes(tokens, d.intermediate));
        } else {
            gated = scratch.floats(tokens * d.intermediate);
        }
    }
    float *stream, *normed, *qkv, *attended, *gated = nullptr;
    void *narrow = nullptr, *wide = nullptr;
};

class Step {
   public:
    Step(const CueDecoder& decoder, const CueStep& step, void* scratch, double* seconds)
        : d_(decoder), step_(step), rows_(step.slots.count), clock_(seconds), pieces_(scratch),
          b_(decoder, rows_, pieces_) {}

    int run(float* logits, int64_t* best) {
        if (cue_embed(step_.token_ids, rows_, d_.embedding, d_.embedding_scales, d_.embedding_type, d_.vocabulary,
                      d_.hidden, b_.stream) != 0) {
            return -1;
        }
        clock_.lap(CUE_EMBED);
        for (int layer = 0; layer < d_.layer_count; ++layer) {
            if (!attend(d_.layers[layer], d_.pools[layer])) return -1;
            if (layer + 1 == d_.layer_count && !keep_draws()) return step_.draw_count == 0 ? 0 : -1;
            project(d_.layers[layer]);
            feed_forward(d_.layers[layer]);
        }
        finish(logits, best);
        return 0;
    }

   private:
    void norm(const float* weight) {
        cue_add_rmsnorm(b_.stream, nullptr, weight, b_.normed, rows_, d_.hidden, d_.epsilon);
        clock_.lap(CUE_NORM);
    }

    bool attend(const CueLayer& layer, const CueKv& pool) {
        const Widths widths(d_);
        norm(layer.attention_norm);
        cue_linear(layer.qkv, b_.normed, d_.hidden, rows_, layer.qkv_bias, 0, b_.qkv, widths.qkv());
        clock_.lap(CUE_QKV);
        if (layer.query_norm != nullptr) norm_heads(layer, widths);
        if (cue_rope_write(&pool, &step_.slots, b_.qkv, d_.heads, d_.cosines, d_.sines, d_.positions, d_.rotary) != 0) {
            return false;
        }
        clock_.lap(CUE_ROPE);
        const int done = cue_attend(&pool, &step_.sequences, b_.qkv, widths.qkv(), b_.attended, widths.queries,
                                    d_.heads, d_.scale);
        clock_.lap(CUE_ATTENTION);
        return done == 0;
    }

    // Each head of the queries and keys is normed by itself.
    void norm_heads(const CueLayer& layer, const Widths& widths) {
        parallel(static_cast<int>(rows_), [&](int row) {
            float* queries = b_.qkv + row * widths.qkv();
            float* keys = queries + widths.queries;
            cue_add_rmsnorm(queries, nullptr, layer.query_norm, queries, d_.heads, d_.head_dim, d_.epsilon);
            cue_add_rmsnorm(keys, nullptr, layer.key_norm, keys, d_.kv_heads, d_.head_dim, d_.epsilon);
        });
        clock_.lap(CUE_NORM);
    }

    // After the last attention only the rows that are sampled after matter. False if there are none, or one is missing.
    bool keep_draws() {
        const Widths widths(d_);
        for (int32_t i = 0; i < step_.draw_count; ++i) {
            const int64_t row = step_.draws[i];
            if (row < i || row >= rows_) return false;  // ascending, so that none is overwritten before it is moved
            std::memmove(b_.stream + i * d_.hidden, b_.stream + row * d_.hidden, d_.hidden * sizeof(float));
            std::memmove(b_.attended + i * widths.queries, b_.attended + row * widths.queries,
                         widths.queries * sizeof(float));
        }
        rows_ = step_.draw_count;
        return rows_ > 0;
    }

    void project(const CueLayer& layer) {
        cue_linear(layer.output, b_.attended, Widths(d_).queries, rows_, layer.output_bias, 1, b_.stream, d_.hidden);
        clock_.lap(CUE_OUTPUT);
    }

    void feed_forward(const CueLayer& layer) {
        norm(layer.mlp_norm);
        if (d_.quantized) {
            cue_quantize(b_.normed, d_.hidden, rows_, d_.hidden, b_.narrow);
            cue_gated_quantized(layer.gate_up, b_.narrow, rows_, b_.wide);
            cue_linear_quantized(layer.down, b_.wide, rows_, nullptr, 1, b_.stream, d_.hidden);
        } else {
            cue_linear(layer.gate_up, b_.normed, d_.hidden, rows_, nullptr, 0, b_.gated, d_.intermediate);
            cue_linear(layer.down, b_.gated, d_.intermediate, rows_, nullptr, 1, b_.stream, d_.hidden);
        }
        clock_.lap(CUE_MLP);
    }

    void finish(float* logits, int64_t* best) {
        norm(d_.final_norm);
        cue_linear(d_.head, b_.normed, d_.hidden, rows_, nullptr, 0, logits, d_.vocabulary);
        cue_argmax(logits, d_.vocabulary, rows_, d_.vocabulary, best);
        clock_.lap(CUE_HEAD);
    }

    const CueDecoder& d_;
    const CueStep& step_;
    int64_t rows_;
    Clock clock_;
    Scratch pieces_;
    Buffers b_;
};

}  // namespace
}  // namespace cue

extern "C" {

int64_t cue_decoder_bytes(const CueDecoder* decoder, int64_t tokens) {
    cue::Scratch counted(nullptr);
    cue::Buffers(*decoder, tokens, counted);
    return counted.used();
}

int cue_decode(const CueDecoder* decoder, const CueStep* step, void* scratch, float* logits, int64_t* best,
               double* seconds) {
    return cue::Step(*decoder, *step, scratch, seconds).run(logits, best);
}
}
