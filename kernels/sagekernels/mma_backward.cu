// The backward of the recipe `fine` in one pass by mma.sync: dQ, dK and dV. See mma.py. mma_prepare.cu makes the
// inputs.
//
// A block owns 64 or 128 keys of one key head, 16 a warp. It walks over tiles of 64 queries, from the last to the
// first. Rows of a warp are keys, columns are queries:
//     S^T = K8 Q8^T -> P^T s_dO -> largest of each key, codes 0 .. 254 -> dV += P8^T dO8
//     dP^T = V dO^T -> dS^T s_Q -> largest of each key, codes          -> dK += dS8^T Q8
//                      dS^T s_Q s_K -> largest of each query over 64 keys (by all warps), codes -> dQ
// Codes of P^T and dS^T are A operands as they stand, because dO8 and Q8 are stored transposed in that order. Codes of
// dS for dQ are transposed by movmatrix, go through shared memory and meet the transposed K8. dQ is added to global
// memory in the order of the sums.
//
// Integers become floats without an instruction, because sums start at MAGIC's bits. dK and dV take sums with MAGIC in
// them. The amount that this adds to a row is known, and is taken back once in TAKEN_BACK tiles.
//
// Macros: HEAD_DIM (64, 128), FP16 (of v, dO, dK and dV), HALF_SUMS (v and dO are float16 in units of powers of two; dP
// is summed in float16), STAGES (tiles of queries in shared memory, 1 or 2), BLOCKS (of threads on a multiprocessor),
// SHARED_BYTES.

#include "mma.cuh"
#include "codes.cuh"
#include "mma_tiles.cuh"

constexpr int D = HEAD_DIM, KEYS = D;
#include "backward_schedule.cuh"

// GROUPS is the number of groups of keys that share scales of dS.
constexpr int WARPS = KEYS / 16, THREADS = 32 * WARPS, GROUPS = KEYS / 64;
constexpr int ABREAST = 4;  // So many products do not wait for each other.
constexpr int PART = 8;  // dP is computed for so many eights of queries at one time.
// MAGIC is taken back after so many tiles. Each time costs an addition and the last bits of sums.
constexpr int TAKEN_BACK = 8;

using Stage = QueryTile<D>;
struct Shared {
    signed char k_turned[GROUPS][D * 64];
    unsigned short v[KEYS * D];
    signed char ds[QUERIES * KEYS];
#if STAGES == 2
    signed char k8[KEYS * D];
#endif
    Stage stage[STAGES];
    // The largest |dS s_Q s_K| of each query over 64 keys, in this tile and the one before.
    float largest[2][GROUPS][QUERIES];
    u32 magic[4];  // MAGIC_BITS
};
static_assert(sizeof(Shared) == SHARED_BYTES);

struct Signed { static constexpr bool value = false; };
struct Unsigned { static constexpr bool value = true; };
DEVICE u32 four_bytes(float a, float b, float c, float d) {
    return __byte_perm(__byte_perm(__float_as_int(a), __float_as_int(b), 0x0040),
                       __byte_perm(__float_as_int(c), __float_as_int(d), 0x0040), 0x5410);
}
// Return the factor that turns the largest value into `codes`.
DEVICE float inverse_of(float largest, float codes) { return largest > 0x1p-119f ? codes * reciprocal(largest) : 0.0f; }

// Exchange half of 2 HALF values with the lane 2 HALF away, and keep the larger one of each pair. The loops over HALF are
// a template, because NVRTC leaves them loops otherwise, with x in memory.
template <int HALF> DEVICE void halve(float (&x)[16], int lane) {
    const bool upper = lane & 2 * HALF;
#pragma unroll
    for (int i = 0; i < HALF; i++) {
        // These are values, because a choice between two places would be in memory.
        const float low = x[i], high = x[HALF + i];
        x[i] = larger_or_nan(upper ? high : low, __shfl_xor_sync(~0u, upper ? low : high, 2 * HALF));
    }
}

