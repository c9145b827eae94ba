// Requires attention_task.h. Included by attention_kernel.h: positions of tokens in a pool of VNNI pairs. A group is W
// tokens of one block, whose keys fill a register for each pair of dimensions.

constexpr int kGroupsPerSegment = 4;        // groups per step of the running softmax
constexpr int kValuePairsPerGroup = W / 2;  // pairs of tokens

// Pointers to kGroupsPerSegment groups. Entries behind the last group repeat it, so that every pointer may be read.
template <class Dot>
struct TokenGroups {
    using T = typename Dot::Stored;
    int count;  // in tokens
    const T* keys[kGroupsPerSegment];
    const T* values[kGroupsPerSegment];
    int64_t token_index[kGroupsPerSegment];  // position of the first token in the pool, counted in tokens of one head
};

template <class Dot>
CUE_NOINLINE void locate_tokens(const AttentionTask& task, int64_t begin, TokenGroups<Dot>& groups) {
    using T = typename Dot::Stored;
    const CueKv& kv = *task.kv;
    groups.count =
        static_cast<int>(task.end - begin < kGroupsPerSegment * W ? task.end - begin : kGroupsPerSegment * W);
    for (int g = 0; g < kGroupsPerSegment; ++g) {
        const int64_t token = begin + (g * W < groups.count ? g * W : (groups.count - 1) / W * W);
        const int64_t offset = token % kv.block_size;
        const int64_t head_begin = head_tokens_begin(kv, task.table[token / kv.block_size], task.kv_head);
        groups.keys[g] = static_cast<const T*>(kv.keys) + head_begin * kv.head_dim + 2 * offset;
        groups.values[g] = static_cast<const T*>(kv.values) + (head_begin + offset) * kv.head_dim;
        groups.token_index[g] = head_begin + offset;
        if (Dot::kHasScales)
            prefetch(kv.key_scales + head_begin + offset, W), prefetch(kv.value_scales + head_begin + offset, W);
    }
}
