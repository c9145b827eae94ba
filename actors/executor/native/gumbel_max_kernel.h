// Requires sample_types.h. Included by each_isa.h.

// In octaves, at least the score of each token of a run, and less than 1/10 more where its noise is high: of the noise
// -log2(-log1p(-y)) only -log2(y) is taken, and of that the exponent and, as a straight line, the mantissa of y.
CUE_APART void bounds(const float* x, const int32_t* ids, int64_t n, const Heat& heat, Key key, float* out) {
    float parts[kRun];  // y in units of 2^-32
    for (int64_t i = 0; i < n; ++i) {
        const uint32_t bits = bits_of(key, static_cast<uint32_t>(ids[i]));
        const float high = static_cast<float>(static_cast<int32_t>(bits >> 16));
        parts[i] = high * 65536.0f + (static_cast<float>(static_cast<int32_t>(bits & 0xffff)) + 0.5f);
    }
    int32_t words[kRun];
    std::memcpy(words, parts, static_cast<size_t>(n) * sizeof(float));
    for (int64_t i = 0; i < n; ++i)
        out[i] = (x[i] - heat.most) * heat.factor + (159.0f - static_cast<float>(words[i]) * 0x1p-23f);
}

// The largest bound of each kRun tokens. Without ids these are 0, 1, 2 and so on.
void race_row(const float* x, const int32_t* ids, int64_t n, const Heat& heat, Key key, float* peaks) {
    float here[kRun];
    int32_t counted[kRun];
    for (int64_t begin = 0; begin < n; begin += kRun) {
        const int64_t count = begin + kRun < n ? kRun : n - begin;
        if (ids == nullptr)
            for (int i = 0; i < kRun; ++i) counted[i] = static_cast<int32_t>(begin) + i;
        bounds(x + begin, ids == nullptr ? counted : ids + begin, count, heat, key, here);
        for (int64_t i = count; i < kRun; ++i) here[i] = -INFINITY;
        F high = load(here);
        for (int i = W; i < kRun; i += W) high = max(high, load(here + i));
        *peaks++ = largest(high);
    }
}
