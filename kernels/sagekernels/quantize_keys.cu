// Quantize K for the CUDA forwards in one pass over global memory: INT8 codes and one scale per token, less the mean of
// K over the tokens of its head (SMOOTH).
//
// A block of threads takes a chunk of one head, adds it up, waits for the sums of that head's other chunks, and
// quantizes the part that it holds in registers. The rest of a longer chunk is read again. Chunks are handed out in
// order. If `chunks` blocks fit the GPU, all blocks that a block waits for have begun, or begin as soon as blocks of
// earlier heads end. Sums are added in a fixed order.
//
// Macros: HEAD_DIM (64, 128), SMOOTH, FP16 (K is float16), PAIRS (`ordered` is for mma_forward.cu and not for
// hopper_forward.cu).

#include "device.cuh"
#include "codes.cuh"

constexpr int D = HEAD_DIM, THREADS = 512, LANES = D / 8;  // LANES threads of eight dimensions share a token.
// The tokens that a block reads at once, the number of times, and the tokens that it holds.
constexpr int TOKENS = THREADS / LANES, ROUNDS = 8, HELD = TOKENS * ROUNDS;
constexpr int GROUPS = THREADS * 4 / D;  // The groups of threads that add chunks, four dimensions a thread.

struct Shared {
    float part[GROUPS][D];
    float mean[D];
    int item;
};

// Return the sum over `rows` of shared.part.
DEVICE float total(const Shared &shared, int rows) {
    float sum = 0.0f;
    for (int i = 0; i < rows; i++) sum += shared.part[i][threadIdx.x];
    return sum;
}

