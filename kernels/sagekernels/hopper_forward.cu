// The forward of the recipes `fine` and `scores` on Hopper: INT8 Q K^T with one scale per token, P V in 16 bits.
//
// A block of threads is persistent. One warp fetches (TMA), CONSUMERS warpgroups own 64 queries each, and for each of
// them a warp quantizes the queries of its next block meanwhile. Keys are visited from the last to the first. A
// consumer issues the scores of its next tile of keys and P V of this one, and runs the softmax of the next tile under
// P V. At a block's end the next tile is the next block's first one. The exponentials do not wait for the maximum of
// their tile: they are relative to an old maximum, and are computed again in the rare case that something would
// overflow. Exponents are in log2 units.
//
// Macros: HEAD_DIM (64, 128), BLOCK_N (keys a tile), CONSUMERS, STAGES, CAUSAL, PACKED, FP16 (values are float16),
// SINKS (each row has one more score, whose value is zero), SHARED_BYTES.

#include "hopper.cuh"
#include "codes.cuh"

constexpr int BLOCK_M = 64 * CONSUMERS, D = HEAD_DIM, HALVES = D / 64;
constexpr int THREADS = 128 * (CONSUMERS + 1);
constexpr int CONSUMER_REGISTERS = CONSUMERS == 3 ? 160 : 232, PRODUCER_REGISTERS = CONSUMERS == 3 ? 32 : 40;
// A block has the registers that it started with. It would wait for more in vain.
static_assert(128 * (PRODUCER_REGISTERS + CONSUMERS * CONSUMER_REGISTERS) <= 65536 / THREADS / 8 * 8 * THREADS);
static_assert(STAGES - 2 >= (BLOCK_M - 64 + BLOCK_N - 1) / BLOCK_N);  // See `part`.
constexpr int Q_BYTES = 64 * D * 2, K_BYTES = BLOCK_N * D, V_BYTES = BLOCK_N * D * 2, SCALE_BYTES = BLOCK_N * 4;
// At 128 dimensions the codes of a row take the place of its first half.
constexpr int CODES_AT = D == 128 ? 0 : Q_BYTES, Q_ROOM = Q_BYTES + (D == 128 ? 0 : 64 * D);
// It is finite, so that a row that has seen no key yet needs no special case.
constexpr float LOWEST = -1e30f;
// The limit of a thread's probabilities of a tile relative to an old maximum.
constexpr float LIMIT = FP16 ? 0x1p15f : 0x1p64f;
constexpr float LN2 = 0.6931471805599453f, LOG2E = 1.4426950408889634f;

// A warpgroup's part of a block of queries, as the fetching warp works it out.
struct alignas(16) Part {
    int head, batch, row;  // The first of 64 rows.
    // Key tiles: those not looked at, then last .. lo, and those between that need no mask.
    int skipped, last, clear_to, clear_from, lo;
};

struct Shared {
    // The queries of the next block, and their codes.
    alignas(1024) unsigned char q[CONSUMERS][Q_ROOM];
    alignas(1024) unsigned char k[STAGES][K_BYTES];
    alignas(1024) unsigned char v[STAGES][V_BYTES];
    alignas(16) float k_scale[STAGES][BLOCK_N];
    float q_scale[CONSUMERS][64];  // The unit is the log2 unit of a score.
    // One part comes with q, and the other one belongs to the block before.
    Part part[2][CONSUMERS];
    u64 q_full[CONSUMERS], q_coded[CONSUMERS], q_free[CONSUMERS];
    u64 k_full[STAGES], v_full[STAGES], free[STAGES];
};
static_assert(sizeof(Shared) == SHARED_BYTES);

// ---- Arithmetic

DEVICE int ceil_div(int a, int b) { return (a + b - 1) / b; }
// The compiler sees too that the value is uniform.
DEVICE int uniform(int x) { return __shfl_sync(~0u, x, 0); }
template <class F> DEVICE float row_reduce(float x, F f) {
    x = f(x, __shfl_xor_sync(~0u, x, 1));
    return f(x, __shfl_xor_sync(~0u, x, 2));
}

// ---- What a block of queries sees

struct Work {
    // kv = batch * kv_heads + kv_head; the key tiles are lo .. hi - 1.
    int head, batch, kv_head, kv, block, lo, hi;
};

