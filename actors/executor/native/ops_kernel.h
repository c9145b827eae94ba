// Requires element_types.h. Included by foreach_isa.h: one row of each operation in ops.h.

constexpr int kAccumulators = 4;  // independent sums, to hide the latency of addition

void rmsnorm_row(float* x, const float* delta, const float* weight, float* y, int n, float epsilon) {
    F squares[kAccumulators];
    for (F& one : squares) one = zero();
    int accumulator = 0;
    for (int i = 0; i < n; i += W) {
        F values = load_up_to(x + i, n - i);
        if (delta != nullptr) {
            values = add(values, load_up_to(delta + i, n - i));
            store_up_to(x + i, values, n - i);
        }
        squares[accumulator] = fma(values, values, squares[accumulator]);
        accumulator = (accumulator + 1) % kAccumulators;
    }
    const float mean = lane_sum(add(add(squares[0], squares[1]), add(squares[2], squares[3]))) / static_cast<float>(n);
    const F factor = broadcast(1.0f / std::sqrt(mean + epsilon));
    for (int i = 0; i < n; i += W)
        store_up_to(y + i, mul(mul(load_up_to(x + i, n - i), factor), load_up_to(weight + i, n - i)), n - i);
}

void silu_mul_row(const float* gate, const float* up, float* out, int n) {
    for (int i = 0; i < n; i += W) {
        const F g = load_up_to(gate + i, n - i), u = load_up_to(up + i, n - i);
        const F denominator = add(broadcast(1.0f), exp2(mul(g, broadcast(-kLog2E))));
        store_up_to(out + i, mul(div(g, denominator), u), n - i);
    }
}

template <class T>
inline void to_floats(const T* from, float scale, float* out, int n) {
    for (int i = 0; i < n; i += W) store_up_to(out + i, mul(load_up_to(from + i, n - i), broadcast(scale)), n - i);
}

void embed_row(const void* table, const float* scales, int type, int64_t id, int n, float* out) {
    const int64_t at = id * n;
    const size_t bytes = static_cast<size_t>(n) * sizeof(float);
    if (type == kFloat32) std::memcpy(out, static_cast<const float*>(table) + at, bytes);
    else if (type == kBf16) to_floats(static_cast<const Bf16*>(table) + at, 1.0f, out, n);
    else to_floats(static_cast<const int8_t*>(table) + at, scales[id], out, n);
}

// The first position of the largest of n > 0 values, or -1 if one is not finite.
int64_t argmax_row(const float* x, int64_t n) {
    constexpr int kBlock = 256;  // values per comparison with the maximum so far
    static_assert(kBlock % (2 * W) == 0, "");
    float max_so_far = -INFINITY;
    int64_t best_block = 0;
    F nonfinite = zero();
    for (int64_t begin = 0; begin < n; begin += kBlock) {
        const int64_t end = begin + kBlock < n ? begin + kBlock : n;
        F high = broadcast(-INFINITY), other = high;
        int64_t i = begin;
        for (; i + 2 * W <= end; i += 2 * W) {
            const F a = load(x + i), b = load(x + i + W);
            high = max(high, a), other = max(other, b);
            nonfinite = fma(a, zero(), fma(b, zero(), nonfinite));
        }
        for (; i < end; i += W) {
            const int count = static_cast<int>(end - i < W ? end - i : W);
            const F a = load_up_to(x + i, count);
            high = max(high, blend_first(count, a, broadcast(-INFINITY)));
            nonfinite = fma(a, zero(), nonfinite);
        }
        const float block_max = lane_max(max(high, other));
        if (block_max > max_so_far) max_so_far = block_max, best_block = begin;
    }
    if (!(lane_sum(nonfinite) == 0.0f)) return -1;
    while (x[best_block] != max_so_far) ++best_block;
    return best_block;
}