// queries [B * heads, q_tiles] are as mma_prepare.cu writes them. k8 [B * kv_heads, n_k, D] are codes with k_scale. v [B,
// N_k, kv_heads, D] has strides in elements. dk and dv are [B, n_k, kv_heads, D]. k_turned has `k_tiles` tiles of 64
// keys a head, a multiple of a block's, and so has v_units. mma_prepare.cu describes the rest.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) backward(
    const Stage* queries, const signed char* k8, const float* k_scale, const signed char* k_turned,
    const unsigned short* v, const float* v_units, const int* starts, const int* ends,
    float* dq, unsigned short* dk, unsigned short* dv, float scale,
    int kv_heads, int group, int n_q, int n_k, int q_tiles, int k_tiles, int heads, int heads_at_once, int causal,
    int v_batch, int v_token, int v_head
) {
    Shared& sm = shared_memory<Shared>();
    const int thread = threadIdx.x, lane = thread % 32, warp = __shfl_sync(~0u, thread / 32, 0), g = lane / 4, c = lane % 4;
    const Problem problem = {kv_heads, n_q, n_k, causal, starts, ends, heads, heads_at_once};
    const Work work = work_of(blockIdx.x, problem);
    const int bh_kv = work.bh, first_key = work.block * KEYS, tiles = (work.last - work.first) * group;

    auto load = [&](int tile, int stage) {
        const u32 to = address(&sm.stage[stage]) + 16 * thread;
        const char* from = (const char*)(queries + tile) + 16 * thread;
        constexpr int STEP = 16 * THREADS, WHOLE = sizeof(Stage) / STEP * STEP;
#pragma unroll
        for (int i = 0; i < WHOLE; i += STEP) copy_async(to + i, from + i);
        if (16 * thread < sizeof(Stage) - WHOLE) copy_async(to + WHOLE, from + WHOLE);
        copies_commit();
    };

    for (int i = thread; i < KEYS * D / 8; i += THREADS) {
        const int row = i / (D / 8), column = i % (D / 8);
        const unsigned short* from = v + (long long)(bh_kv / kv_heads) * v_batch + (long long)(bh_kv % kv_heads) * v_head +
                                     (long long)(first_key + row) * v_token + 8 * column;
        copy_async(address(sm.v) + place<2 * D>(row, column), from, first_key + row < n_k);
    }
    for (int i = thread; i < KEYS * D / 16; i += THREADS)
        copy_async(address(sm.k_turned) + 16 * i,
                   k_turned + ((long long)bh_kv * k_tiles + first_key / 64) * (64 * D) + 16 * i);
    // A tile of queries is number `tile` of all heads, and number m of its own.
    int m = work.last - 1, tile = bh_kv * group * q_tiles + m, before = 0;
    if (thread < GROUPS * QUERIES) store_shared_word(address(sm.largest) + 4 * thread, 0);
    if (thread < 4) store_shared_word(address(sm.magic) + 4 * thread, MAGIC_BITS);

    // The A operand, rows g and g + 8. With memory for it, it is loaded at each use, and its registers are free between.
    u32 k_codes[D / 32][4];
#if STAGES == 2
    for (int i = thread; i < KEYS * D / 16; i += THREADS) {
        const int row = i / (D / 16), column = i % (D / 16), key = first_key + row;
        copy_async(address(sm.k8) + place<D>(row, column), k8 + ((long long)bh_kv * n_k + key) * D + 16 * column, n_k > key);
    }
    const u32 k_lane = opaque(address(sm.k8) + 16 * warp * D + place<D>(lane % 16, lane / 16));
#endif
    load(tile, 0);

    // The scale has 22 bits, so that MAGIC times it is exact. `back` takes MAGIC back.
    float ks[2], back[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const int key = first_key + 16 * warp + g + 8 * r;
        const bool inside = key < n_k;
        ks[r] = inside ? __int_as_float(__float_as_int(k_scale[(long long)bh_kv * n_k + key]) & -4) : 0.0f;
        back[r] = -MAGIC * ks[r];
#if STAGES == 1
        const signed char* from = k8 + ((long long)bh_kv * n_k + key) * D + 4 * c;
#pragma unroll
        for (int k = 0; k < D / 16; k++) k_codes[k / 2][k % 2 * 2 + r] = inside ? *(const u32*)(from + 16 * k) : 0;
#endif
    }
#if HALF_SUMS
    const float unit = v_units[(long long)bh_kv * k_tiles + first_key / 64 + warp / 4];
#endif

    // Sums of codes start at these. They are loaded at each use, because ptxas would copy them before each product.
    auto load_magic = [&](u32 (&magic)[4]) {
        const float4 four = load_shared(address(sm.magic));
        magic[0] = __float_as_int(four.x), magic[1] = __float_as_int(four.y);
        magic[2] = __float_as_int(four.z), magic[3] = __float_as_int(four.w);
    };
    // dk_magic and dv_magic count MAGIC in the sums of a row.
    float dk_sum[D / 8][4] = {}, dv_sum[D / 8][4] = {}, dk_magic[2] = {}, dv_magic[2] = {};
    // A lane's address for load_matrices is row lane % 8 and 16 bytes lane / 8 for B operands, and row lane % 16 for A
    // operands.
    const u32 stages = address(sm.stage), q_lane = opaque(stages + place<D>(lane % 8, lane / 8));
    const u32 do_lane = opaque(stages + QUERIES * D * 2 + place<2 * D>(lane % 8, lane / 8));
    const u32 turned_lane = opaque(stages + place<64>(lane % 8, lane / 8)), vectors_lane = opaque(stages + 16 * c);
    const u32 v_lane = opaque(address(sm.v) + 16 * warp * 2 * D + place<2 * D>(lane % 16, lane / 16));
    float p[8][4];

    auto largest_of_keys = [&](float (&x)[2]) {
        x[0] = x[1] = 0.0f;
#pragma unroll
        for (int j = 0; j < 8; j++)
#pragma unroll
            for (int e = 0; e < 4; e++) x[e / 2] = larger_or_nan(x[e / 2], fabsf(p[j][e]));
#pragma unroll
        for (int r = 0; r < 2; r++) {
            x[r] = larger_or_nan(x[r], __shfl_xor_sync(~0u, x[r], 1));
            x[r] = larger_or_nan(x[r], __shfl_xor_sync(~0u, x[r], 2));
        }
    };
    auto codes_of = [&](u32 (&a)[2][4], const float (&inverse)[2]) {
#pragma unroll
        for (int h = 0; h < 2; h++)
#pragma unroll
            for (int r = 0; r < 4; r++) {
                const int j = 4 * h + r / 2 * 2, e = r % 2 * 2;
                const float k = inverse[r % 2];
                a[h][r] = four_bytes(__fmaf_rn(p[j][e], k, MAGIC), __fmaf_rn(p[j][e + 1], k, MAGIC),
                                     __fmaf_rn(p[j + 1][e], k, MAGIC), __fmaf_rn(p[j + 1][e + 1], k, MAGIC));
            }
    };
    auto add_product = [&](float (&sum)[D / 8][4], float (&with)[2], auto is_unsigned, const u32 (&a)[2][4], u32 from,
                           const float (&factor)[2]) {
        u32 magic[4];
        load_magic(magic);
#pragma unroll
        for (int n = 0; n < D / 8; n += ABREAST) {
            u32 b[ABREAST][4], s[ABREAST][4];
#pragma unroll
            for (int i = 0; i < ABREAST; i++) load_matrices(b[i], from + 8 * 64 * (n + i));
#pragma unroll
            for (int h = 0; h < 2; h++)
#pragma unroll
                for (int i = 0; i < ABREAST; i++)
                    multiply_codes<decltype(is_unsigned)::value>(s[i], a[h], b[i][2 * h], b[i][2 * h + 1], h ? s[i] : magic);
#pragma unroll
            for (int i = 0; i < ABREAST; i++)
#pragma unroll
                for (int e = 0; e < 4; e++)
                    sum[n + i][e] = __fmaf_rn(__uint_as_float(s[i][e]), factor[e / 2], sum[n + i][e]);
        }
#pragma unroll
        for (int r = 0; r < 2; r++) with[r] = __fmaf_rn(MAGIC, factor[r], with[r]);
    };
    auto take_back = [&](float (&sum)[D / 8][4], float (&with)[2]) {
#pragma unroll
        for (int n = 0; n < D / 8; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) sum[n][e] -= with[e / 2];
        with[0] = with[1] = 0.0f;
    };

    // Add dS K of tile `at`, the one of turn t, to dQ. A warp computes 32 queries and 32 columns.
    auto add_dq = [&](int at, int t) {
        const int rows = warp % 2 * 32;
        const u32 ds_from = address(sm.ds) + rows * KEYS + place<KEYS>(lane % 16, lane / 16);
        const u32 k_from = address(sm.k_turned) + warp / 2 * 32 * 64 + place<64>(lane % 8, lane / 8);
        u32 magic[4];
        load_magic(magic);
        float* to = dq + (long long)at * (QUERIES * D) + warp * 1024 + lane;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            float sum[4][4], unit_of[GROUPS][2];
#pragma unroll
            for (int r = 0; r < 2; r++) {
                float all = 0.0f;
#pragma unroll
                for (int k = 0; k < GROUPS; k++) {
                    const u32 from = address(sm.largest[t % 2][k]) + 4 * (rows + 16 * i + 8 * r + g);
                    all += unit_of[k][r] = load_shared_float(from) * (1.0f / 127.0f);
                }
#pragma unroll
                for (int n = 0; n < 4; n++) sum[n][2 * r] = sum[n][2 * r + 1] = -MAGIC * all;
            }
#pragma unroll
            for (int k = 0; k < GROUPS; k++) {
                u32 d[2][4];
#pragma unroll
                for (int h = 0; h < 2; h++) load_matrices(d[h], (ds_from ^ (64 * k + 32 * h)) + 16 * i * KEYS);
                u32 b[4][4], s[4][4];
#pragma unroll
                for (int n = 0; n < 4; n++) load_matrices(b[n], k_from + k * (64 * D) + 8 * 64 * n);
#pragma unroll
                for (int h = 0; h < 2; h++)
#pragma unroll
                    for (int n = 0; n < 4; n++)
                        multiply_codes(s[n], d[h], b[n][2 * h], b[n][2 * h + 1], h ? s[n] : magic);
#pragma unroll
                for (int n = 0; n < 4; n++)
#pragma unroll
                    for (int e = 0; e < 4; e++)
                        sum[n][e] = __fmaf_rn(__uint_as_float(s[n][e]), unit_of[k][e / 2], sum[n][e]);
            }
#pragma unroll
            for (int n = 0; n < 4; n++)
#pragma unroll
                for (int e = 0; e < 4; e++) add_global(to + 512 * i + 128 * n + 32 * e, sum[n][e]);
        }
    };

    // The tile of the next turn is the one in front, or the last one of the next head.
    auto next = [&] { return m > work.first ? tile - 1 : tile - m + q_tiles + work.last - 1; };