struct Problem {
    // PACKED: [n_q], the first key of a token's document, and one past its last key.
    const int *starts, *ends;
    int heads, kv_heads, all_heads, n_q, n_k, m_blocks, heads_per_group;

    // Groups of heads have K and V that fit the L2 cache. In each group the longest blocks come first.
    DEVICE Work decode(int tile) const {
        Work w;
        int group = tile / (m_blocks * heads_per_group), rest = tile - group * m_blocks * heads_per_group;
        int width = least(heads_per_group, all_heads - group * heads_per_group);
        w.head = group * heads_per_group + rest % width;
        w.block = m_blocks - 1 - rest / width;
        w.batch = w.head / heads;
        w.kv_head = w.head % heads / (heads / kv_heads);
        w.kv = w.batch * kv_heads + w.kv_head;
        w.lo = 0;
        int end = n_k;
        if (PACKED) {
            int last = least((w.block + 1) * BLOCK_M, n_q) - 1;
            w.lo = starts[w.block * BLOCK_M] / BLOCK_N;
            end = CAUSAL ? least(ends[last], last + 1) : ends[last];
        } else if (CAUSAL) {
            end = least((w.block + 1) * BLOCK_M + n_k - n_q, n_k);
        }
        w.hi = ceil_div(end, BLOCK_N);
        return w;
    }

    DEVICE Part part(const Work &w, int wg) const {
        // The tiles from .. end are seen whole.
        int row = w.block * BLOCK_M + wg * 64, first, last, from = 0, end = n_k;
        if (PACKED) {
            from = ceil_div(starts[least(row + 63, n_q - 1)], BLOCK_N);
            end = ends[least(row, n_q - 1)];
            if (CAUSAL) end = least(end, row + 1);
        } else if (CAUSAL) {
            end = least(n_k, row + n_k - n_q + 1);
        }
        bounds(row + 63, first, last);
        // With documents no tile is skipped. Tiles that are given back before the last P V is done may not fill the
        // pipeline.
        last = PACKED ? w.hi - 1 : last / BLOCK_N;
        int clear_to = most(most(end / BLOCK_N, from), w.lo);
        return {w.head, w.batch, row, w.hi - 1 - last, last, clear_to, most(from, w.lo), w.lo};
    }

    // One row sees the keys first .. last.
    DEVICE void bounds(int row, int &first, int &last) const {
        first = 0;
        last = CAUSAL ? least(row + n_k - n_q, n_k - 1) : n_k - 1;
        if (PACKED) {
            row = least(row, n_q - 1);
            first = starts[row];
            last = least(last, ends[row] - 1);
        }
    }
};

// The place in the pipeline of tiles, and the parity of the barriers there.
struct Ring {
    int stage;
    u32 parity;
    DEVICE Ring next() const { return stage + 1 == STAGES ? Ring{0, parity ^ 1} : Ring{stage + 1, parity}; }
};

// ---- The fetching warp

