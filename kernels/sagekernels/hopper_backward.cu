// Backward of the recipe `scores` on Hopper in one pass: dQ, dK and dV. See hopper_backward.py.
//
// A CTA owns 128 keys of one key head, 64 for each of two consumer warpgroups, and walks over tiles of 64 queries, from
// the last to the first. Rows of a thread are keys, columns queries: S^T = K8 Q8^T and dP^T = V dO^T leave P^T and dS^T
// in registers, where they are the A operands of dV += P^T dO and dK += dS^T Q. dS^T also goes to shared memory; one
// tile later each warpgroup multiplies it with its half of the columns of K, and a warp adds that dQ to global memory.
//
// What one warpgroup has on the tensor cores in tile i, and what its warps do meanwhile:
//     dP(i)                         P = exp2(S scale - lse), to 16 bits
//     dV(i)                         dS = P (dP - delta), to bfloat16 and to shared memory
//     dK(i), dQ(i-1)                wait; the vectors of the columns of i + 1
//     S(i+1)                        dQ(i-1) to shared memory, -delta to where dP(i+1) is summed
// Nothing may be in flight where the loop closes: ptxas would wait after every product. At head_dim 128 three sums of
// 64 x 64 beside dK and dV are too many registers: dQ and dP share theirs.
//
// Defines: HEAD_DIM (64, 128), HALF (1 where v and dO are float16, 0 where bfloat16), SHARED_BYTES.

typedef unsigned int u32;
typedef unsigned long long u64;

#define DEVICE __device__ __forceinline__
#include "hopper_backward_schedule.cuh"

struct alignas(64) TensorMap {
    u64 words[16];
};

constexpr int D = HEAD_DIM, STAGES = D == 128 ? 2 : 4;
constexpr int BLOCKS_D = D / 64;        // a 16-bit tile is stored as so many blocks of 64 columns, 128 bytes a row
constexpr int VECTORS = 3 * QUERIES;    // scale of Q, lse and -delta of a tile of queries
constexpr int DQ_HALF = QUERIES * D / 2;  // floats of dQ that one warpgroup computes

struct alignas(1024) Shared {
    signed char k8[KEYS * D];
    unsigned short v[KEYS * D], k[KEYS * D];
    unsigned short ds[2][KEYS * QUERIES];
    float dq[2][DQ_HALF];
    signed char q8[STAGES][QUERIES * D];
    unsigned short dO[STAGES][QUERIES * D], q[STAGES][QUERIES * D];
    float vectors[STAGES][VECTORS];
    u64 keys_full, codes_full[STAGES], codes_free[STAGES], wide_full[STAGES], wide_free[STAGES];
    u64 ds_full[2], ds_free[2], dq_full[2], dq_free[2];
};
static_assert(sizeof(Shared) == SHARED_BYTES);

// ---- instructions ----

DEVICE u32 address(const void* pointer) { return (u32)__cvta_generic_to_shared(pointer); }

