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

#include "hopper_forward_consumer.cuh"

// q, v and o are [B, N, heads, D] in 16 bits (maps: D, heads, N, B; boxes of 64 dimensions and of 64 queries or BLOCK_N
// keys). K has codes [B * kv_heads, n_k, D], and scales [B * kv_heads, nk_padded] in the order of quantize_keys.cu.
// sinks [B * heads, n_q] are in the unit of lse. The results are also Q's codes [B, heads, n_q, D] (a map too), and
// q_scales and lse [B * heads, n_q]. factor is the scale of the scores times log2 e. taken is zero at the start; it
// counts the blocks of queries that are taken beyond the first of each block of threads.
extern "C" __global__ void __launch_bounds__(THREADS, 1) forward(
    const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap k_map,
    const __grid_constant__ TensorMap v_map, const __grid_constant__ TensorMap codes_map, const float *k_scale,
    const int *starts, const int *ends, const float *sinks, float *q_scales, u32 *o, float *lse, float factor,
    int heads, int kv_heads, int all_heads, int n_q, int n_k, int nk_padded, int m_blocks, int heads_per_group,
    int tiles, int *taken) {
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