DEVICE void produce(
    Shared &shared, const TensorMap &q_map, const TensorMap &k_map, const TensorMap &v_map, const float *k_scale,
    const Problem &problem, int nk_padded, int tiles, int *taken) {
    u32 free = 1;
    auto fetch_queries = [&](int tile) {
        Work w = problem.decode(least(tile, tiles - 1));
#pragma unroll 1
        for (int wg = 0; wg < CONSUMERS; wg++) {
            Part part = problem.part(w, wg);
            if (tile >= tiles) part.skipped = -1;
            wait(shared.q_free[wg], free);
            shared.part[free ^ 1][wg] = part;
            arrive_expect(shared.q_full[wg], tile < tiles ? Q_BYTES : 0);
            for (int half = 0; half < HALVES && tile < tiles; half++)
                copy_in(shared.q[wg] + half * Q_BYTES / HALVES, q_map, half * 64, w.head % problem.heads,
                     w.block * BLOCK_M + wg * 64, w.batch, shared.q_full[wg]);
        }
        free ^= 1;
    };
    Ring at{0, 0};
    int tile = blockIdx.x;
    fetch_queries(tile);
    while (tile < tiles) {
        Work w = problem.decode(tile);
        tile = gridDim.x + atomicAdd(taken, 1);
        // The next block's queries come behind as many tiles of keys as there is room for, because they have to be
        // quantized in time.
        const int behind = most(w.hi - STAGES, w.lo);
#pragma unroll 1
        for (int j = w.hi - 1; j >= w.lo; j--, at = at.next()) {
            int stage = at.stage;
            // K needs no barrier, because the scores of the tile that was here are done. A consumer gives back a tile
            // behind the scores of its next one. It gives back a block's queries, which fetch_queries waited for,
            // behind the scores of its first tile.
            arrive_expect(shared.k_full[stage], K_BYTES + SCALE_BYTES);
            copy_in(shared.k[stage], k_map, 0, j * BLOCK_N, w.kv, shared.k_full[stage]);
            copy_in(shared.k_scale[stage], k_scale + (long long)w.kv * nk_padded + j * BLOCK_N, SCALE_BYTES,
                 shared.k_full[stage]);
            wait(shared.free[stage], at.parity ^ 1);
            arrive_expect(shared.v_full[stage], V_BYTES);
            for (int half = 0; half < HALVES; half++)
                copy_in(shared.v[stage] + half * V_BYTES / HALVES, v_map, half * 64, w.kv_head, j * BLOCK_N, w.batch,
                     shared.v_full[stage]);
            if (j == behind) fetch_queries(tile);
        }
    }
}

// ---- The quantizing warp of a consumer: a lane takes a row

DEVICE void quantize(
    Shared &shared, const TensorMap &codes_map, float *scales, const Problem &problem, float factor, int wg) {
    const int lane = threadIdx.x % 32;
    for (u32 now = 0;; now ^= 1) {
        wait(shared.q_full[wg], now);
        const Part &part = shared.part[now][wg];
        bool more = part.skipped >= 0;
#pragma unroll 1
        for (int row = lane; row < 64 && more; row += 32) {
            // 16-byte pieces, 8 values or 16 codes, lie as the copies of boxes swizzle them. Beside products a load
            // takes 300 cycles and more, so several are on their way. If the loop were unrolled, the compiler would
            // wait for one after the other.
            u32 from = address(shared.q[wg]) + row * 128 ^ row % 8 << 4;
            u32 to = address(shared.q[wg]) + CODES_AT + row * D ^ (D == 128 ? row % 8 : row / 2 % 4) << 4;
            auto piece = [&](int i) { return load_shared((from ^ i % 8 << 4) + i / 8 * (Q_BYTES / HALVES)); };
            u32 pair = 0;  // A pair of the largest magnitudes.
#pragma unroll 1
            for (int i = 0; i < D / 8; i += 4) {
                float4 x[4] = {piece(i), piece(i + 1), piece(i + 2), piece(i + 3)};
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    const float words[4] = {x[j].x, x[j].y, x[j].z, x[j].w};
#pragma unroll
                    for (int e = 0; e < 4; e++) pair = larger_halves(pair, __float_as_int(words[e]) & 0x7FFF7FFF);
                }
            }
            float4 next[2] = {piece(0), piece(1)};
            float low, high;
            unpack(pair, low, high);
            int largest = most(magnitude(low), magnitude(high));
            float scale = __int_as_float(largest) / 127.0f, inverse = inverse_scale(largest);
            if (part.row + row < problem.n_q) scales[(long long)part.head * problem.n_q + part.row + row] = scale;
            scale *= factor;
            shared.q_scale[wg][row] = scale == 0.0f ? 1.0f : scale;  // Zero times a masked -inf would be NaN.
#pragma unroll 1
            for (int i = 0; i < D / 16; i++) {
                const float words[8] = {next[0].x, next[0].y, next[0].z, next[0].w,
                                        next[1].x, next[1].y, next[1].z, next[1].w};
                const int ahead = least(2 * i + 2, D / 8 - 2);
                next[0] = piece(ahead), next[1] = piece(ahead + 1);
                float codes[4];
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    float y[4];
                    unpack(__float_as_int(words[2 * e]), y[0], y[1]);
                    unpack(__float_as_int(words[2 * e + 1]), y[2], y[3]);
                    codes[e] = __int_as_float(four_codes(y, inverse));
                }
                store_shared(to ^ i << 4, codes);
            }
        }
        fence_async();
        __syncwarp();
        if (lane == 0 && more) {
            copy_out(codes_map, 0, part.row, part.head - part.batch * problem.heads, part.batch,
                     shared.q[wg] + CODES_AT);
            copies_commit();
        }
        if (lane == 0) arrive(shared.q_coded[wg]);
        if (!more) return;
        if (lane == 0) copies_wait_read(), arrive(shared.q_free[wg]);
    }
}