DEVICE void barrier_init(u64& bar, int count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(address(&bar)), "r"(count));
}
DEVICE void barriers_ready() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
DEVICE void barrier_expect(u64& bar, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(address(&bar)), "r"(bytes) : "memory");
}
DEVICE void barrier_arrive(u64& bar) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(address(&bar)) : "memory");
}
DEVICE void barrier_wait(u64& bar, int parity) {
    asm volatile(
        "{\n.reg .pred done;\nAGAIN:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@!done bra AGAIN;\n}"
        ::"r"(address(&bar)), "r"(parity) : "memory");
}
template <class T> DEVICE void hold(T& x) { asm volatile("" : "+r"(x)); }  // in a register
// not hoisted: registers are short
DEVICE int thread_index() {
    int i;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(i));
    return i;
}
DEVICE float4 load_shared(u32 from) {
    float4 x;
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w) : "r"(from));
    return x;
}
DEVICE void store_shared(u32 to, const float* x) {
    asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};"
                 ::"r"(to), "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3]) : "memory");
}
template <int registers> DEVICE void give_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(registers));
}
template <int registers> DEVICE void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(registers));
}
DEVICE void warpgroup_barrier(int i) { asm volatile("bar.sync %0, 128;" ::"r"(1 + i) : "memory"); }
DEVICE int load_relaxed(const int* from) {
    int x;
    asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(x) : "l"(from) : "memory");
    return x;
}
DEVICE void fence_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// box of a [B, H, N, D] tensor -> shared memory
DEVICE void copy_in(void* to, const TensorMap& map, int d, int n, int h, int b, u64& bar) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%2, %3, %4, %5}], [%6];"
        ::"r"(address(to)), "l"(&map), "r"(d), "r"(n), "r"(h), "r"(b), "r"(address(&bar)) : "memory");
}
DEVICE void copy_out(const TensorMap& map, int d, int n, int h, int b, const void* from) {
    asm volatile(
        "cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%1, %2, %3, %4}], [%5];"
        ::"l"(&map), "r"(d), "r"(n), "r"(h), "r"(b), "r"(address(from)) : "memory");
}
DEVICE void copy_in(void* to, const void* from, int bytes, u64& bar) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
        ::"r"(address(to)), "l"(from), "r"(bytes), "r"(address(&bar)) : "memory");
}
DEVICE void add_out(float* to, const float* from, int bytes) {
    asm volatile(
        "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;"
        ::"l"(to), "r"(address(from)), "r"(bytes) : "memory");
}
DEVICE void copies_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
DEVICE void copies_wait_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
template <int left = 0> DEVICE void copies_wait() {
    asm volatile("cp.async.bulk.wait_group %0;" ::"n"(left) : "memory");
}
// once all but the last `left` groups of copies are complete
template <int left> DEVICE void end_turn(int* turn) {
    copies_wait<left>();
    asm volatile("red.relaxed.gpu.global.add.s32 [%0], 1;" ::"l"(turn) : "memory");
}

DEVICE float power_of_2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
DEVICE u32 pack_bf16(float low, float high) {
    u32 y;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
    return y;
}
// two values in the type of v
DEVICE u32 pack(float low, float high) {
#if HALF
    u32 y;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
    return y;
#else
    return pack_bf16(low, high);
#endif
}
DEVICE void store_matrices(u32 to, const u32* x) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
                 ::"r"(to), "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]) : "memory");
}

DEVICE void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void products_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Wait until `left` groups of products are in flight; what was computed before the wait stays before it.
template <int left> DEVICE void products_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(left) : "memory");
}
template <int n> DEVICE void pin(float (&x)[n]) {
#pragma unroll
    for (int i = 0; i < n; i++) asm volatile("" : "+f"(x[i])::"memory");
}
template <int n> DEVICE void pin(u32 (&x)[n]) {
#pragma unroll
    for (int i = 0; i < n; i++) asm volatile("" : "+r"(x[i])::"memory");
}

// Descriptor of an operand in shared memory. Rows of `row_bytes` are swizzled over all of their bytes; groups of eight
// rows follow one another. block_bytes: between blocks of 64 columns, for an operand whose rows are contracted.
template <int row_bytes = 128> DEVICE u64 operand(const void* tile, int block_bytes = 16) {
    u64 mode = row_bytes == 128 ? 1 : 2, group = 8 * row_bytes >> 4, block = block_bytes >> 4;
    return mode << 62 | group << 32 | block << 16 | (address(tile) & 0x3FFFF) >> 4;
}

#define R4(c, x, i) c(x[i]), c(x[i + 1]), c(x[i + 2]), c(x[i + 3])
#define R16(c, x, i) R4(c, x, i), R4(c, x, i + 4), R4(c, x, i + 8), R4(c, x, i + 12)
#define R32(c, x) R16(c, x, 0), R16(c, x, 16)
#define R64(c, x) R16(c, x, 0), R16(c, x, 16), R16(c, x, 32), R16(c, x, 48)
#define L16 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}"
#define L32 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, " \
            "%22, %23, %24, %25, %26, %27, %28, %29, %30, %31}"
#define L64 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, " \
            "%22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, " \
            "%42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, " \
            "%62, %63}"
#define INOUT_R(x) "+r"(x)
#define INOUT_F(x) "+f"(x)
#define IN_R(x) "r"(x)
#if HALF
#define TYPE "f16.f16"
#else
#define TYPE "bf16.bf16"
#endif