#pragma unroll 1
    for (int t = 0; t < tiles; t++) {
        copies_wait<0>();
        __syncthreads();  // The tile is there, and dS of the one before.
        // Half of the warps add dQ later in the turn, so that the units of a multiprocessor have different work.
        if (t && warp < WARPS / 2) add_dq(before, t - 1);
        const u32 stage = STAGES == 2 ? t % 2 * (u32)sizeof(Stage) : 0;
        {
            u32 s[8][4], magic[4];
            load_magic(magic);
#if STAGES == 2
#pragma unroll
            for (int k = 0; k < D / 32; k++) load_matrices(k_codes[k], k_lane ^ 32 * k);
#endif
#pragma unroll
            for (int j = 0; j < 8; j += ABREAST)
#pragma unroll
                for (int k = 0; k < D / 64; k++) {
                    u32 b[ABREAST][4];
#pragma unroll
                    for (int i = 0; i < ABREAST; i++)
                        load_matrices(b[i], (q_lane ^ 64 * k) + stage + (j + i) * 8 * D);
#pragma unroll
                    for (int h = 0; h < 2; h++)
#pragma unroll
                        for (int i = 0; i < ABREAST; i++)
                            multiply_codes(s[j + i], k_codes[2 * k + h], b[i][2 * h], b[i][2 * h + 1],
                                           k || h ? s[j + i] : magic);
                }
#pragma unroll
            for (int j = 0; j < 8; j++) {
                const float4 two = load_shared(vectors_lane + stage + QUERIES * D * 5 + 64 * j);
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    const float x = __fmaf_rn(__uint_as_float(s[j][e]), ks[e / 2], back[e / 2]);
                    p[j][e] = power2(__fmaf_rn(x, e % 2 ? two.z : two.x, e % 2 ? two.w : two.y));
                }
            }
        }
        if (STAGES == 2 && t + 1 < tiles) load(next(), (t + 1) % 2);
        if (m < work.clear || m >= work.blurred) {
            const int at = thread_index();
#pragma unroll
            for (int r = 0; r < 2; r++) {
                int lower, upper;
                seen_by(first_key + at / 32 * 16 + at % 32 / 4 + 8 * r, problem, lower, upper);
                const int query = m * QUERIES + at % 4 * 2 - lower;
#pragma unroll
                for (int j = 0; j < 8; j++)
#pragma unroll
                    for (int e = 0; e < 2; e++)
                        if ((u32)(query + 8 * j + e) >= (u32)(upper - lower)) p[j][2 * r + e] = 0.0f;
            }
        }
        {
            float largest[2];
            largest_of_keys(largest);
            u32 a[2][4];
            const float inverse[2] = {inverse_of(largest[0], 254.0f), inverse_of(largest[1], 254.0f)};
            const float factor[2] = {largest[0] * (1.0f / 254.0f), largest[1] * (1.0f / 254.0f)};
            codes_of(a, inverse);
            add_product(dv_sum, dv_magic, Unsigned(), a, turned_lane + stage + QUERIES * D * 4, factor);
        }
        // This branch also keeps ptxas from mixing dV with dP, for which it would hold registers in memory.
        if (t && warp >= WARPS / 2) add_dq(before, t - 1);