// ---- A consumer: 64 queries
//
// A thread owns rows lane / 4 and lane / 4 + 8 of its warp's 16. Of every 8 keys, or dimensions of O, it owns columns 2
// c and 2 c + 1 with c = lane % 4: x[4 i + 2 r + b] is row r, column 8 i + 2 c + b.

struct Rows {  // The rows of a block that is done.
    u32 *out;
    int words, left;  // The distance from row to row, and the rows from the first one on.
    float inverse[2];
};

struct Consumer {
    Shared &shared;
    const Problem &problem;
    int wg, c, row;
    u32 q[D / 8];            // INT8 codes, operand A of Q K^T.
    float q_scale[2];        // The unit is log2 units of a score.
    u32 s[BLOCK_N / 2];      // INT32 scores, then floats.
    u32 p[BLOCK_N / 4];      // 16 bits, operand A of P V.
    float o[D / 2];
    // The reference of the exponentials in log2 units, and this thread's part of the row sum.
    float m[2], l[2];
    float4 k_scale[BLOCK_N / 16];

    // Wait for the next block of queries and load its codes. Return how many key tiles are to be skipped, or -1 if
    // there are no more blocks.
    DEVICE int start(u32 parity) {
        wait(shared.q_coded[wg], parity);
        const Part &part = shared.part[parity][wg];
        int skipped = uniform(part.skipped), lane = threadIdx.x % 32, first = threadIdx.x / 32 % 4 * 16;
        if (skipped < 0) return skipped;
        row = part.row + first + lane / 4;
        q_scale[0] = shared.q_scale[wg][first + lane / 4];
        q_scale[1] = shared.q_scale[wg][first + lane / 4 + 8];
        int at = first + lane % 16, swizzle = D == 128 ? at % 8 : at / 2 % 4;
#pragma unroll
        for (int i = 0; i < D / 32; i++)
            load_matrices(q + 4 * i, address(shared.q[wg]) + CODES_AT + at * D + ((2 * i + lane / 16 ^ swizzle) << 4));
        return skipped;
    }

    // Give back the first tiles of a block of queries if only the warpgroups after this one see them.
    DEVICE Ring skip(Ring at, int tiles) {
#pragma unroll 1
        for (; tiles > 0; tiles--, at = at.next()) {
            wait(shared.k_full[at.stage], at.parity);
            wait(shared.v_full[at.stage], at.parity);
            __syncwarp();
            if (threadIdx.x % 32 == 0) arrive(shared.free[at.stage]);
        }
        return at;
    }

    DEVICE void issue_scores(int stage) {
        load_scales(stage);
        pin(s);
        wgmma_fence();
        u64 k = operand<D>(shared.k[stage]);
#pragma unroll
        for (int i = 0; i < D / 32; i++) multiply_codes(s, q + 4 * i, k + 2 * i, i > 0);
        wgmma_commit();
    }

    DEVICE void issue_values(int stage) {
        pin(o);
        wgmma_fence();
        u64 v = operand(shared.v[stage], V_BYTES / HALVES);
#pragma unroll
        for (int i = 0; i < BLOCK_N / 16; i++) multiply(o, p + 4 * i, v + 128 * i);
        wgmma_commit();
    }

    // Compute the scores as floats, -inf where masked, without the scale of the query.
    template <bool MASKED> DEVICE float scaled(int i, int e, const int *first, const int *last) {
        const float4 &four = k_scale[i / 2];
        float t = __int2float_rn(s[4 * i + e]) * (i % 2 ? (e % 2 ? four.w : four.z) : (e % 2 ? four.y : four.x));
        if (MASKED) {
            int key = 8 * i + e % 2, r = e / 2;
            bool seen = key <= last[r];
            if (PACKED) seen = seen && key >= first[r];
            if (!seen) t = __int_as_float(0xFF800000);
        }
        return t;
    }