// s += A B^T, INT8, 64 x 64
DEVICE void multiply_codes(u32 (&s)[32], u64 a, u64 b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n64k32.s32.s8.s8 " L32 ", %32, %33, 1;"
                 : R32(INOUT_R, s) : "l"(a), "l"(b));
}
// dp += A B^T, 64 x 64
DEVICE void multiply_wide(float (&dp)[32], u64 a, u64 b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32." TYPE " " L32 ", %32, %33, 1, 1, 1, 0, 0;"
                 : R32(INOUT_F, dp) : "l"(a), "l"(b));
}
// sum += A B, A in registers, 64 x D; dO has the type of v, Q is bfloat16
DEVICE void add_dv(float (&sum)[64], const u32* a, u64 b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32." TYPE " " L64 ", {%64, %65, %66, %67}, %68, 1, 1, 1, 1;"
                 : R64(INOUT_F, sum) : R4(IN_R, a, 0), "l"(b));
}
DEVICE void add_dk(float (&sum)[64], const u32* a, u64 b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 " L64 ", {%64, %65, %66, %67}, %68, 1, 1, 1, 1;"
                 : R64(INOUT_F, sum) : R4(IN_R, a, 0), "l"(b));
}
DEVICE void add_dv(float (&sum)[32], const u32* a, u64 b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32." TYPE " " L32 ", {%32, %33, %34, %35}, %36, 1, 1, 1, 1;"
                 : R32(INOUT_F, sum) : R4(IN_R, a, 0), "l"(b));
}
DEVICE void add_dk(float (&sum)[32], const u32* a, u64 b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 " L32 ", {%32, %33, %34, %35}, %36, 1, 1, 1, 1;"
                 : R32(INOUT_F, sum) : R4(IN_R, a, 0), "l"(b));
}
// dq (+)= A^T B, 64 x D / 2
template <int more> DEVICE void add_dq(float (&dq)[32], u64 a, u64 b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 " L32 ", %32, %33, %34, 1, 1, 1, 1;"
                 : R32(INOUT_F, dq) : "l"(a), "l"(b), "n"(more));
}
template <int more> DEVICE void add_dq(float (&dq)[16], u64 a, u64 b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 " L16 ", %16, %17, %18, 1, 1, 1, 1;"
                 : R16(INOUT_F, dq, 0) : "l"(a), "l"(b), "n"(more));
}

// ---- the kernel ----

// Place of the i-th tile in a ring of buffers, and the parity of the phase in which its barrier is filled.
DEVICE int place(int i) { return i % STAGES; }
DEVICE int parity(int i) { return i / STAGES & 1; }

