// The forward of the recipes `fine` and `scores` by mma.sync: O, log-sum-exp, codes and scales of Q. See mma.py.
//
// A block of four warps owns 128 queries of one head, 32 a warp. It walks over tiles of 64 keys from the last to the
// first, with the next tile on its way. Q is quantized in registers, where its codes stay as the A operand of S = Q8
// K8^T. P, rounded to 16 bits, is the A operand of O += P V as it stands.
//
// Exponentials are taken relative to an old maximum, so that nothing waits for the maximum of a tile. If scores rise
// too far above it, the sum of the row shows that. Then, and where a mask applies, the scores are computed again
// relative to the tile's own maximum. In the first tile there is no old maximum.
//
// Macros: HEAD_DIM (64, 128), CAUSAL, PACKED (documents), FP16 (of q, v and o), HALF_SUMS (v is float16 in units of a
// power of two per tile; P V is summed in float16 over a tile and in float32 over tiles), SINKS (each row has one more
// score, whose value is zero), SHARED_BYTES.

#include "mma.cuh"
#include "codes.cuh"
#include "mma_tiles.cuh"

constexpr int D = HEAD_DIM, QUERIES = 128, KEYS = 64, WARPS = 4, THREADS = 32 * WARPS, STAGES = 2;
constexpr int PART = 4;  // So many eights of columns have their float16 sums held at one time.
constexpr int BLOCKS = D == 128 ? 2 : 3;  // So many blocks of threads run on a multiprocessor.
// If a lane's share of four rows' sums exceeds this, the maximum is renewed. float16 ends at 2^16, and so do its sums
// of P V over 64 keys of up to 16 in V's units.
constexpr float LIMIT = HALF_SUMS ? 0x1p6f : FP16 ? 0x1p14f : 0x1p64f;

struct Shared {
    signed char k8[STAGES][KEYS * D];
    unsigned short v[STAGES][KEYS * D];
    float2 k_scale[STAGES][KEYS];
};
static_assert(sizeof(Shared) == SHARED_BYTES);