    // Return the keys that this thread's rows see, counted from its own first key of the tile.
    DEVICE void bounds(int key0, int *first, int *last) {
#pragma unroll
        for (int r = 0; r < 2; r++) {
            problem.bounds(row + 8 * r, first[r], last[r]);
            first[r] -= key0 + 2 * c, last[r] -= key0 + 2 * c;
        }
    }

    // Compute probabilities relative to the maximum so far. O has to be multiplied by alpha.
    DEVICE void exact_softmax(int key0, float *alpha) {
        float top[2] = {LOWEST, LOWEST};
        int first[2], last[2];
        bounds(key0, first, last);
#pragma unroll
        for (int i = 0; i < BLOCK_N / 2; i++) {
            float t = scaled<true>(i / 4, i % 4, first, last);
            top[i / 2 % 2] = fmaxf(top[i / 2 % 2], t);
            s[i] = __float_as_int(t);
        }
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float old = m[r];
            m[r] = fmaxf(old, row_reduce(top[r], [](float a, float b) { return fmaxf(a, b); }) * q_scale[r]);
            alpha[r] = power2(old - m[r]);
            l[r] *= alpha[r];
        }
#pragma unroll
        for (int i = 0; i < BLOCK_N / 2; i++) {
            int r = i / 2 % 2;
            float x = power2(__int_as_float(s[i]) * q_scale[r] - m[r]);
            l[r] += x;
            s[i] = __float_as_int(x);
        }
    }

    // Compute probabilities relative to an old maximum, which is as good while nothing overflows. Their sum shows an
    // overflow: the probabilities then have to be computed again, and true is returned. Nothing waits for the maximum,
    // and lanes do not meet.
    template <bool MASKED> DEVICE bool softmax(int key0) {
        float sum[2] = {0.0f, 0.0f};
        int first[2], last[2];
        if (MASKED) bounds(key0, first, last);
#pragma unroll
        for (int i = 0; i < BLOCK_N / 2; i += 2) {
            int r = i / 2 % 2;
            float x = scaled<MASKED>(i / 4, i % 4, first, last) * q_scale[r] - m[r];
            float y = scaled<MASKED>(i / 4, i % 4 + 1, first, last) * q_scale[r] - m[r];
            x = power2(x), y = power2(y);
            sum[r] += x;
            sum[r] += y;
            s[i] = __float_as_int(x), s[i + 1] = __float_as_int(y);
        }
        bool again = __any_sync(~0u, !(sum[0] + sum[1] <= LIMIT));
        if (!again) l[0] += sum[0], l[1] += sum[1];
        return again;
    }

    // Compute this warp's scores once more, by the instructions of one warp. This is rare.
    DEVICE void scores_again(int stage) {
        const unsigned char *keys = shared.k[stage] + threadIdx.x % 32 / 4 * D;
        // These bits of the row move the 16-byte pieces of a row of D bytes.
        constexpr int SWIZZLE = D / 16 - 1;
        int row = D == 128 ? threadIdx.x % 32 / 4 : threadIdx.x % 32 / 8;
#pragma unroll
        for (int i = 0; i < BLOCK_N / 8; i++) {
            s[4 * i] = s[4 * i + 1] = s[4 * i + 2] = s[4 * i + 3] = 0;
#pragma unroll
            for (int j = 0; j < D / 32; j++) {
                u32 low = *(const u32 *)(keys + 8 * i * D + ((2 * j) ^ (row & SWIZZLE)) * 16 + 4 * c);
                u32 high = *(const u32 *)(keys + 8 * i * D + ((2 * j + 1) ^ (row & SWIZZLE)) * 16 + 4 * c);
                multiply_in_warp(s + 4 * i, q + 4 * j, low, high);
            }
        }
        load_scales(stage);
    }

    DEVICE void load_scales(int stage) {
#pragma unroll
        for (int i = 0; i < BLOCK_N / 16; i++) k_scale[i] = ((const float4 *)shared.k_scale[stage])[4 * i + c];
    }

    DEVICE void narrow() {
#pragma unroll
        for (int i = 0; i < BLOCK_N / 4; i++) p[i] = pack(__int_as_float(s[2 * i]), __int_as_float(s[2 * i + 1]));
    }

    // Compute P V of the tile in `stage` and, under it, scores and softmax of the next tile, whose first key is key0.
    // EXACT where rows may have seen no key yet.
    template <bool MASKED, bool EXACT> DEVICE void step(Ring &at, int key0) {
        Ring next = at.next();
        wait(shared.v_full[at.stage], at.parity);
        wait(shared.k_full[next.stage], next.parity);
        issue_scores(next.stage);
        issue_values(at.stage);
        wgmma_wait<1>();
        pin(s);
        if (__builtin_expect(EXACT || softmax<MASKED>(key0), EXACT)) {
            float alpha[2];
            if (!EXACT) scores_again(next.stage);
            exact_softmax(key0, alpha);
            wgmma_wait<0>();
            pin(o);
#pragma unroll
            for (int i = 0; i < D / 2; i++) o[i] *= alpha[i / 2 % 2];
        }
        wgmma_wait<0>();
        pin(o);
        pin(p);
        if (threadIdx.x % 32 == 0) arrive(shared.free[at.stage]);
        at = next;
        narrow();
    }

    // Write the log-sum-exp of this thread's rows. Return where their O goes and its factor.
    DEVICE Rows finish(const Part &part, const float *sinks, u32 *out, float *lse) {
        int head = uniform(part.head), batch = uniform(part.batch);
        Rows rows;
        rows.words = problem.heads * D / 2, rows.left = problem.n_q - row;
        rows.out = out + ((long long)batch * problem.n_q + row) * rows.words + (head - batch * problem.heads) * (D / 2) +
                   c % 2 * 4 + c / 2 * 2;
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float sum = row_reduce(l[r], [](float a, float b) { return a + b; }), all = m[r] + logarithm2(sum);
            const long long at = (long long)head * problem.n_q + row + 8 * r;
            rows.inverse[r] = 1.0f / sum;
            if (SINKS && 8 * r < rows.left) {
                const float own = sinks[at] * LOG2E, larger = fmaxf(all, own);
                const float both = larger + logarithm2(power2(all - larger) + power2(own - larger));
                rows.inverse[r] *= power2(all - both);
                all = both;
            }
            if (8 * r < rows.left && c == 0) lse[at] = all * LN2;
        }
        return rows;
    }

    // Lanes exchange pairs of columns, to store four at once.
    DEVICE void store(const Rows &rows) {
#pragma unroll
        for (int r = 0; r < 2; r++) {
            u32 *to = rows.out + 8 * r * rows.words;
#pragma unroll
            for (int i = 0; i < D / 8; i += 2) {
                u32 even = pack(o[4 * i + 2 * r] * rows.inverse[r], o[4 * i + 2 * r + 1] * rows.inverse[r]);
                u32 odd = pack(o[4 * i + 4 + 2 * r] * rows.inverse[r], o[4 * i + 5 + 2 * r] * rows.inverse[r]);
                u32 other = __shfl_xor_sync(~0u, c % 2 ? even : odd, 1);
                uint2 four = c % 2 ? make_uint2(other, odd) : make_uint2(even, other);
                if (8 * r < rows.left) *(uint2 *)(to + 4 * i) = four;
            }
        }
    }

    // Compute the first tile of a block of queries, for which no maximum is known.
    DEVICE void first_softmax(const Part &part) {
        float alpha[2];
        m[0] = m[1] = LOWEST;
        l[0] = l[1] = 0.0f;
        exact_softmax(uniform(part.last) * BLOCK_N, alpha);
    }

    DEVICE void begin() {
        narrow();
#pragma unroll
        for (int i = 0; i < D / 2; i++) o[i] = 0.0f;
    }
};