// k is [B, tokens, heads, D], with strides in units of eight values. The results are codes [B * heads, tokens, D],
// scales [B * heads, tokens] and ordered [B * heads, padded]: the scales in the order that the forward reads, 0 in the
// padding. On Hopper position 4 c + 2 b + a of every 16 is for token 8 b + 2 c + a. With PAIRS there are 22 bits of
// each scale, and the number that takes back the magic constant times the scale, which is exact. per_chunk is a
// multiple of HELD tokens. The mean goes to means [B * heads, D] too, unless that is null. sums [B * heads, chunks, D]
// is scratch. counters [1 + B * heads] are zero at the start: they
// count the chunks handed out, and those added up per head.
extern "C" __global__ void __launch_bounds__(THREADS, 2) quantize(
    const uint4 *k, signed char *codes, float *scales, float *ordered, float *means, float *sums, int *counters, int heads,
    int tokens, int padded, int chunks, int per_chunk, int stride_b, int stride_n, int stride_h) {
    Shared &shared = shared_memory<Shared>();
    if (SMOOTH && threadIdx.x == 0) shared.item = atomicAdd(counters, 1);
    __syncthreads();
    int item = SMOOTH ? shared.item : blockIdx.x, head = item / chunks, begin = item % chunks * per_chunk;
    int end = least(begin + per_chunk, padded), column = threadIdx.x % LANES, row = threadIdx.x / LANES;
    k += (long long)(head / heads) * stride_b + (long long)(head % heads) * stride_h + column;
    codes += (long long)head * tokens * D + column * 8;
    scales += (long long)head * tokens;
    ordered += (long long)head * padded * (1 + PAIRS);

    uint4 x[ROUNDS];
    int first = SMOOTH ? begin + (end - begin - 1) / HELD * HELD : begin;  // The first of the tokens that are held.
    auto load = [&] {
#pragma unroll
        for (int i = 0; i < ROUNDS; i++) {
            int token = first + i * TOKENS + row;
            x[i] = token < tokens ? k[(long long)token * stride_n] : uint4{0, 0, 0, 0};
        }
    };
    load();
    float mean[8] = {};
    if (SMOOTH) {
        float sum[8] = {};
        for (;; first -= HELD, load()) {
#pragma unroll
            for (int i = 0; i < ROUNDS; i++) {
                float y[8];
                unpack(x[i], y);
#pragma unroll
                for (int e = 0; e < 8; e++) sum[e] += y[e];
            }
            if (first == begin) break;
        }
#pragma unroll
        for (int e = 0; e < 8; e++) {
#pragma unroll
            for (int lane = LANES; lane < 32; lane *= 2) sum[e] += __shfl_xor_sync(~0u, sum[e], lane);
            if (threadIdx.x % 32 < LANES) shared.part[threadIdx.x / 32][column * 8 + e] = sum[e];
        }
        __syncthreads();
        if (threadIdx.x < D) sums[(long long)item * D + threadIdx.x] = total(shared, THREADS / 32);
        __syncthreads();
        if (threadIdx.x == 0) {
            add_release(counters + 1 + head, 1);
            wait_count(counters + 1 + head, chunks);
        }
        __syncthreads();
        const float4 *from = (const float4 *)(sums + (long long)head * chunks * D);
        float4 four{0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll 4
        for (int i = threadIdx.x; i < chunks * (D / 4); i += THREADS) {
            float4 y = from[i];
            four.x += y.x, four.y += y.y, four.z += y.z, four.w += y.w;
        }
        ((float4 *)shared.part)[threadIdx.x] = four;
        __syncthreads();
        if (threadIdx.x < D) {
            shared.mean[threadIdx.x] = total(shared, GROUPS) / tokens;
            if (means && begin == 0) means[(long long)head * D + threadIdx.x] = shared.mean[threadIdx.x];
        }
        __syncthreads();
#pragma unroll
        for (int e = 0; e < 8; e++) mean[e] = shared.mean[column * 8 + e];
    }
    for (;;) {
        int largest[ROUNDS];
        float y[8];
#pragma unroll
        for (int i = 0; i < ROUNDS; i++) {
            unpack(x[i], y);
            largest[i] = 0;
#pragma unroll
            for (int e = 0; e < 8; e++) largest[i] = most(largest[i], magnitude(y[e] - mean[e]));
        }
        // Lanes exchange halves of their maxima. Lane i keeps the maximum of round i % 8, and divides it for all lanes.
#pragma unroll
        for (int half = ROUNDS / 2; half > 0; half /= 2)
#pragma unroll
            for (int i = 0; i < half; i++) {
                int mine = column & half ? largest[i + half] : largest[i];
                int other = column & half ? largest[i] : largest[i + half];
                largest[i] = most(mine, __shfl_xor_sync(~0u, other, half));
            }
        if (LANES == 16) largest[0] = most(largest[0], __shfl_xor_sync(~0u, largest[0], 8));
        int token = first + column * TOKENS + row;
        if (token >= tokens) largest[0] = 0;
        float scale = __int_as_float(largest[0]) / 127.0f, inverse = inverse_scale(largest[0]);
        if (column < ROUNDS && token < tokens) scales[token] = scale;
        if (column < ROUNDS && token < padded) {
#if PAIRS
            const float cut = __int_as_float(__float_as_int(scale) & -4);
            ((float2 *)ordered)[token] = float2{cut, -12582912.0f * cut};
#else
            ordered[token / 16 * 16 + token % 8 / 2 * 4 + token % 16 / 8 * 2 + token % 2] = scale;
#endif
        }
#pragma unroll
        for (int i = 0; i < ROUNDS; i++) {
            float of_round = __shfl_sync(~0u, inverse, threadIdx.x % 32 / LANES * LANES + i);
            unpack(x[i], y);
#pragma unroll
            for (int e = 0; e < 8; e++) y[e] -= mean[e];
            token = first + i * TOKENS + row;
            if (token < tokens)
                *(uint2 *)(codes + token * D) = make_uint2(four_codes(y, of_round), four_codes(y + 4, of_round));
        }
        first += HELD;
        if (first >= end) return;
        load();
    }
}
