// Hopper forward of the recipes `fine` and `scores`: INT8 Q K^T with one scale per token, P V in 16 bits.
//
// A block of threads is persistent: one warp fetches (TMA), CONSUMERS warpgroups own 64 queries each. Keys are visited
// from the last to the first. A consumer issues the scores of its next tile of keys and P V of this one, and runs the
// softmax of the next tile under P V. The exponentials do not wait for the maximum of their tile: they are relative to
// an old one, and taken once more in the rare case that something would overflow. Exponents are in log2 units.
//
// Macros: HEAD_DIM (64, 128), BLOCK_N (keys a tile), CONSUMERS, STAGES, CAUSAL, PACKED, FP16 (values are float16).

#include "hopper.cuh"
#include "codes.cuh"

constexpr int BLOCK_M = 64 * CONSUMERS, D = HEAD_DIM, HALVES = D / 64;
constexpr int THREADS = 128 * (CONSUMERS + 1);
constexpr int CONSUMER_REGISTERS = CONSUMERS == 3 ? 160 : 240, PRODUCER_REGISTERS = CONSUMERS == 3 ? 32 : 24;
// A block has what it started with; more would be waited for in vain.
static_assert(128 * (PRODUCER_REGISTERS + CONSUMERS * CONSUMER_REGISTERS) <= 65536 / THREADS / 8 * 8 * THREADS);
static_assert(STAGES - 2 >= (BLOCK_M - 64 + BLOCK_N - 1) / BLOCK_N);  // see part
constexpr int Q_BYTES = 64 * D * 2, K_BYTES = BLOCK_N * D, V_BYTES = BLOCK_N * D * 2, SCALE_BYTES = BLOCK_N * 4;
constexpr float LOWEST = -1e30f;  // finite, so that a row that has seen no key yet needs no special case
constexpr float LIMIT = FP16 ? 0x1p15f : 0x1p64f;  // of a thread's probabilities of a tile relative to an old maximum
constexpr float LN2 = 0.6931471805599453f;

// A warpgroup's part of a block of queries, as the fetching warp works it out.
struct alignas(16) Part {
    int head, batch, row;  // first of 64 rows
    int skipped, last, clear_to, clear_from, lo;  // key tiles: not looked at, then last .. lo, those between not masked
};

struct Shared {
    alignas(1024) unsigned char q[CONSUMERS][Q_BYTES];  // 16-bit queries of the next block
    alignas(1024) unsigned char k[STAGES][K_BYTES];
    alignas(1024) unsigned char v[STAGES][V_BYTES];
    alignas(16) float k_scale[STAGES][BLOCK_N];
    Part part[2][CONSUMERS];  // comes with q; the other one is of the block before
    u64 q_full[CONSUMERS], q_free[CONSUMERS], k_full[STAGES], k_free[STAGES], v_full[STAGES], v_free[STAGES];
};

// ---- Arithmetic

DEVICE int ceil_div(int a, int b) { return (a + b - 1) / b; }
DEVICE int uniform(int x) { return __shfl_sync(~0u, x, 0); }  // as the compiler sees too
template <class F> DEVICE float row_reduce(float x, F f) {
    x = f(x, __shfl_xor_sync(~0u, x, 1));
    return f(x, __shfl_xor_sync(~0u, x, 2));
}

// ---- What a block of queries sees

struct Work {
    int head, batch, kv_head, kv, block, lo, hi;  // kv = batch * kv_heads + kv_head; key tiles lo .. hi - 1
};

struct Problem {
    const int *starts, *ends;  // PACKED: [n_q], first key of a token's document, one past the last
    int heads, kv_heads, all_heads, n_q, n_k, m_blocks, heads_per_group;

    // Groups of heads whose K and V fit the L2 cache, the longest blocks first in each.
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
        int row = w.block * BLOCK_M + wg * 64, first, last, from = 0, end = n_k;  // seen whole: tiles from .. end
        if (PACKED) {
            from = ceil_div(starts[least(row + 63, n_q - 1)], BLOCK_N);
            end = ends[least(row, n_q - 1)];
            if (CAUSAL) end = least(end, row + 1);
        } else if (CAUSAL) {
            end = least(n_k, row + n_k - n_q + 1);
        }
        bounds(row + 63, first, last);
        // With documents all are looked at: what is given back before the last P V is done may not fill the pipeline.
        last = PACKED ? w.hi - 1 : last / BLOCK_N;
        int clear_to = most(most(end / BLOCK_N, from), w.lo);
        return {w.head, w.batch, row, w.hi - 1 - last, last, clear_to, most(from, w.lo), w.lo};
    }

    // Keys that one row sees: first .. last.
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