// q, v and o are [B, N, heads, D] in 16 bits (maps: D, heads, N, B; boxes of 64 dimensions and of 64 queries or BLOCK_N
// keys). K has codes [B * kv_heads, n_k, D], and scales [B * kv_heads, nk_padded] in the order of quantize_keys.cu.
// sinks [B * heads, n_q] are in the unit of lse. The results are also Q's codes [B, heads, n_q, D] (a map too), and q_scales and lse [B * heads, n_q]. factor is the scale
// of the scores times log2 e. taken is zero at the start; it counts the blocks of queries that are taken beyond the
// first of each block of threads.
extern "C" __global__ void __launch_bounds__(THREADS, 1) forward(
    const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap k_map,
    const __grid_constant__ TensorMap v_map, const __grid_constant__ TensorMap codes_map, const float *k_scale,
    const int *starts, const int *ends, const float *sinks, float *q_scales, u32 *o, float *lse, float factor,
    int heads, int kv_heads, int all_heads, int n_q, int n_k, int nk_padded, int m_blocks, int heads_per_group, int tiles, int *taken) {
    Shared &shared = shared_memory<Shared>();
    Problem problem{starts, ends, heads, kv_heads, all_heads, n_q, n_k, m_blocks, heads_per_group};
    if (threadIdx.x == 0) {
        for (int i = 0; i < CONSUMERS; i++) {
            barrier_init(shared.q_full[i], 1), barrier_init(shared.q_coded[i], 1);
            barrier_init(shared.q_free[i], 4 + 1);
        }
        for (int i = 0; i < STAGES; i++) {
            barrier_init(shared.k_full[i], 1), barrier_init(shared.v_full[i], 1);
            barrier_init(shared.free[i], 4 * CONSUMERS);
        }
        fence_barriers();
    }
    __syncthreads();

    if (threadIdx.x < 128) {
        fewer_registers<PRODUCER_REGISTERS>();
        const int warp = uniform(threadIdx.x / 32);
        if (threadIdx.x == 0) produce(shared, q_map, k_map, v_map, k_scale, problem, nk_padded, tiles, taken);
        if (1 <= warp && warp <= CONSUMERS) quantize(shared, codes_map, q_scales, problem, factor, warp - 1);
        return;
    }
    more_registers<CONSUMER_REGISTERS>();
    Consumer mine{shared, problem};
    mine.wg = __shfl_sync(~0u, threadIdx.x / 128 - 1, 0);
    mine.c = threadIdx.x % 4;
    // One block of queries comes after the other. Scores and softmax of the first tile of the next block are computed
    // like those of any tile, beside P V of the tile before.
    Ring at = mine.skip(Ring{0, 0}, mine.start(0));
    wait(shared.k_full[at.stage], at.parity);
    mine.issue_scores(at.stage);
    wgmma_wait<0>();
    pin(mine.s);
    if (threadIdx.x % 32 == 0) arrive(shared.q_free[mine.wg]);
    mine.first_softmax(shared.part[0][mine.wg]);
    mine.begin();
    for (u32 now = 0;; now ^= 1) {
        const Part &part = shared.part[now][mine.wg];
        int j = uniform(part.last) - 1, clear_to = uniform(part.clear_to);
        int clear_from = PACKED ? uniform(part.clear_from) : 0, lo = PACKED ? uniform(part.lo) : 0;
        for (; j >= clear_to; j--) mine.step<true, true>(at, j * BLOCK_N);
        for (; j >= clear_from; j--) mine.step<false, false>(at, j * BLOCK_N);
        if (PACKED)
            for (; j >= lo; j--) mine.step<true, false>(at, j * BLOCK_N);

        const Rows rows = mine.finish(part, sinks, o, lse);
        const int skipped = mine.start(now ^ 1);
        Ring next = at.next();
        if (skipped >= 0) {
            next = mine.skip(next, skipped);
            wait(shared.k_full[next.stage], next.parity);
        }
        wait(shared.v_full[at.stage], at.parity);
        mine.issue_scores(next.stage);  // After the last block, the scores are those of arbitrary codes.
        mine.issue_values(at.stage);
        wgmma_wait<1>();
        pin(mine.s);
        // Queries are not given back before the product, because an arrival may overtake loads whose values nobody has
        // used.
        if (threadIdx.x % 32 == 0 && skipped >= 0) arrive(shared.q_free[mine.wg]);
        mine.first_softmax(shared.part[now ^ 1][mine.wg]);
        wgmma_wait<0>();
        pin(mine.o);
        pin(mine.p);
        if (threadIdx.x % 32 == 0) arrive(shared.free[at.stage]);
        mine.store(rows);
        if (skipped < 0) return;
        mine.begin();
        at = next;
    }
}
