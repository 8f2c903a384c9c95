// The division of a backward pass among the blocks of threads of one kernel: plain integer functions, which the host's
// C++ compiler takes as well (DEVICE). The file that includes this one defines KEYS, the keys of a block.

constexpr int QUERIES = 64;  // A step takes so many queries.

struct Problem {
    int kv_heads, n_q, n_k, causal;
    const int *starts, *ends;  // The bounds of each token's document, or null.
    int heads, heads_at_once;  // The heads of K in all batches, and those that run at one time.
};

struct Work {
    int bh, block;        // The head of K over all batches, and the block of keys.
    int first, last;      // The first and the last tile of queries that see the block.
    int clear, blurred;   // The tiles among them that see all of it.
};

DEVICE int larger(int x, int y) { return x > y ? x : y; }
DEVICE int smaller(int x, int y) { return x < y ? x : y; }
DEVICE int up(int x, int y) { return (x + y - 1) / y; }

// Order heads in groups whose operands fit the L2 cache. Within a group the blocks with the most queries come first.
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
    if (key + KEYS > p.n_k) w.clear = w.last;  // Keys past the end must not add to dQ.
    return w;
}

// Return the range lower .. upper of the queries that see the key.
DEVICE void seen_by(int key, const Problem& p, int& lower, int& upper) {
    lower = upper = 0;
    if (key >= p.n_k) return;
    lower = larger(p.causal ? key - (p.n_k - p.n_q) : 0, p.starts ? p.starts[key] : 0);
    upper = p.ends ? p.ends[key] : p.n_q;
}

// Return how many blocks of keys add to a tile of queries before this one does.
DEVICE int turn_of(int block, int tile, const Problem& p) {
    return block - (p.starts ? p.starts[tile * QUERIES] / KEYS : 0);
}
