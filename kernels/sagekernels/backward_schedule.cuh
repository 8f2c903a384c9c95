// Which block of threads does what in a backward pass of one kernel: plain integer functions, which the host's C++
// compiler takes as well (DEVICE). KEYS of a block are defined before.

constexpr int QUERIES = 64;  // of a step

struct Problem {
    int kv_heads, n_q, n_k, causal;
    const int *starts, *ends;  // document of each token, or null
    int heads, heads_at_once;  // heads of K in all batches; those that run at one time
};

struct Work {
    int bh, block;        // head of K over all batches, block of keys
    int first, last;      // tiles of queries that see the block
    int clear, blurred;   // those of them that see all of it
};

DEVICE int larger(int x, int y) { return x > y ? x : y; }
DEVICE int smaller(int x, int y) { return x < y ? x : y; }
DEVICE int up(int x, int y) { return (x + y - 1) / y; }

// Heads in groups whose operands fit the L2 cache; within a group the blocks with the most queries come first.
DEVICE Work work_of(int program, const Problem& p) {
    const int per_group = up(p.n_k, KEYS) * p.heads_at_once, first_head = program / per_group * p.heads_at_once;
    const int in_group = smaller(p.heads_at_once, p.heads - first_head), rest = program % per_group;
    Work w = {first_head + rest % in_group, rest / in_group};
    const int key = w.block * KEYS, last_key = smaller(key + KEYS, p.n_k) - 1, offset = p.n_k - p.n_q;
    w.first = p.causal ? larger(key - offset, 0) / QUERIES : p.starts ? p.starts[key] / QUERIES : 0;
    w.last = p.ends ? up(p.ends[last_key], QUERIES) : up(p.n_q, QUERIES);
    w.clear = p.causal ? up(larger(key + KEYS - 1 - offset, 0), QUERIES) : 0;
    w.blurred = p.starts ? p.ends[key] / QUERIES : w.last;
    if (p.starts) w.clear = larger(w.clear, up(p.starts[last_key], QUERIES));
    if (key + KEYS > p.n_k) w.clear = w.last;  // keys past the end must not add to dQ
    return w;
}

// The key is seen by queries lower .. upper.
DEVICE void seen_by(int key, const Problem& p, int& lower, int& upper) {
    lower = upper = 0;
    if (key >= p.n_k) return;
    lower = larger(p.causal ? key - (p.n_k - p.n_q) : 0, p.starts ? p.starts[key] : 0);
    upper = p.ends ? p.ends[key] : p.n_q;
}

// How many blocks of keys add to a tile of queries before this one does.
DEVICE int turn_of(int block, int tile, const Problem& p) {
    return block - (p.starts ? p.starts[tile * QUERIES] / KEYS : 0);
}
