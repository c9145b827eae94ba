// Requires element_types.h. Included by each_isa.h.

constexpr int kSums = 4;  // sums side by side, since each addition waits for the one before

void rmsnorm_row(float* x, const float* delta, const float* weight, float* y, int n, float epsilon) {
    F squares[kSums];
    for (F& one : squares) one = zero();
    int turn = 0;
    for (int i = 0; i < n; i += W) {
        F some = load_up_to(x + i, n - i);
        if (delta != nullptr) {
            some = add(some, load_up_to(delta + i, n - i));
            store_up_to(x + i, some, n - i);
        }
        squares[turn] = fma(some, some, squares[turn]);
        turn = (turn + 1) % kSums;
    }
    const float mean = sum(add(add(squares[0], squares[1]), add(squares[2], squares[3]))) / static_cast<float>(n);
    const F factor = set1(1.0f / std::sqrt(mean + epsilon));
    for (int i = 0; i < n; i += W)
        store_up_to(y + i, mul(mul(load_up_to(x + i, n - i), factor), load_up_to(weight + i, n - i)), n - i);
}

void silu_mul_row(const float* gate, const float* up, float* out, int n) {
    for (int i = 0; i < n; i += W) {
        const F g = load_up_to(gate + i, n - i), u = load_up_to(up + i, n - i);
        const F below = add(set1(1.0f), exp2(mul(g, set1(-kLog2E))));
        store_up_to(out + i, mul(div(g, below), u), n - i);
    }
}

template <class T>
inline void widen(const T* from, float scale, float* out, int n) {
    for (int i = 0; i < n; i += W) store_up_to(out + i, mul(load_up_to(from + i, n - i), set1(scale)), n - i);
}

void embed_row(const void* table, const float* scales, int type, int64_t id, int n, float* out) {
    const int64_t at = id * n;
    const size_t bytes = static_cast<size_t>(n) * sizeof(float);
    if (type == kFloat32) std::memcpy(out, static_cast<const float*>(table) + at, bytes);
    else if (type == kBf16) widen(static_cast<const Bf16*>(table) + at, 1.0f, out, n);
    else widen(static_cast<const int8_t*>(table) + at, scales[id], out, n);
}

// Where the first of the largest lies among the n > 0 of x, from left to right; -1 if one is not finite.
int64_t argmax_row(const float* x, int64_t n) {
    constexpr int kRun = 256;  // numbers between two looks at the maximum
    static_assert(kRun % (2 * W) == 0, "");
    float most = -INFINITY;
    int64_t run = 0;
    F poison = zero();
    for (int64_t begin = 0; begin < n; begin += kRun) {
        const int64_t end = begin + kRun < n ? begin + kRun : n;
        F high = set1(-INFINITY), other = high;
        int64_t i = begin;
        for (; i + 2 * W <= end; i += 2 * W) {
            const F a = load(x + i), b = load(x + i + W);
            high = max(high, a), other = max(other, b);
            poison = fma(a, zero(), fma(b, zero(), poison));
        }
        for (; i < end; i += W) {
            const int count = static_cast<int>(end - i < W ? end - i : W);
            const F a = load_up_to(x + i, count);
            high = max(high, choose_first(count, a, set1(-INFINITY)));
            poison = fma(a, zero(), poison);
        }
        const float here = largest(max(high, other));
        if (here > most) most = here, run = begin;
    }
    if (!(sum(poison) == 0.0f)) return -1;
    while (x[run] != most) ++run;
    return run;
}