// q [B, N_q, heads, D] and v [B, N_k, kv_heads, D] have strides in elements, multiples of 8. k8 [B * kv_heads, n_k, D]
// are codes, with memory for 63 more tokens. k_scale [B * kv_heads, padded] holds the scale of 22 bits and -MAGIC times
// it. starts and ends are the bounds of each token's document. sinks [B * heads, n_q] are in the unit of lse. The results
// are q8 [B * heads, n_q, D], q_scale and lse
// [B * heads, n_q], and o [B, n_q, heads, D].
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) forward(
    const unsigned short* q, const signed char* k8, const float2* k_scale, const unsigned short* v, const float* v_units,
    const int* starts, const int* ends, const float* sinks, signed char* q8, float* q_scale, unsigned short* o, float* lse,
    float scale_log2, int heads, int group, int n_q, int n_k, int padded, int blocks,
    int q_batch, int q_token, int q_head, int v_batch, int v_token, int v_head
) {
    Shared& sm = shared_memory<Shared>();
    const int thread = threadIdx.x, lane = thread % 32, warp = __shfl_sync(~0u, thread / 32, 0), g = lane / 4, c = lane % 4;
    const int bh = blockIdx.x / blocks, rest = blockIdx.x % blocks, block = CAUSAL ? blocks - 1 - rest : rest;
    const int batch = bh / heads, head = bh % heads, kv_head = head / group, bh_kv = batch * (heads / group) + kv_head;
    const int first_query = block * QUERIES, offset = n_k - n_q;

    // Queries from one to another see tiles first .. last of keys. All of them see the tiles clear .. blurred among
    // these. The block walks over the tiles of its queries, and a warp skips those that none of its own sees.
    struct Tiles { int first, last, clear, blurred; };
    auto tiles_of = [&](int from, int to) {
        from = least(from, n_q - 1), to = least(to, n_q - 1);
        int start = 0, seen = n_k, clear_until = n_k, clear = 0;
        if (CAUSAL) seen = least(n_k, to + 1 + offset), clear_until = least(n_k, from + 1 + offset);
        if (PACKED) {
            start = starts[from], clear = (starts[to] + KEYS - 1) / KEYS;
            seen = least(seen, ends[to]), clear_until = least(clear_until, ends[from]);
        }
        return Tiles{start / KEYS, (seen + KEYS - 1) / KEYS, clear, most(clear, clear_until / KEYS)};
    };
    const Tiles all = tiles_of(first_query, first_query + QUERIES - 1);
    const Tiles own = tiles_of(first_query + 32 * warp, first_query + 32 * warp + 31);

    k8 += (long long)bh_kv * n_k * D + 16 * thread;
    k_scale += (long long)bh_kv * padded + 2 * thread;
    v += (long long)batch * v_batch + (long long)kv_head * v_head + thread % (D / 8) * 8;
    const int v_row = thread / (D / 8);
    // The threads copy so many rows at one time.
    constexpr int V_ROWS = THREADS / (D / 8), K_ROWS = THREADS / (D / 16);
    const u32 k_to = address(sm.k8) + place<D>(thread / (D / 16), thread % (D / 16));
    const u32 v_to = address(sm.v) + place<2 * D>(v_row, thread % (D / 8)), scale_to = address(sm.k_scale) + 16 * thread;
    auto load = [&](int tile, int stage) {
        const int key = tile * KEYS;
        const unsigned short* rows = v + (long long)(key + v_row) * v_token;
        u32 to = v_to + stage * (KEYS * 2 * D);
        if (key + KEYS <= n_k) {
#pragma unroll
            for (int i = 0; i < KEYS / V_ROWS; i++, rows += V_ROWS * v_token)
                copy_async(to + i * V_ROWS * 2 * D, rows);
        } else {
#pragma unroll 1  // The branch is seldom taken, and unrolling would put a condition on every copy of the others.
            for (int i = 0; i < KEYS / V_ROWS; i++, rows += V_ROWS * v_token, to += V_ROWS * 2 * D)
                copy_async(to, rows, key + i * V_ROWS + v_row < n_k);
        }
#pragma unroll
        for (int i = 0; i < KEYS / K_ROWS; i++)
            copy_async(k_to + stage * (KEYS * D) + i * K_ROWS * D, k8 + (long long)key * D + i * K_ROWS * D);
        if (thread < KEYS / 2) copy_async(scale_to + stage * (KEYS * 8), k_scale + key);
        copies_commit();
    };
    load(all.last - 1, 0);

    // This thread's rows are 16 i + 8 r + g of its warp, with i and r below 2.
    u32 a[2][D / 32][4];  // The codes of Q.
    float factor[2][2];   // The scale of the query, times that of the scores.
#pragma unroll
    for (int i = 0; i < 2; i++)
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const int row = first_query + 32 * warp + 16 * i + 8 * r + g;
            const unsigned short* from = q + (long long)batch * q_batch + (long long)head * q_head +
                                         (long long)row * q_token + 4 * c;
            float x[D / 16][4];
            int largest = 0;
#pragma unroll
            for (int k = 0; k < D / 16; k++) {
                const uint2 four = row < n_q ? *(const uint2*)(from + 16 * k) : uint2{0, 0};
                unpack(four.x, x[k][0], x[k][1]), unpack(four.y, x[k][2], x[k][3]);
#pragma unroll
                for (int e = 0; e < 4; e++) largest = most(largest, magnitude(x[k][e]));
            }
            largest = most(largest, __shfl_xor_sync(~0u, largest, 1));
            largest = most(largest, __shfl_xor_sync(~0u, largest, 2));
            const float scale = __int_as_float(largest) / 127.0f, inverse = inverse_scale(largest);
            factor[i][r] = scale * scale_log2;
            const long long at = (long long)bh * n_q + row;
            if (c == 0 && row < n_q) q_scale[at] = scale;
#pragma unroll
            for (int k = 0; k < D / 16; k++) {
                const u32 word = four_codes(x[k], inverse);
                a[i][k / 2][2 * (k % 2) + r] = word;
                if (row < n_q) *(u32*)(q8 + at * D + 16 * k + 4 * c) = word;
            }
        }

    // The sums of O, the old maximum, and this lane's share of the row's sum.
    float out[2][D / 8][4] = {}, top[2][2], sum[2][2] = {};