extern "C" __global__ void __launch_bounds__(384, 1) hopper_backward(
    const __grid_constant__ TensorMap q8_map, const __grid_constant__ TensorMap q_map,
    const __grid_constant__ TensorMap do_map, const __grid_constant__ TensorMap k8_map,
    const __grid_constant__ TensorMap k_map, const __grid_constant__ TensorMap v_map,
    const __grid_constant__ TensorMap dk_map, const __grid_constant__ TensorMap dv_map,
    const float* vectors, const float* k_scale, const int* starts, const int* ends, float* dq_sum, int* turns,
    float scale, int kv_heads, int group, int n_q, int n_k, int q_tiles, int heads, int heads_at_once, int causal
) {
    extern __shared__ Shared memory[];
    Shared& sm = memory[0];
    const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0), warp = __shfl_sync(~0u, threadIdx.x / 32 % 4, 0);
    int lane = threadIdx.x % 32;
    hold(lane);  // or it is read from the slow register in every tile

    if (threadIdx.x == 0) {
        barrier_init(sm.keys_full, 1);
        for (int i = 0; i < STAGES; i++) {
            barrier_init(sm.codes_full[i], 1);
            barrier_init(sm.codes_free[i], 8);
            barrier_init(sm.wide_full[i], 1);
            barrier_init(sm.wide_free[i], 8);
        }
        for (int i = 0; i < 2; i++) {
            barrier_init(sm.ds_full[i], 8);
            barrier_init(sm.ds_free[i], 8);
            barrier_init(sm.dq_full[i], 4);
            barrier_init(sm.dq_free[i], 1);
        }
        barriers_ready();
    }
    __syncthreads();

    const Problem problem = {kv_heads, n_q, n_k, causal, starts, ends, heads, heads_at_once};
    const Work work = work_of(blockIdx.x, problem);
    const int bh_kv = work.bh, batch = bh_kv / kv_heads, kv_head = bh_kv % kv_heads;
    const int first_key = work.block * KEYS, first_tile = work.first, last_tile = work.last;

    if (warpgroup == 0) {
        give_registers<24>();
        if (lane != 0) return;
        int i = 0;
        if (warp == 0) {  // codes of Q and vectors
            barrier_expect(sm.keys_full, KEYS * D * 5);
            copy_in(sm.k8, k8_map, 0, first_key, kv_head, batch, sm.keys_full);
            for (int b = 0; b < BLOCKS_D; b++)
                copy_in(sm.v + b * KEYS * 64, v_map, b * 64, first_key, kv_head, batch, sm.keys_full);
            for (int b = 0; b < BLOCKS_D; b++)
                copy_in(sm.k + b * KEYS * 64, k_map, b * 64, first_key, kv_head, batch, sm.keys_full);
            for (int g = 0; g < group; g++) {
                int head = kv_head * group + g;
                const float* row = vectors + (u64)(bh_kv * group + g) * q_tiles * VECTORS;
                for (int m = last_tile - 1; m >= first_tile; m--, i++) {
                    u64& bar = sm.codes_full[place(i)];
                    barrier_wait(sm.codes_free[place(i)], parity(i) ^ 1);
                    barrier_expect(bar, QUERIES * D + VECTORS * 4);
                    copy_in(sm.q8[place(i)], q8_map, 0, m * QUERIES, head, batch, bar);
                    copy_in(sm.vectors[place(i)], row + m * VECTORS, VECTORS * 4, bar);
                }
            }
        } else if (warp == 1) {  // dO and Q
            for (int g = 0; g < group; g++) {
                int head = kv_head * group + g;
                for (int m = last_tile - 1; m >= first_tile; m--, i++) {
                    u64& bar = sm.wide_full[place(i)];
                    barrier_wait(sm.wide_free[place(i)], parity(i) ^ 1);
                    barrier_expect(bar, QUERIES * D * 4);
                    for (int b = 0; b < BLOCKS_D; b++)
                        copy_in(sm.dO[place(i)] + b * 4096, do_map, b * 64, m * QUERIES, head, batch, bar);
                    for (int b = 0; b < BLOCKS_D; b++)
                        copy_in(sm.q[place(i)] + b * 4096, q_map, b * 64, m * QUERIES, head, batch, bar);
                }
            }
        } else {  // dQ of one warpgroup to global memory
            const int half = warp - 2;
            int part = -1;
            for (int g = 0; g < group; g++) {
                int bh = bh_kv * group + g;
                for (int m = last_tile - 1; m >= first_tile; m--, i++) {
                    int before = part;
                    part = (bh * q_tiles + m) * 2 + half;
                    if (turns) {
                        int turn = turn_of(work.block, m, problem);
                        while (load_relaxed(turns + part) != turn) continue;
                    }
                    barrier_wait(sm.dq_full[half], i & 1);
                    add_out(dq_sum + (u64)part * DQ_HALF, sm.dq[half], DQ_HALF * 4);
                    copies_commit();
                    copies_wait_read();
                    barrier_arrive(sm.dq_free[half]);
                    if (turns && before >= 0) end_turn<1>(turns + before);
                }
            }
            if (turns && part >= 0) end_turn<0>(turns + part);
            copies_wait();
        }
        return;
    }

    take_registers<240>();
    const int wg = warpgroup - 1;

    // int -> float: accumulators begin at MAGIC's bits, the scale has 22 bits so that MAGIC times it is exact
    const float MAGIC = 12582912.f;
    float ks[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
        int key = first_key + wg * 64 + warp * 16 + lane / 4 + 8 * r;
        ks[r] = key < n_k ? k_scale[bh_kv * n_k + key] : 0.f;
        ks[r] = __int_as_float(__float_as_int(ks[r]) & -4);
    }

    // operands in shared memory, and where this thread writes
    const u64 k8_op = operand<D == 128 ? 128 : 64>(sm.k8 + wg * 64 * D), v_op = operand(sm.v + wg * 64 * 64);
    const u64 k_op = operand(D == 128 ? sm.k + wg * KEYS * 64 : sm.k + wg * 32);
    u32 ds_row = address(sm.ds[0]) + (wg * 64 + warp * 16 + lane % 16) * 128 + ((lane / 16 ^ lane % 8) << 4);
    u32 columns = address(sm.vectors) + lane % 4 * 16;
    u32 dq_at = address(sm.dq[wg]) + (warp * (D / 16) * 32 + lane) * 16;
    hold(ds_row), hold(columns), hold(dq_at);  // or they are computed again in every tile

    float dk[D / 2], dv[D / 2], p[32], dp[32], dq[D / 4];
    float q_scale_lse[32];  // of 16 columns each
    u32 s[32], p16[16], ds16[16];