#pragma unroll
        for (int z = 0; z < 8; z += PART) {
#if HALF_SUMS
            u32 sums[PART][2] = {};
#else
            float dp[PART][4] = {};
#endif
#pragma unroll
            for (int k = 0; k < D / 32; k++) {
                u32 a[2][4];
#pragma unroll
                for (int h = 0; h < 2; h++) load_matrices(a[h], v_lane ^ (64 * k + 32 * h));
#pragma unroll
                for (int j = 0; j < PART; j += ABREAST) {
                    u32 b[ABREAST][4];
#pragma unroll
                    for (int i = 0; i < ABREAST; i++)
                        load_matrices(b[i], (do_lane ^ 64 * k) + stage + (z + j + i) * 8 * 2 * D);
#pragma unroll
                    for (int h = 0; h < 2; h++)
#pragma unroll
                        for (int i = 0; i < ABREAST; i++)
#if HALF_SUMS
                            multiply_half(sums[j + i], a[h], b[i][2 * h], b[i][2 * h + 1]);
#else
                            multiply(dp[j + i], a[h], b[i][2 * h], b[i][2 * h + 1]);
#endif
                }
            }
#pragma unroll
            for (int j = 0; j < PART; j++) {
                float4 two = load_shared(vectors_lane + stage + QUERIES * D * 5 + 8 * QUERIES + 64 * (z + j));
#if HALF_SUMS
                float dp[PART][4];
                unpack_half(sums[j][0], dp[j][0], dp[j][1]), unpack_half(sums[j][1], dp[j][2], dp[j][3]);
                two.x *= unit, two.z *= unit;
#endif
#pragma unroll
                for (int e = 0; e < 4; e++)
                    p[z + j][e] *= __fmaf_rn(dp[j][e], e % 2 ? two.z : two.x, e % 2 ? two.w : two.y);
            }
        }
        u32 a[2][4];
        float largest[2];
        largest_of_keys(largest);
        const float inverse[2] = {inverse_of(largest[0], 127.0f), inverse_of(largest[1], 127.0f)};
        const float factor[2] = {largest[0] * (1.0f / 127.0f), largest[1] * (1.0f / 127.0f)};
        codes_of(a, inverse);
        {  // Find the largest of each query over the warp's keys. Lanes exchange halves of their 16 columns.
            float x[16];
#pragma unroll
            for (int j = 0; j < 8; j++)
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    p[j][e] *= ks[0];
                    p[j][2 + e] *= ks[1];
                    x[2 * j + e] = larger_or_nan(fabsf(p[j][e]), fabsf(p[j][2 + e]));
                }
            halve<8>(x, lane), halve<4>(x, lane), halve<2>(x, lane);
            // The lane is left with columns 2c and 2c + 1 of eight j.
            const int j = lane / 16 * 4 + lane / 8 % 2 * 2 + lane / 4 % 2;
            const u32 to = address(sm.largest[t % 2][warp / 4]) + 4 * (8 * j + 2 * c);
            max_shared(to, __float_as_int(x[0]));
            max_shared(to + 4, __float_as_int(x[1]));
        }
        add_product(dk_sum, dk_magic, Signed(), a, turned_lane + stage + QUERIES * D, factor);
        __syncthreads();  // maxima are there, and nobody reads the tile or dS of the one before
        if (STAGES == 1 && t + 1 < tiles) load(next(), 0);
        if (thread < GROUPS * QUERIES) store_shared_word(address(sm.largest[(t + 1) % 2]) + 4 * thread, 0);
        {  // A warp's 16 keys of dS are 16 bytes of each row. The warp keeps the inverses there until they are used.
            const float2 two = load_shared_pair(address(sm.largest[t % 2][warp / 4]) + 8 * lane);
            store_shared_pair(address(sm.ds) + place<KEYS>(2 * lane, warp),
                              inverse_of(two.x, 127.0f), inverse_of(two.y, 127.0f));
            __syncwarp();  // the inverses are there
            float2 of[8];
#pragma unroll
            for (int j = 0; j < 8; j++)
                of[j] = load_shared_pair(address(sm.ds) + place<KEYS>(2 * c, warp) + 8 * j * KEYS);
            __syncwarp();  // they are read
#pragma unroll
            for (int j = 0; j < 8; j++) {
                const u32 even = __byte_perm(__float_as_int(__fmaf_rn(p[j][0], of[j].x, MAGIC)),
                                             __float_as_int(__fmaf_rn(p[j][2], of[j].x, MAGIC)), 0x0040);
                const u32 odd = __byte_perm(__float_as_int(__fmaf_rn(p[j][1], of[j].y, MAGIC)),
                                            __float_as_int(__fmaf_rn(p[j][3], of[j].y, MAGIC)), 0x0040);
                store_shared_word(address(sm.ds) + place<KEYS>(g, warp) + 8 * j * KEYS + 4 * c,
                                  turned(__byte_perm(even, odd, 0x5410)));
            }
        }
        if (t % TAKEN_BACK == TAKEN_BACK - 1) take_back(dk_sum, dk_magic), take_back(dv_sum, dv_magic);
        before = tile, tile = next();
        m = m > work.first ? m - 1 : work.last - 1;
    }
    __syncthreads();  // dS of the last tile is there
    if (tiles) add_dq(before, tiles - 1);
    take_back(dk_sum, dk_magic), take_back(dv_sum, dv_magic);
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const int key = first_key + 16 * warp + g + 8 * r;
        if (key >= n_k) continue;
        const long long at = (((long long)(bh_kv / kv_heads) * n_k + key) * kv_heads + bh_kv % kv_heads) * D + 2 * c;
#pragma unroll
        for (int n = 0; n < D / 8; n++) {
            *(u32*)(dk + at + 8 * n) = pack(dk_sum[n][2 * r] * scale, dk_sum[n][2 * r + 1] * scale);
            *(u32*)(dv + at + 8 * n) = pack(dv_sum[n][2 * r], dv_sum[n][2 * r + 1]);
        }
    }
}