#pragma unroll
    for (int i = 0; i < 2; i++) top[i][0] = top[i][1] = -__int_as_float(0x7F800000);
    const u32 magic[4] = {MAGIC_BITS, MAGIC_BITS, MAGIC_BITS, MAGIC_BITS};
    // A lane's address for load_matrices is row lane % 8 and 16 bytes lane / 8. In transposed matrices it covers rows
    // of both halves of 16.
    const u32 k_from = address(sm.k8) + place<D>(lane % 8, lane / 8);
    const u32 v_from = address(sm.v) + place<2 * D>(lane % 16, lane / 16), scales = address(sm.k_scale) + 16 * c;

#pragma unroll 1
    for (int tile = all.last - 1, stage = 0; tile >= all.first; tile--, stage ^= 1) {
        copies_wait<0>();
        __syncthreads();  // The tile is there, and no warp reads the one before.
        if (tile > all.first) load(tile - 1, stage ^ 1);
        if (tile >= own.last || tile < own.first) continue;
        const bool masked = tile < own.clear || tile >= own.blurred;
        bool exact = masked || tile == own.last - 1;
        u32 s[2][KEYS / 8][4], p16[2][KEYS / 16][4];
        float p[2][KEYS / 8][4];
        auto narrow = [&](int i, int j, const float* x) {
#pragma unroll
            for (int r = 0; r < 2; r++)
                p16[i][j / 2][2 * (j % 2) + r] =
                    HALF_SUMS ? pack_half(x[2 * r], x[2 * r + 1]) : pack(x[2 * r], x[2 * r + 1]);
        };
        for (;;) {
#pragma unroll
            for (int j = 0; j < KEYS / 8; j++)
#pragma unroll
                for (int k = 0; k < D / 64; k++) {
                    u32 b[4];
                    load_matrices(b, (k_from + stage * (KEYS * D) ^ 64 * k) + j * 8 * D);
#pragma unroll
                    for (int i = 0; i < 2; i++) {
                        multiply_codes(s[i][j], a[i][2 * k], b[0], b[1], k ? s[i][j] : magic);
                        multiply_codes(s[i][j], a[i][2 * k + 1], b[2], b[3], s[i][j]);
                    }
                }
#pragma unroll
            for (int j = 0; j < KEYS / 8; j++) {
                const float4 two = load_shared(scales + stage * (KEYS * 8) + 64 * j);
#pragma unroll
                for (int i = 0; i < 2; i++)
#pragma unroll
                    for (int e = 0; e < 4; e++)
                        p[i][j][e] = e % 2 ? __fmaf_rn(__uint_as_float(s[i][j][e]), two.z, two.w)
                                           : __fmaf_rn(__uint_as_float(s[i][j][e]), two.x, two.y);
            }
            float row[2][2] = {};
            if (!exact) {
#pragma unroll
                for (int j = 0; j < KEYS / 8; j++)
#pragma unroll
                    for (int i = 0; i < 2; i++) {
#pragma unroll
                        for (int e = 0; e < 4; e++) {
                            p[i][j][e] = power2(__fmaf_rn(p[i][j][e], factor[i][e / 2], -top[i][e / 2]));
                            row[i][e / 2] += p[i][j][e];
                        }
                        narrow(i, j, p[i][j]);
                    }
                exact = __any_sync(~0u, !(row[0][0] + row[0][1] + row[1][0] + row[1][1] <= LIMIT));
                if (exact) continue;
            } else {
#pragma unroll
                for (int i = 0; i < 2; i++)
#pragma unroll
                    for (int r = 0; r < 2; r++) {
                        int low = 0, high = n_k;
                        if (masked) {
                            const int query = least(first_query + 32 * warp + 16 * i + 8 * r + g, n_q - 1);
                            if (CAUSAL) high = query + offset + 1;
                            if (PACKED) low = starts[query], high = least(high, ends[query]);
                        }
                        const int key = tile * KEYS + 2 * c;
                        float largest = -__int_as_float(0x7F800000);
#pragma unroll
                        for (int j = 0; j < KEYS / 8; j++)
#pragma unroll
                            for (int e = 0; e < 2; e++) {
                                float& x = p[i][j][2 * r + e];
                                const int at = key + 8 * j + e;
                                x = at >= low && at < high ? x * factor[i][r] : -__int_as_float(0x7F800000);
                                largest = fmaxf(largest, x);
                            }
                        largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
                        largest = fmaxf(fmaxf(largest, __shfl_xor_sync(~0u, largest, 2)), top[i][r]);
                        const float used = largest == -__int_as_float(0x7F800000) ? 0.0f : largest;
                        const float shrink = power2(top[i][r] - used);
                        top[i][r] = largest;
                        sum[i][r] *= shrink;
#pragma unroll
                        for (int n = 0; n < D / 8; n++) out[i][n][2 * r] *= shrink, out[i][n][2 * r + 1] *= shrink;
#pragma unroll
                        for (int j = 0; j < KEYS / 8; j++)
#pragma unroll
                            for (int e = 0; e < 2; e++) {
                                float& x = p[i][j][2 * r + e];
                                x = power2(x - used);
                                row[i][r] += x;
                            }
                    }
#pragma unroll
                for (int i = 0; i < 2; i++)
#pragma unroll
                    for (int j = 0; j < KEYS / 8; j++) narrow(i, j, p[i][j]);
            }
#pragma unroll
            for (int i = 0; i < 2; i++) sum[i][0] += row[i][0], sum[i][1] += row[i][1];
            break;
        }

        const u32 values = v_from + stage * (KEYS * 2 * D);
#if HALF_SUMS
        const float unit = v_units[bh_kv * (padded / KEYS) + tile];
#pragma unroll
        // Columns are taken in parts, because there are no registers for the sums of all.
        for (int part = 0; part < D / 8; part += PART) {
            u32 sums[2][PART][2] = {};
#pragma unroll
            for (int k = 0; k < KEYS / 16; k++)
#pragma unroll
                for (int n = 0; n < PART; n += 2) {
                    u32 b[4];
                    load_matrices_turned(b, (values ^ 16 * (part + n)) + k * 16 * 2 * D);
#pragma unroll
                    for (int i = 0; i < 2; i++) {
                        multiply_half(sums[i][n], p16[i][k], b[0], b[1]);
                        multiply_half(sums[i][n + 1], p16[i][k], b[2], b[3]);
                    }
                }
#pragma unroll
            for (int i = 0; i < 2; i++)
#pragma unroll
                for (int n = 0; n < PART; n++)
#pragma unroll
                    for (int r = 0; r < 2; r++) {
                        float low, high, *to = out[i][part + n] + 2 * r;
                        unpack_half(sums[i][n][r], low, high);
                        to[0] = __fmaf_rn(low, unit, to[0]), to[1] = __fmaf_rn(high, unit, to[1]);
                    }
        }
#else
#pragma unroll
        for (int k = 0; k < KEYS / 16; k++)
#pragma unroll
            for (int n = 0; n < D / 8; n += 2) {
                u32 b[4];
                load_matrices_turned(b, (values ^ 16 * n) + k * 16 * 2 * D);
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    multiply(out[i][n], p16[i][k], b[0], b[1]);
                    multiply(out[i][n + 1], p16[i][k], b[2], b[3]);
                }
            }
#endif
    }

#pragma unroll
    for (int i = 0; i < 2; i++)
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const int row = first_query + 32 * warp + 16 * i + 8 * r + g;
            float l = sum[i][r] + __shfl_xor_sync(~0u, sum[i][r], 1);
            l += __shfl_xor_sync(~0u, l, 2);
            if (row >= n_q) continue;
            const long long at = (long long)bh * n_q + row;
            float all = top[i][r] + logarithm2(l), inverse = 1.0f / l;
            if (SINKS) {
                const float own = sinks[at] * 1.4426950408889634f, larger = fmaxf(all, own);
                const float both = larger + logarithm2(power2(all - larger) + power2(own - larger));
                inverse *= power2(all - both);
                all = both;
            }
            if (c == 0) lse[at] = all * 0.6931471805599453f;
            unsigned short* to = o + (((long long)batch * n_q + row) * heads + head) * D + 2 * c;
#pragma unroll
            for (int n = 0; n < D / 8; n++)
                *(u32*)(to + 8 * n) = pack(out[i][n][2 * r] * inverse, out[i][n][2 * r + 1] * inverse);
        }
}