#pragma unroll
    for (int i = 0; i < D / 2; i++) dk[i] = dv[i] = 0.f;

    auto signal = [&](u64& bar) {
        __syncwarp();
        if (lane == 0) barrier_arrive(bar);
    };
    auto issue_s = [&](int stage) {
#pragma unroll
        for (int i = 0; i < 32; i++) s[i] = 0x4B400000;
        pin(s);
        products_begin();
        u64 q_op = operand<D == 128 ? 128 : 64>(sm.q8[stage]);
#pragma unroll
        for (int i = 0; i < D / 32; i++) multiply_codes(s, k8_op + 2 * i, q_op + 2 * i);
        products_commit();
    };
    auto begin_dp = [&](int stage) {  // dP - delta: the sums begin at -delta
#pragma unroll
        for (int j = 0; j < 4; j++) {
            float4 x = load_shared(columns + stage * (VECTORS * 4) + 2 * QUERIES * 4 + 64 * j);
            dp[8 * j] = dp[8 * j + 2] = x.x;
            dp[8 * j + 1] = dp[8 * j + 3] = x.y;
            dp[8 * j + 4] = dp[8 * j + 6] = x.z;
            dp[8 * j + 5] = dp[8 * j + 7] = x.w;
        }
        pin(dp);
    };
    auto issue_dp = [&](int stage) {
        u64 do_op = operand(sm.dO[stage]);
        products_begin();
#pragma unroll
        for (int i = 0; i < D / 16; i++)
            multiply_wide(dp, v_op + i / 4 * (KEYS * 8) + i % 4 * 2, do_op + i / 4 * (QUERIES * 8) + i % 4 * 2);
        products_commit();
    };
    auto load_columns = [&](int stage) {
#pragma unroll
        for (int i = 0; i < 8; i++) {
            float4 x = load_shared(columns + stage * (VECTORS * 4) + 64 * i);
            float* y = q_scale_lse + 4 * i;
            y[0] = x.x, y[1] = x.y, y[2] = x.z, y[3] = x.w;
        }
        pin(q_scale_lse);
    };
    auto compute_p = [&](int m) {
#pragma unroll
        for (int i = 0; i < 32; i++) {
            int c = i / 8 * 4 + i / 4 % 2 * 2 + i % 2, r = i / 2 % 2;
            float x = __fmaf_rn(__uint_as_float(s[i]), ks[r], -MAGIC * ks[r]);
            p[i] = power_of_2(__fmaf_rn(x, q_scale_lse[c], -q_scale_lse[16 + c]));
        }
        if (m < work.clear || m >= work.blurred) {
            int thread = thread_index();
#pragma unroll
            for (int r = 0; r < 2; r++) {
                int key = first_key + thread / 32 * 16 - 64 + thread % 32 / 4 + 8 * r, lower, upper;
                seen_by(key, problem, lower, upper);
                int q = m * QUERIES + 2 * (thread % 4) - lower;
#pragma unroll
                for (int i = 0; i < 32; i++)
                    if (i / 2 % 2 == r && (u32)(q + i / 4 * 8 + i % 2) >= (u32)(upper - lower)) p[i] = 0.f;
            }
        }
#pragma unroll
        for (int i = 0; i < 16; i++) p16[i] = pack(p[2 * i], p[2 * i + 1]);
        pin(p16);
    };
    auto issue_dv = [&](int stage) {
        u64 b = operand(sm.dO[stage], QUERIES * 128);
        products_begin();
#pragma unroll
        for (int i = 0; i < 4; i++) add_dv(dv, p16 + 4 * i, b + 128 * i);
        products_commit();
    };
    auto compute_ds = [&](int t) {
        const int buffer = t & 1;
#pragma unroll
        for (int i = 0; i < 16; i++) ds16[i] = pack_bf16(p[2 * i] * dp[2 * i], p[2 * i + 1] * dp[2 * i + 1]);
        pin(ds16);
#pragma unroll
        for (int i = 0; i < 4; i++)
            store_matrices((ds_row ^ i << 5) + buffer * (KEYS * QUERIES * 2), ds16 + 4 * i);
        fence_async();
        __syncwarp();
        if (lane == 0) {
            barrier_arrive(sm.ds_full[buffer]);
            if (t > 1) barrier_arrive(sm.dq_full[wg]);  // of tile t - 2
        }
    };
    auto issue_dk = [&](int stage) {
        u64 b = operand(sm.q[stage], QUERIES * 128);
        products_begin();
#pragma unroll
        for (int i = 0; i < 4; i++) add_dk(dk, ds16 + 4 * i, b + 128 * i);
        products_commit();
    };
    auto issue_dq = [&](int t) {  // at -1 of nothing
        barrier_wait(sm.ds_full[t & 1], t >> 1 & 1);
        u64 ds_op = operand(sm.ds[t & 1]);
        products_begin();
        add_dq<0>(dq, ds_op, k_op);
#pragma unroll
        for (int i = 1; i < KEYS / 16; i++) add_dq<1>(dq, ds_op + 128 * i, k_op + 128 * i);
        products_commit();
    };
    auto send_dq = [&](int t) {  // to shared memory; the next compute_ds says that it is there
        if (t < 0) return;
        if (lane == 0) barrier_arrive(sm.ds_free[t & 1]);
        barrier_wait(sm.dq_free[wg], t & 1 ^ 1);
#pragma unroll
        for (int j = 0; j < D / 16; j++) store_shared(dq_at + 512 * j, dq + 4 * j);
    };

    const int tiles = (last_tile - first_tile) * group;
    int m = last_tile - 1;
    barrier_wait(sm.keys_full, 0);
    if (tiles) barrier_wait(sm.codes_full[0], 0);
    load_columns(0);
    issue_s(0);
    products_wait<0>();
    pin(s);
    begin_dp(0);
    for (int t = 0; t < tiles; t++) {
        const int now = place(t), next = place(t + 1);
        barrier_wait(sm.wide_full[now], parity(t));
        issue_dp(now);
        barrier_wait(sm.ds_free[t & 1], t >> 1 & 1 ^ 1);
        compute_p(m);
        issue_dv(now);
        signal(sm.codes_free[now]);  // not before: loads may be on their way until their values are used
        products_wait<1>();
        pin(dp);
        compute_ds(t);
        issue_dk(now);
        issue_dq(t - 1);
        products_wait<1>();
        pin(p16);
        pin(ds16);
        signal(sm.wide_free[now]);
        if (t + 1 < tiles) barrier_wait(sm.codes_full[next], parity(t + 1));
        load_columns(next);
        issue_s(next);
        products_wait<1>();
        pin(dq);
        send_dq(t - 1);
        begin_dp(next);
        products_wait<0>();
        pin(s);
        if (--m < first_tile) m = last_tile - 1;
    }
    products_wait<0>();
    pin(dk);
    pin(dv);
    if (tiles) {
        issue_dq(tiles - 1);
        products_wait<0>();
        pin(dq);
        fence_async();
        if (tiles > 1) signal(sm.dq_full[wg]);
        send_dq(tiles - 1);
        fence_async();
        signal(sm.dq_full[wg]);
    }

    const u32 out_row = (warp * 16 + lane % 16) * 128 + ((lane / 16 ^ lane % 8) << 4);
    // dV leaves through this warpgroup's part of V, dK through its part of dQ
    auto send = [&](float (&x)[D / 2], float factor, u32 to, int block_bytes) {
#pragma unroll
        for (int i = 0; i < D / 16; i++) {
            u32 y[4];
#pragma unroll
            for (int j = 0; j < 4; j++) y[j] = pack(x[8 * i + 2 * j] * factor, x[8 * i + 2 * j + 1] * factor);
            store_matrices((to + out_row ^ i % 4 << 5) + i / 4 * block_bytes, y);
        }
        fence_async();
        warpgroup_barrier(wg);
    };
    send(dv, 1.f, address(sm.v + wg * 64 * 64), KEYS * 128);
    if (tiles) barrier_wait(sm.dq_free[wg], tiles - 1 & 1);
    send(dk, scale, address(sm.dq[wg]), 64 * 128);
    if (warp == 0 && lane == 0) {
        for (int b = 0; b < BLOCKS_D; b++) {
            copy_out(dv_map, b * 64, first_key + wg * 64, kv_head, batch, sm.v + b * KEYS * 64 + wg * 64 * 64);
            copy_out(dk_map, b * 64, first_key + wg * 64, kv_head, batch, (char*)sm.dq[wg] + b * 64 * 128);
        }
        copies_commit();
        copies_wait();
    }
}
