// Prepare the inputs of mma_backward.cu, and write its sums of dQ in 16 bits. A block of threads takes 64 tokens of one
// head.
//
// Macros: HEAD_DIM (64, 128), FP16 (of dO, O and dQ), HALF_SUMS (dO is handed on in float16, each row in units of a
// power of two).

#include "mma.cuh"
#include "codes.cuh"
#include "mma_tiles.cuh"

constexpr int D = HEAD_DIM, TILE = 64, THREADS = 128, PITCH = D + 4;  // PITCH is that of rows in shared memory.
// LANES share a row, and ROWS are taken at one time.
constexpr int LANES = D / 8, ROWS = THREADS / LANES;

struct Codes {
    signed char rows[TILE * PITCH];
};

DEVICE void keep(Codes& codes, int row, int column, uint2 eight) {
    u32* to = (u32*)(codes.rows + row * PITCH + column);
    to[0] = eight.x, to[1] = eight.y;
}
// Load the codes of a head, [tokens, D], from token `first` on, with zeros behind the last one. Write them as rows of a
// tile to `to` as well, unless it is null.
DEVICE void read_codes(Codes& codes, const signed char* head, int first, int tokens, signed char* to = nullptr) {
    for (int i = threadIdx.x; i < TILE * LANES; i += THREADS) {
        const int row = i / LANES, column = i % LANES * 8;
        const bool inside = first + row < tokens;
        const uint2 eight = inside ? *(const uint2*)(head + (long long)(first + row) * D + column) : uint2{0, 0};
        keep(codes, row, column, eight);
        if (to) *(uint2*)(to + place<D>(row, column / 16) + column % 16) = eight;
    }
}
// Store them as D rows of 64 tokens, four dimensions of four tokens at a time.
template <class ORDER> DEVICE void write_turned(const Codes& codes, signed char* to) {
    const int w = threadIdx.x % 16;
    for (int d = threadIdx.x / 16 * 4; d < D; d += THREADS / 16 * 4) {
        u32 x[4];
#pragma unroll
        for (int e = 0; e < 4; e++) x[e] = *(const u32*)(codes.rows + ORDER::token(w, e) * PITCH + d);
        const u32 low[2] = {__byte_perm(x[0], x[1], 0x5140), __byte_perm(x[2], x[3], 0x5140)};
        const u32 high[2] = {__byte_perm(x[0], x[1], 0x7362), __byte_perm(x[2], x[3], 0x7362)};
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const u32* from = e < 2 ? low : high;
            *(u32*)(to + place<64>(d + e, w / 4) + 4 * (w % 4)) = __byte_perm(from[0], from[1], e % 2 ? 0x7632 : 0x5410);
        }
    }
}

