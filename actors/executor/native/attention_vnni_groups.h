// Included by attention_kernel.h where the machine multiplies pairs of words: where these lie in a paired pool, for W
// tokens at a time, a group. Its keys fill registers with pairs, and it lies in one block.

constexpr int kGroupsPerSegment = 4;          // looked at together
constexpr int kValuePairsPerGroup = W / 2;  // of values

// Where some groups lie. Behind the last one it stands again: never a row that is not ours to read.
template <class Dot>
struct TokenGroups {
    using T = typename Dot::Stored;
    int count;  // tokens
    const T* keys[kGroupsPerSegment];
    const T* values[kGroupsPerSegment];
    int64_t token_index[kGroupsPerSegment];  // of the first token's scales
};

template <class Dot>
CUE_NOINLINE void locate_tokens(const AttentionTask& task, int64_t begin, TokenGroups<Dot>& groups) {
    using T = typename Dot::Stored;
    const CueKv& kv = *task.kv;
    groups.count = static_cast<int>(task.end - begin < kGroupsPerSegment * W ? task.end - begin : kGroupsPerSegment * W);
    for (int g = 0; g < kGroupsPerSegment; ++g) {
        const int64_t token = begin + (g * W < groups.count ? g * W : (groups.count - 1) / W * W);
        const int64_t offset = token % kv.block_size;
        const int64_t head_begin = head_tokens_begin(kv, task.table[token / kv.block_size], task.kv_head);
        groups.keys[g] = static_cast<const T*>(kv.keys) + head_begin * kv.head_dim + 2 * offset;
        groups.values[g] = static_cast<const T*>(kv.values) + (head_begin + offset) * kv.head_dim;
        groups.token_index[g] = head_begin + offset;
        if (Dot::kHasScales) prefetch(kv.key_scales + head_begin + offset, W), prefetch(kv.value_scales + head_begin + offset, W);
    }
}
