// One step of the decoder: the kernels of embedding, norm, projection, attention and feed-forward in the order of the
// layers.
#include "decoder.h"

#include <chrono>
#include <cstring>

#include "kv.h"
#include "linear.h"
#include "ops.h"
#include "threads.h"

namespace cue {
namespace {

constexpr int64_t kCacheLine = 64;

class PartTimer {
public:
    explicit PartTimer(double* seconds) : seconds_(seconds) { start_ = now(); }

    // Add the time since the previous lap to `part`.
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

// Divides scratch memory into cache-aligned pieces. Without memory, only counts the bytes.
class ScratchAllocator {
public:
    explicit ScratchAllocator(void* memory) : memory_(static_cast<char*>(memory)) {}

    void* take_bytes(int64_t count) {
        void* taken = memory_ == nullptr ? nullptr : memory_ + used_;
        used_ += (count + kCacheLine - 1) / kCacheLine * kCacheLine;
        return taken;
    }
    float* take_floats(int64_t count) {
        return static_cast<float*>(take_bytes(count * static_cast<int64_t>(sizeof(float))));
    }
    int64_t used() const { return used_; }

private:
    char* memory_;
    int64_t used_ = 0;
};

struct QkvWidths {
    explicit QkvWidths(const CueDecoder& d)
        : queries(static_cast<int64_t>(d.heads) * d.head_dim), keys(static_cast<int64_t>(d.kv_heads) * d.head_dim) {}
    int64_t queries, keys;
    int64_t qkv() const { return queries + 2 * keys; }
};

// Intermediate results of a step, each [tokens, width].
struct StepBuffers {
    StepBuffers(const CueDecoder& d, int64_t tokens, ScratchAllocator& scratch) {
        const QkvWidths widths(d);
        residual = scratch.take_floats(tokens * d.hidden);
        normed = scratch.take_floats(tokens * d.hidden);
        qkv = scratch.take_floats(tokens * widths.qkv());
        attention_out = scratch.take_floats(tokens * widths.queries);
        if (d.quantized) {
            quantized_hidden = scratch.take_bytes(cue_quantized_bytes(tokens, d.hidden));
            quantized_intermediate = scratch.take_bytes(cue_quantized_bytes(tokens, d.intermediate));
        } else {
            gated = scratch.take_floats(tokens * d.intermediate);
        }
    }
    float *residual, *normed, *qkv, *attention_out, *gated = nullptr;
    void *quantized_hidden = nullptr, *quantized_intermediate = nullptr;
};

class DecoderStep {
public:
    DecoderStep(const CueDecoder& decoder, const CueStep& step, void* scratch, double* seconds)
        : decoder_(decoder),
          step_(step),
          rows_(step.slots.count),
          timer_(seconds),
          allocator_(scratch),
          buffers_(decoder, rows_, allocator_) {}

    int run(float* logits, int64_t* argmax) {
        if (cue_embed(step_.token_ids, rows_, decoder_.embedding, decoder_.embedding_scales, decoder_.embedding_type,
                      decoder_.vocabulary, decoder_.hidden, buffers_.residual) != 0) {
            return -1;
        }
        timer_.lap(CUE_EMBED);
        for (int layer = 0; layer < decoder_.layer_count; ++layer) {
            if (!attention(decoder_.layers[layer], decoder_.pools[layer])) return -1;
            if (layer + 1 == decoder_.layer_count && !keep_logit_rows()) return step_.logit_row_count == 0 ? 0 : -1;
            project(decoder_.layers[layer]);
            feed_forward(decoder_.layers[layer]);
        }
        compute_logits(logits, argmax);
        return 0;
    }

private:
    void norm(const float* weight) {
        cue_add_rmsnorm(buffers_.residual, nullptr, weight, buffers_.normed, rows_, decoder_.hidden, decoder_.epsilon);
        timer_.lap(CUE_NORM);
    }

    bool attention(const CueLayer& layer, const CueKv& pool) {
        const QkvWidths widths(decoder_);
        norm(layer.attention_norm);
        cue_linear(layer.qkv, buffers_.normed, decoder_.hidden, rows_, layer.qkv_bias, 0, buffers_.qkv, widths.qkv());
        timer_.lap(CUE_QKV);
        if (layer.query_norm != nullptr) norm_heads(layer, widths);
        if (cue_rope_write(&pool, &step_.slots, buffers_.qkv, decoder_.heads, decoder_.cosines, decoder_.sines,
                           decoder_.positions, decoder_.rotary) != 0) {
            return false;
        }
        timer_.lap(CUE_ROPE);
        const int done = cue_attend(&pool, &step_.sequences, buffers_.qkv, widths.qkv(), buffers_.attention_out,
                                    widths.queries, decoder_.heads, decoder_.scale);
        timer_.lap(CUE_ATTENTION);
        return done == 0;
    }