// dO is [B, N_q, heads, D] with strides in elements. o, codes and scales of Q, and lse [B * heads, n_q] are contiguous.
// The results are `results`, tile by tile. A pair of a query is the scale of Q times that of the scores and
// -(lse - log2 s_dO), then s_Q / s_dO and -delta times that (README.md, "The maths"). Each query also gets the unit of
// its sums of dQ, and zeros for those sums. Unless sinks is null, it has the scores of the sinks in the unit of lse, and
// terms gets their weights times delta, [B * heads, n_q] both.
extern "C" __global__ void __launch_bounds__(THREADS) queries(
    const unsigned short* dO, const unsigned short* o, const signed char* q8, const float* q_scale, const float* lse,
    const float* sinks, QueryTile<D>* results, float* units, float4* sums, float* terms, float scale, float scale_log2,
    int heads, int n_q, int tiles, int batch_stride, int token_stride, int head_stride
) {
    struct Shared { Codes q, dO; };
    Shared& sm = shared_memory<Shared>();
    const int tile = blockIdx.x % tiles, bh = blockIdx.x / tiles, batch = bh / heads, head = bh % heads;
    const int lane = threadIdx.x % 32, column = threadIdx.x % LANES;
    const long long at = (long long)bh * tiles + tile, first = (long long)bh * n_q + tile * TILE;
    QueryTile<D>& result = results[at];
    read_codes(sm.q, q8 + (long long)bh * n_q * D, tile * TILE, n_q, result.q8);

    // A query of zeros has the scale 0. Its dS must neither vanish with it nor outweigh that of other queries.
    float largest_scale = 0.0f;
#pragma unroll
    for (int i = 0; i < 2; i++)
        if (tile * TILE + 32 * i + lane < n_q) largest_scale = fmaxf(largest_scale, q_scale[first + 32 * i + lane]);
#pragma unroll
    for (int i = 1; i < 32; i *= 2) largest_scale = fmaxf(largest_scale, __shfl_xor_sync(~0u, largest_scale, i));
    const float stand_in = largest_scale > 0.0f ? largest_scale * 0x1p-8f : 1.0f;

    for (int row = threadIdx.x / LANES; row < TILE; row += ROWS) {
        const int token = tile * TILE + row;
        const bool inside = token < n_q;
        uint4 a = {0, 0, 0, 0}, b = {0, 0, 0, 0};
        if (inside) {
            a = *(const uint4*)(dO + (long long)batch * batch_stride + (long long)token * token_stride +
                                (long long)head * head_stride + 8 * column);
            b = *(const uint4*)(o + (((long long)batch * n_q + token) * heads + head) * D + 8 * column);
        }
        float x[8], y[8], delta = 0.0f;
        unpack(a, x), unpack(b, y);
        int largest = 0;
#pragma unroll
        for (int e = 0; e < 8; e++) delta += x[e] * y[e], largest = most(largest, magnitude(x[e]));
#pragma unroll
        for (int i = 1; i < LANES; i *= 2) {
            delta += __shfl_xor_sync(~0u, delta, i);
            largest = most(largest, __shfl_xor_sync(~0u, largest, i));
        }
        const float do_scale = __int_as_float(largest) / 127.0f, inverse = inverse_scale(largest);
        keep(sm.dO, row, 8 * column, uint2{four_codes(x, inverse), four_codes(x + 4, inverse)});
        float unit = 1.0f;
#if HALF_SUMS
        // 2^-n, where 2^n is above the largest magnitude, is a float that consists of the exponent alone.
        if (largest > 0 && largest < 0x7F000000) unit = __int_as_float(0x7E800000 - (largest & 0x7F800000));
        a = {pack_half(x[0] * unit, x[1] * unit), pack_half(x[2] * unit, x[3] * unit),
             pack_half(x[4] * unit, x[5] * unit), pack_half(x[6] * unit, x[7] * unit)};
#endif
        *(uint4*)((char*)result.dO + place<2 * D>(row, column)) = a;
        if (column == 0) {
            const float own = inside ? q_scale[first + row] : 0.0f, q_unit = own == 0.0f ? stand_in : own;
            const float factor = do_scale == 0.0f ? 0.0f : q_unit / do_scale;
            const float shift = inside ? lse[first + row] * 1.4426950408889634f - logarithm2(do_scale)
                                       : __int_as_float(0x7F800000);
            ((float2*)result.exponent)[row] = float2{own * scale_log2, -shift};
            ((float2*)result.gradient)[row] = float2{factor / unit, -delta * factor};
            units[at * TILE + row] = scale / q_unit;
            if (sinks && inside)
                terms[first + row] = power2((sinks[first + row] - lse[first + row]) * 1.4426950408889634f) * delta;
        }
    }
    for (int i = threadIdx.x; i < TILE * D / 4; i += THREADS) sums[at * (TILE * D / 4) + i] = float4{0, 0, 0, 0};
    __syncthreads();
    write_turned<AsColumns>(sm.q, result.q_turned);
    write_turned<AsColumns>(sm.dO, result.do_turned);
}

// Transpose the codes of K, [heads, tokens, D], tile by tile.
extern "C" __global__ void __launch_bounds__(THREADS) keys(
    const signed char* k8, signed char* k_turned, int tokens, int tiles
) {
    Codes& codes = shared_memory<Codes>();
    const int tile = blockIdx.x % tiles, head = blockIdx.x / tiles;
    read_codes(codes, k8 + (long long)head * tokens * D, tile * TILE, tokens);
    __syncthreads();
    write_turned<AsRows>(codes, k_turned + (long long)blockIdx.x * (TILE * D));
}