// Place in the pipeline of tiles, and parity of the barriers there.
struct Ring {
    int stage;
    u32 parity;
    DEVICE Ring next() const { return stage + 1 == STAGES ? Ring{0, parity ^ 1} : Ring{stage + 1, parity}; }
};

// ---- The fetching warp

DEVICE void produce(
    Shared &shared, const TensorMap &q_map, const TensorMap &k_map, const TensorMap &v_map, const float *k_scale,
    const Problem &problem, int nk_padded, int tiles, int *taken) {
    Ring at{0, 0};
    int tile = blockIdx.x;
    for (u32 free = 1;; free ^= 1) {
        Work w = problem.decode(least(tile, tiles - 1));
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
        if (tile >= tiles) return;
#pragma unroll 1
        for (int j = w.hi - 1; j >= w.lo; j--, at = at.next()) {
            int stage = at.stage;
            wait(shared.k_free[stage], at.parity ^ 1);
            arrive_expect(shared.k_full[stage], K_BYTES + SCALE_BYTES);
            copy_in(shared.k[stage], k_map, 0, j * BLOCK_N, w.kv, shared.k_full[stage]);
            copy_in(shared.k_scale[stage], k_scale + (long long)w.kv * nk_padded + j * BLOCK_N, SCALE_BYTES,
                 shared.k_full[stage]);
            wait(shared.v_free[stage], at.parity ^ 1);
            arrive_expect(shared.v_full[stage], V_BYTES);
            for (int half = 0; half < HALVES; half++)
                copy_in(shared.v[stage] + half * V_BYTES / HALVES, v_map, half * 64, w.kv_head, j * BLOCK_N, w.batch,
                     shared.v_full[stage]);
        }
        tile = gridDim.x + atomicAdd(taken, 1);
    }
}

// ---- A consumer: 64 queries
//
// A thread owns rows lane / 4 and lane / 4 + 8 of its warp's 16; of every 8 keys, or dimensions of O, columns 2 c and
// 2 c + 1 with c = lane % 4: x[4 i + 2 r + b] is row r, column 8 i + 2 c + b.

struct Consumer {
    Shared &shared;
    const Problem &problem;
    int wg, c, row;
    u32 q[D / 8];            // INT8 codes, operand A of Q K^T
    float q_scale[2];        // log2 units of a score
    u32 s[BLOCK_N / 2];      // INT32 scores, then floats
    u32 p[BLOCK_N / 4];      // 16 bits, operand A of P V
    float o[D / 2];
    float m[2], l[2];        // reference of the exponentials, log2 units; this thread's part of the row sum
    float4 k_scale[BLOCK_N / 16];

    // Wait for the next block of queries; quantize this warpgroup's, keep the codes, write them out. Returns how many key
    // tiles are to be skipped, -1 if there are no more blocks.
    DEVICE int start(u32 parity, signed char *codes, float *scales, float factor) {
        wait(shared.q_full[wg], parity);
        const Part &part = shared.part[parity][wg];
        int skipped = uniform(part.skipped);
        if (skipped < 0) return skipped;
        row = part.row + threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4;
        long long base = (long long)part.head * problem.n_q;
        const unsigned char *mine = shared.q[wg] + (threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4) * 128;
#pragma unroll
        for (int r = 0; r < 2; r++) {
            uint2 x[D / 16];
            int largest = 0;
#pragma unroll
            for (int i = 0; i < D / 16; i++) {  // columns 16 i + 4 c .. + 3
                int chunk = i % 4 * 2 + c / 2;
                x[i] = *(const uint2 *)(mine + i / 4 * (Q_BYTES / HALVES) + r * 1024 +
                                        ((chunk ^ (threadIdx.x % 32 / 4)) * 16 + c % 2 * 8));
                float y[4];
                unpack(x[i].x, y[0], y[1]);
                unpack(x[i].y, y[2], y[3]);
#pragma unroll
                for (int e = 0; e < 4; e++) largest = most(largest, magnitude(y[e]));
            }
            largest = most(largest, __shfl_xor_sync(~0u, largest, 1));
            largest = most(largest, __shfl_xor_sync(~0u, largest, 2));
            float inverse = inverse_scale(largest);
            q_scale[r] = __int_as_float(largest) / 127.0f;
            bool inside = row + 8 * r < problem.n_q;
            if (inside && c == 0) scales[base + row + 8 * r] = q_scale[r];
            q_scale[r] *= factor;
            if (q_scale[r] == 0.0f) q_scale[r] = 1.0f;  // zero times a masked -inf would be NaN
#pragma unroll
            for (int i = 0; i < D / 16; i++) {
                float y[4];
                unpack(x[i].x, y[0], y[1]);
                unpack(x[i].y, y[2], y[3]);
                u32 word = four_codes(y, inverse);
                q[i / 2 * 4 + i % 2 * 2 + r] = word;
                if (inside) *(u32 *)(codes + (base + row + 8 * r) * D + 16 * i + 4 * c) = word;
            }
        }
        __syncwarp();
        if (threadIdx.x % 32 == 0) arrive(shared.q_free[wg]);
        return skipped;
    }

