// Included by attention_kernel.h where the machine multiplies pairs of words: where these lie in a paired pool, for W
// tokens at a time, a group. Its keys fill registers with pairs, and it lies in one block.

constexpr int kGroups = 4;          // looked at together
constexpr int kGroupPairs = W / 2;  // of values

// Where some groups lie. Behind the last one it stands again: never a row that is not ours to read.
template <class P>
struct Groups {
    using T = typename P::Stored;
    int count;  // tokens
    const T* keys[kGroups];
    const T* values[kGroups];
    int64_t index[kGroups];  // of the first token's scales
};

template <class P>
CUE_APART void locate(const AttentionTask& task, int64_t begin, Groups<P>& groups) {
    using T = typename P::Stored;
    const CueKv& kv = *task.kv;
    groups.count = static_cast<int>(task.end - begin < kGroups * W ? task.end - begin : kGroups * W);
    for (int g = 0; g < kGroups; ++g) {
        const int64_t token = begin + (g * W < groups.count ? g * W : (groups.count - 1) / W * W);
        const int64_t offset = token % kv.block_size;
        const int64_t run = run_of(kv, task.table[token / kv.block_size], task.kv_head);
        groups.keys[g] = static_cast<const T*>(kv.keys) + run * kv.head_dim + 2 * offset;
        groups.values[g] = static_cast<const T*>(kv.values) + (run + offset) * kv.head_dim;
        groups.index[g] = run + offset;
        if (P::kScaled) prefetch(kv.key_scales + run + offset, W), prefetch(kv.value_scales + run + offset, W);
    }
}