// v is [B, N_k, kv_heads, D] with strides in elements. It is written in float16, each tile of a head in units of a
// power of two that brings the tile's largest magnitude between 8 and 16. The results are rows [B, N_k, kv_heads, D]
// and units [B * kv_heads, tiles].
extern "C" __global__ void __launch_bounds__(THREADS) values(
    const unsigned short* v, uint4* rows, float* units, int kv_heads, int tokens, int tiles,
    int batch_stride, int token_stride, int head_stride
) {
    struct Shared { int largest[THREADS / 32]; };
    Shared& sm = shared_memory<Shared>();
    const int tile = blockIdx.x % tiles, bh = blockIdx.x / tiles, batch = bh / kv_heads, head = bh % kv_heads;
    const int column = threadIdx.x % LANES, row = tile * TILE + threadIdx.x / LANES;
    const unsigned short* from = v + (long long)batch * batch_stride + (long long)head * head_stride + 8 * column;
    uint4 x[TILE / ROWS];
    float y[8];
    int largest = 0;
#pragma unroll
    for (int i = 0; i < TILE / ROWS; i++) {
        const int token = row + i * ROWS;
        x[i] = token < tokens ? *(const uint4*)(from + (long long)token * token_stride) : uint4{0, 0, 0, 0};
        unpack(x[i], y);
#pragma unroll
        for (int e = 0; e < 8; e++) largest = most(largest, magnitude(y[e]));
    }
#pragma unroll
    for (int i = 1; i < 32; i *= 2) largest = most(largest, __shfl_xor_sync(~0u, largest, i));
    if (threadIdx.x % 32 == 0) sm.largest[threadIdx.x / 32] = largest;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < THREADS / 32; i++) largest = most(largest, sm.largest[i]);
    // These are 1.0, and the step from a power of two to the next, as bits.
    constexpr int ONE = 0x3F800000, STEP = 0x00800000;
    const int unit = largest >= 0x7F800000 ? ONE : most(largest & 0x7F800000, 8 * STEP) - 3 * STEP;
    const float inverse = __int_as_float(2 * ONE - unit);
    if (threadIdx.x == 0) units[blockIdx.x] = __int_as_float(unit);
#pragma unroll
    for (int i = 0; i < TILE / ROWS; i++) {
        const int token = row + i * ROWS;
        unpack(x[i], y);
        if (token < tokens)
            rows[(((long long)batch * tokens + token) * kv_heads + head) * LANES + column] =
                uint4{pack_half(y[0] * inverse, y[1] * inverse), pack_half(y[2] * inverse, y[3] * inverse),
                      pack_half(y[4] * inverse, y[5] * inverse), pack_half(y[6] * inverse, y[7] * inverse)};
    }
}

// Write dQ in rows, from the sums as the warps of the backward leave them, each 32 queries x 32 columns, times their
// units. Unless mean [B, heads / group, D] is null, dQ gains scale times the terms of the sinks times the mean of K.
extern "C" __global__ void __launch_bounds__(THREADS) narrow(
    const float* sums, const float* units, const float* terms, const float* mean, unsigned short* dq, float scale,
    int heads, int group, int n_q, int tiles
) {
    const int tile = blockIdx.x % tiles, bh = blockIdx.x / tiles, batch = bh / heads, head = bh % heads;
    const int lane = threadIdx.x % 32;
    for (int part = threadIdx.x / 32; part < D / 8; part += THREADS / 32) {  // A part has 16 queries x 32 columns.
        const int warp = part / 2, row = warp % 2 * 32 + part % 2 * 16 + lane / 4;
        const float* from = sums + (long long)blockIdx.x * (TILE * D) + part * 512 + lane;
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const int token = tile * TILE + row + 8 * r;
            if (token >= n_q) continue;
            const float unit = units[(long long)blockIdx.x * TILE + row + 8 * r];
            const int column = warp / 2 * 32 + lane % 4 * 2;
            const float* of_k = mean ? mean + ((long long)batch * (heads / group) + head / group) * D + column : nullptr;
            const float term = mean ? terms[(long long)bh * n_q + token] * scale : 0.0f;
            unsigned short* to = dq + (((long long)batch * n_q + token) * heads + head) * D + column;
#pragma unroll
            for (int n = 0; n < 4; n++) {
                float low = from[128 * n + 64 * r] * unit, high = from[128 * n + 64 * r + 32] * unit;
                if (mean) low = __fmaf_rn(term, of_k[8 * n], low), high = __fmaf_rn(term, of_k[8 * n + 1], high);
                *(u32*)(to + 8 * n) = pack(low, high);
            }
        }
    }
}