    // Give back the first tiles of a block of queries if only the warpgroups after this one see them.
    DEVICE Ring skip(Ring at, int tiles) {
#pragma unroll 1
        for (; tiles > 0; tiles--, at = at.next()) {
            wait(shared.k_full[at.stage], at.parity);
            wait(shared.v_full[at.stage], at.parity);
            __syncwarp();
            if (threadIdx.x % 32 == 0) arrive(shared.k_free[at.stage]), arrive(shared.v_free[at.stage]);
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

    // Scores as floats, -inf where masked, without the scale of the query.
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

    // The keys that this thread's rows see, counted from its own first one of the tile.
    DEVICE void bounds(int key0, int *first, int *last) {
#pragma unroll
        for (int r = 0; r < 2; r++) {
            problem.bounds(row + 8 * r, first[r], last[r]);
            first[r] -= key0 + 2 * c, last[r] -= key0 + 2 * c;
        }
    }

    // Probabilities relative to the maximum so far. O has to be multiplied by alpha.
    DEVICE void exact_softmax(int key0, float *alpha) {
        float top[2] = {LOWEST, LOWEST};
        int first[2], last[2];
        bounds(key0, first, last);
#pragma unroll
        for (int i = 0; i < BLOCK_N / 2; i++) {
            float t = scaled<true>(i / 4, i % 4, first, last);
            top[i / 2 % 2] = fmaxf(top[i / 2 % 2], t * q_scale[i / 2 % 2]);
            s[i] = __float_as_int(t);
        }
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float old = m[r];
            m[r] = fmaxf(old, row_reduce(top[r], [](float a, float b) { return fmaxf(a, b); }));
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

    // Probabilities relative to an old maximum, which is as good while nothing overflows, as their sum shows: otherwise
    // they have to be computed again, and true is returned. Nothing waits for the maximum, and lanes do not meet.
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

    // This warp's scores once more, by the instructions of one warp: rare.
    DEVICE void scores_again(int stage) {
        const unsigned char *keys = shared.k[stage] + threadIdx.x % 32 / 4 * D;
        constexpr int SWIZZLE = D / 16 - 1;  // which bits of the row move the 16-byte pieces of a row of D bytes
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

    // P V of the tile in `stage`, under it scores and softmax of the next one, whose first key is key0.
    template <bool MASKED> DEVICE void step(Ring &at, int key0) {
        Ring next = at.next();
        wait(shared.v_full[at.stage], at.parity);
        wait(shared.k_full[next.stage], next.parity);
        issue_scores(next.stage);
        issue_values(at.stage);
        wgmma_wait<1>();
        pin(s);
        bool again = softmax<MASKED>(key0);
        if (__builtin_expect(again, 0)) {
            float alpha[2];
            scores_again(next.stage);
            exact_softmax(key0, alpha);
            wgmma_wait<0>();
            pin(o);
#pragma unroll
            for (int i = 0; i < D / 2; i++) o[i] *= alpha[i / 2 % 2];
        }
        if (threadIdx.x % 32 == 0) arrive(shared.k_free[next.stage]);
        wgmma_wait<0>();
        pin(o);
        pin(p);
        if (threadIdx.x % 32 == 0) arrive(shared.v_free[at.stage]);
        at = next;
        narrow();
    }

    // O and the log-sum-exp of this warpgroup's rows. Lanes exchange pairs of columns to store four.
    DEVICE void store(int head, int batch, int first, u32 *out, float *lse) {
        long long row_words = (long long)problem.heads * D / 2;
        out += batch * problem.n_q * row_words + (head - batch * problem.heads) * (D / 2) + c % 2 * 4 + c / 2 * 2;
        lse += (long long)head * problem.n_q;
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float sum = row_reduce(l[r], [](float a, float b) { return a + b; }), inverse = 1.0f / sum;
            bool inside = first + 8 * r < problem.n_q;
            if (inside && c == 0) lse[first + 8 * r] = (m[r] + logarithm2(sum)) * LN2;
            u32 *to = out + (first + 8 * r) * row_words;
#pragma unroll
            for (int i = 0; i < D / 8; i += 2) {
                u32 even = pack(o[4 * i + 2 * r] * inverse, o[4 * i + 2 * r + 1] * inverse);
                u32 odd = pack(o[4 * i + 4 + 2 * r] * inverse, o[4 * i + 5 + 2 * r] * inverse);
                u32 other = __shfl_xor_sync(~0u, c % 2 ? even : odd, 1);
                uint2 four = c % 2 ? make_uint2(other, odd) : make_uint2(even, other);
                if (inside) *(uint2 *)(to + 4 * i) = four;
            }
        }
    }
};

// q, v, o [B, N, heads, D] in 16 bits (maps: D, heads, N, B; boxes of 64 dimensions and of 64 queries or BLOCK_N keys);
// K's codes [B * kv_heads, n_k, D], its scales [B * kv_heads, nk_padded] in the order of hopper_quantize.cu. Written
// are q_codes, q_scales and lse [B * heads, n_q (, D)]. factor: scale of the scores times log2 e. taken: zero; counts
// the blocks of queries that are taken beyond the first of each block of threads.
extern "C" __global__ void __launch_bounds__(THREADS, 1) forward(
    const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap k_map,
    const __grid_constant__ TensorMap v_map, const float *k_scale, const int *starts, const int *ends,
    signed char *q_codes, float *q_scales, u32 *o, float *lse, float factor, int heads, int kv_heads, int all_heads,
    int n_q, int n_k, int nk_padded, int m_blocks, int heads_per_group, int tiles, int *taken) {
    Shared &shared = shared_memory<Shared>();
    Problem problem{starts, ends, heads, kv_heads, all_heads, n_q, n_k, m_blocks, heads_per_group};
    if (threadIdx.x == 0) {
        for (int i = 0; i < CONSUMERS; i++) barrier_init(shared.q_full[i], 1), barrier_init(shared.q_free[i], 4);
        for (int i = 0; i < STAGES; i++) {
            barrier_init(shared.k_full[i], 1), barrier_init(shared.k_free[i], 4 * CONSUMERS);
            barrier_init(shared.v_full[i], 1), barrier_init(shared.v_free[i], 4 * CONSUMERS);
        }
        fence_barriers();
    }
    __syncthreads();

    if (threadIdx.x < 128) {
        fewer_registers<PRODUCER_REGISTERS>();
        if (threadIdx.x == 0) produce(shared, q_map, k_map, v_map, k_scale, problem, nk_padded, tiles, taken);
        return;
    }
    more_registers<CONSUMER_REGISTERS>();
    Consumer mine{shared, problem};
    mine.wg = __shfl_sync(~0u, threadIdx.x / 128 - 1, 0);
    mine.c = threadIdx.x % 4;
    // One block of queries after the other; the first scores of the next stand behind the last P V of this one.
    Ring at = mine.skip(Ring{0, 0}, mine.start(0, q_codes, q_scales, factor));
    wait(shared.k_full[at.stage], at.parity);
    mine.issue_scores(at.stage);
    wgmma_wait<0>();
    pin(mine.s);
    for (u32 now = 0;; now ^= 1) {
        const Part &part = shared.part[now][mine.wg];
        __syncwarp();
        if (threadIdx.x % 32 == 0) arrive(shared.k_free[at.stage]);
        int j = uniform(part.last), clear_to = uniform(part.clear_to);
        int clear_from = PACKED ? uniform(part.clear_from) : 0, lo = PACKED ? uniform(part.lo) : 0;
        mine.m[0] = mine.m[1] = LOWEST;
        mine.l[0] = mine.l[1] = 0.0f;
#pragma unroll
        for (int i = 0; i < D / 2; i++) mine.o[i] = 0.0f;
        float alpha[2];
        mine.exact_softmax(j * BLOCK_N, alpha);
        mine.narrow();
        for (j--; j >= clear_to; j--) mine.step<true>(at, j * BLOCK_N);
        for (; j >= clear_from; j--) mine.step<false>(at, j * BLOCK_N);
        if (PACKED)
            for (; j >= lo; j--) mine.step<true>(at, j * BLOCK_N);

        int head = uniform(part.head), batch = uniform(part.batch), row = mine.row;  // before they are overwritten
        wait(shared.v_full[at.stage], at.parity);
        mine.issue_values(at.stage);
        Ring next = at.next();
        int skipped = mine.start(now ^ 1, q_codes, q_scales, factor);
        if (skipped >= 0) {
            next = mine.skip(next, skipped);
            wait(shared.k_full[next.stage], next.parity);
        }
        mine.issue_scores(next.stage);  // of anything, after the last block
        wgmma_wait<1>();
        pin(mine.o);
        if (threadIdx.x % 32 == 0) arrive(shared.v_free[at.stage]);
        mine.store(head, batch, row, o, lse);
        wgmma_wait<0>();
        pin(mine.s);
        if (skipped < 0) return;
        at = next;
    }
}
