// Functions that are the same for every register size.

constexpr float kLog2E = 1.44269504088896341f;

// 2^x to about two units in the last place; exactly 0 below 2^-126 and for -inf; NaN for NaN.
inline F exp2(F x) {
    // Clamp to a range in which n and f are exact; beyond it the result is 0 or inf anyway. The constant is the first
    // operand: NaN in x passes.
    x = max(broadcast(-200.0f), x);
    const F n = round(x), f = sub(x, n);  // |f| <= 1/2
    // Taylor series of 2^f: the first omitted term is at most 1.2e-7.
    F y = broadcast(1.5403530e-4f);
    y = fma(y, f, broadcast(1.3333558e-3f));
    y = fma(y, f, broadcast(9.6181291e-3f));
    y = fma(y, f, broadcast(5.5504109e-2f));
    y = fma(y, f, broadcast(2.4022651e-1f));
    y = fma(y, f, broadcast(6.9314718e-1f));
    y = fma(y, f, broadcast(1.0f));
    return scale_by_power(y, n);
}

inline float exp2_scalar(float x) { return first_lane(exp2(broadcast(x))); }

// Load or store min(n, W) values; full registers take the fast path.
template <class T>
inline F load_up_to(const T* p, int n) {
    return n >= W ? load(p) : load_partial(p, n);
}
inline void store_up_to(float* p, F a, int n) {
    if (n >= W) store(p, a);
    else store_partial(p, a, n);
}
template <class T>
inline void store_up_to(T* p, F a, int n) {
    if (n >= W) return store(p, a);
    T copy[W];
    store(copy, a);
    std::memcpy(p, copy, static_cast<size_t>(n) * sizeof(T));
}