    // RMSNorm of each query and key head by itself.
    void norm_heads(const CueLayer& layer, const QkvWidths& widths) {
        parallel(static_cast<int>(rows_), [&](int row) {
            float* queries = buffers_.qkv + row * widths.qkv();
            float* keys = queries + widths.queries;
            cue_add_rmsnorm(queries, nullptr, layer.query_norm, queries, decoder_.heads, decoder_.head_dim,
                            decoder_.epsilon);
            cue_add_rmsnorm(keys, nullptr, layer.key_norm, keys, decoder_.kv_heads, decoder_.head_dim,
                            decoder_.epsilon);
        });
        timer_.lap(CUE_NORM);
    }

    // Keep only the rows whose logits are wanted: nothing after the last attention needs the others. False if there are
    // none, or if the rows are not ascending and in range.
    bool keep_logit_rows() {
        const QkvWidths widths(decoder_);
        for (int32_t i = 0; i < step_.logit_row_count; ++i) {
            const int64_t row = step_.logit_rows[i];
            if (row < i || row >= rows_) return false;  // ascending: no row is overwritten before it is moved
            std::memmove(buffers_.residual + i * decoder_.hidden, buffers_.residual + row * decoder_.hidden,
                         decoder_.hidden * sizeof(float));
            std::memmove(buffers_.attention_out + i * widths.queries, buffers_.attention_out + row * widths.queries,
                         widths.queries * sizeof(float));
        }
        rows_ = step_.logit_row_count;
        return rows_ > 0;
    }

    void project(const CueLayer& layer) {
        cue_linear(layer.output, buffers_.attention_out, QkvWidths(decoder_).queries, rows_, layer.output_bias, 1,
                   buffers_.residual, decoder_.hidden);
        timer_.lap(CUE_OUTPUT);
    }

    void feed_forward(const CueLayer& layer) {
        norm(layer.mlp_norm);
        if (decoder_.quantized) {
            cue_quantize(buffers_.normed, decoder_.hidden, rows_, decoder_.hidden, buffers_.quantized_hidden);
            cue_gated_quantized(layer.gate_up, buffers_.quantized_hidden, rows_, buffers_.quantized_intermediate);
            cue_linear_quantized(layer.down, buffers_.quantized_intermediate, rows_, nullptr, 1, buffers_.residual,
                                 decoder_.hidden);
        } else {
            cue_linear(layer.gate_up, buffers_.normed, decoder_.hidden, rows_, nullptr, 0, buffers_.gated,
                       decoder_.intermediate);
            cue_linear(layer.down, buffers_.gated, decoder_.intermediate, rows_, nullptr, 1, buffers_.residual,
                       decoder_.hidden);
        }
        timer_.lap(CUE_MLP);
    }

    void compute_logits(float* logits, int64_t* argmax) {
        norm(decoder_.final_norm);
        cue_linear(decoder_.head, buffers_.normed, decoder_.hidden, rows_, nullptr, 0, logits, decoder_.vocabulary);
        cue_argmax(logits, decoder_.vocabulary, rows_, decoder_.vocabulary, argmax);
        timer_.lap(CUE_HEAD);
    }

    const CueDecoder& decoder_;
    const CueStep& step_;
    int64_t rows_;
    PartTimer timer_;
    ScratchAllocator allocator_;
    StepBuffers buffers_;
};

}  // namespace
}  // namespace cue

extern "C" {

int64_t cue_decoder_scratch_bytes(const CueDecoder* decoder, int64_t tokens) {
    cue::ScratchAllocator counted(nullptr);
    cue::StepBuffers(*decoder, tokens, counted);
    return counted.used();
}

int cue_decode(const CueDecoder* decoder, const CueStep* step, void* scratch, float* logits, int64_t* argmax,
               double* seconds) {
    return cue::DecoderStep(*decoder, *step, scratch, seconds).run(logits, argmax);
}
}
