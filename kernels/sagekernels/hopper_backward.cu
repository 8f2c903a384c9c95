// The backward of the recipe `scores` on Hopper in one pass: dQ, dK and dV. See hopper_backward.py.
//
// A CTA owns 64 keys of one key head for each of its consumer warpgroups. It walks over tiles of 64 queries, from the
// last to the first. Rows of a thread are keys, columns are queries. S^T = K8 Q8^T and dP^T = V dO^T leave P^T and dS^T
// in registers, where they are the A operands of dV += P^T dO and dK += dS^T Q. dS^T also goes to shared memory. One
// tile later it is multiplied with K, which the warpgroups have widened to bfloat16 at their start, and a warp adds
// that dQ to global memory. dQ is computed in parts of 64 columns. Warpgroup j % CONSUMERS computes part j of the walk:
// of two warpgroups at head_dim 128 each has its columns, and of three at head_dim 64 each has every third tile.
//
// The products of one warpgroup on the tensor cores in tile i, and the work of its warps meanwhile:
//     head_dim 128                                            head_dim 64
//     dP(i)         P = exp2(S scale - lse), to 16 bits                    P
//     dV(i)         dS = P (dP - delta), to bfloat16          dP(i)
//                   and to shared memory                      dV(i)        dS
//     dK(i), dQ(i-1)                                          dK(i), dQ(i-1) in its turn
//                   wait; vectors of the columns of i + 1                  wait; dQ(i-1) to shared memory
//     S(i+1)        dQ(i-1) to shared memory                  S(i+1)       vectors of the columns of i + 1
//     -delta(i+1), where dP is summed
// Two warpgroups have 240 registers each, three have 160. With three there is no dP under the exponentials and no dQ
// beside S. The two other warpgroups hide the waits there. Nothing may be in flight where the loop closes, because
// ptxas would then wait after every product. At head_dim 128 three sums of 64 x 64 beside dK and dV are too many
// registers, so dQ and dP share theirs.
//
// The CLUSTER blocks of a cluster own the same keys and have each a part of the query heads. At the end they add up dK
// and dV in float32, in the order of their heads, through shared memory.
//
// Defines: HEAD_DIM (64, 128), FP16 (of v and dO, see hopper.cuh), CLUSTER (divides the query heads of a key head),
// SHARED_BYTES.

#include "hopper.cuh"

constexpr int CONSUMERS = HEAD_DIM == 128 ? 2 : 3;  // The number of warpgroups of 64 keys.
constexpr int KEYS = 64 * CONSUMERS;
#include "backward_schedule.cuh"

constexpr int D = HEAD_DIM, STAGES = D == 128 ? 2 : 3;
constexpr int THREADS = 128 * (CONSUMERS + 1);
constexpr int CONSUMER_REGISTERS = CONSUMERS == 3 ? 160 : 240, PRODUCER_REGISTERS = CONSUMERS == 3 ? 32 : 24;
// A CTA has the registers that it started with. It would wait for more in vain.
static_assert(128 * (PRODUCER_REGISTERS + CONSUMERS * CONSUMER_REGISTERS) <= 65536 / THREADS / 8 * 8 * THREADS);
// A 16-bit tile is stored as so many blocks of 64 columns, 128 bytes a row.
constexpr int BLOCKS_D = D / 64;
constexpr int DQ_PART = QUERIES * 64;    // A warpgroup computes so many floats of dQ at one time.
constexpr int ROUND = CONSUMERS / BLOCKS_D;  // It does so once in so many tiles.
// Registers suffice to compute early what is needed later (see above).
constexpr bool AHEAD = CONSUMERS == 2;
// The vectors of a tile of queries. With two consumers they are rows of -delta in two TF32 parts, the scale of Q and
// lse, for a product that adds -delta to dP. That product is slower beside three consumers, which have vectors of
// scale, lse and -delta.
constexpr int VECTORS = (AHEAD ? 4 : 3) * QUERIES;

struct alignas(1024) Shared {
    signed char k8[KEYS * D];
    unsigned short v[KEYS * D], k[KEYS * D];
    unsigned short ds[2][KEYS * QUERIES];
    float dq[CONSUMERS][DQ_PART];
    signed char q8[STAGES][QUERIES * D];
    unsigned short dO[STAGES][QUERIES * D], q[STAGES][QUERIES * D];
    float vectors[STAGES][VECTORS];
    u64 keys_full, codes_full[STAGES], codes_free[STAGES], wide_full[STAGES], wide_free[STAGES];
    u64 ds_full[2], ds_free[2], dq_full[CONSUMERS], dq_free[CONSUMERS];
};
static_assert(sizeof(Shared) == SHARED_BYTES);
// Sums of dK and dV lie in front of the tiles of dO. NVRTC 13.0 has no offsetof.
static_assert(CLUSTER == 1 || 2 * KEYS * D * sizeof(float) <= sizeof(Shared::k8) + sizeof(Shared::v) +
    sizeof(Shared::k) + sizeof(Shared::ds) + sizeof(Shared::dq) + sizeof(Shared::q8));

// The place of the i-th tile in a ring of buffers, and the parity of the phase in which its barrier is filled.
DEVICE int place(int i) { return i % STAGES; }
DEVICE int parity(int i) { return i / STAGES & 1; }

extern "C" __global__ void __launch_bounds__(THREADS, 1) CLUSTER_OF(CLUSTER) hopper_backward(
    const __grid_constant__ TensorMap q8_map, const __grid_constant__ TensorMap q_map,
    const __grid_constant__ TensorMap do_map, const __grid_constant__ TensorMap k8_map,
    const __grid_constant__ TensorMap v_map, const __grid_constant__ TensorMap dk_map,
    const __grid_constant__ TensorMap dv_map,
    const float* vectors, const float* k_scale, const int* starts, const int* ends, float* dq_sum, int* turns,
    float scale, int kv_heads, int group, int n_q, int n_k, int q_tiles, int heads, int heads_at_once, int causal
) {
    Shared& sm = shared_memory<Shared>();
    const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0), warp = __shfl_sync(~0u, threadIdx.x / 32 % 4, 0);
    int lane = threadIdx.x % 32;
    hold(lane);  // Otherwise every tile would read the slow register.

    if (threadIdx.x == 0) {
        barrier_init(sm.keys_full, 1);
        for (int i = 0; i < STAGES; i++) {
            barrier_init(sm.codes_full[i], 1);
            barrier_init(sm.codes_free[i], 4 * CONSUMERS);
            barrier_init(sm.wide_full[i], 1);
            barrier_init(sm.wide_free[i], 4 * CONSUMERS);
        }
        for (int i = 0; i < 2; i++) {
            barrier_init(sm.ds_full[i], 4 * CONSUMERS);
            barrier_init(sm.ds_free[i], 4 * BLOCKS_D);
        }
        for (int i = 0; i < CONSUMERS; i++) {
            barrier_init(sm.dq_full[i], 4);
            barrier_init(sm.dq_free[i], 1);
        }
        fence_barriers();
    }
    __syncthreads();

    const Problem problem = {kv_heads, n_q, n_k, causal, starts, ends, heads, heads_at_once};
    const Work work = work_of(blockIdx.x / CLUSTER, problem);
    const int bh_kv = work.bh, batch = bh_kv / kv_heads, kv_head = bh_kv % kv_heads;
    const int rank = blockIdx.x % CLUSTER, share = group / CLUSTER, first_head = rank * share;
    const int first_key = work.block * KEYS, first_tile = work.first, last_tile = work.last;

    if (warpgroup == 0) {
        fewer_registers<PRODUCER_REGISTERS>();
        if (lane != 0) return;
        int i = 0;
        if (warp == 0) {  // This warp fetches codes of Q and vectors.
            arrive_expect(sm.keys_full, KEYS * D * 3);
            copy_in(sm.k8, k8_map, 0, first_key, kv_head, batch, sm.keys_full);
#pragma unroll 1  // The fetching warps are short of registers.
            for (int b = 0; b < BLOCKS_D; b++)
                copy_in(sm.v + b * KEYS * 64, v_map, b * 64, first_key, kv_head, batch, sm.keys_full);
            for (int g = first_head; g < first_head + share; g++) {
                int head = kv_head * group + g;
                const float* row = vectors + (u64)(bh_kv * group + g) * q_tiles * VECTORS;
                for (int m = last_tile - 1; m >= first_tile; m--, i++) {
                    u64& bar = sm.codes_full[place(i)];
                    wait(sm.codes_free[place(i)], parity(i) ^ 1);
                    arrive_expect(bar, QUERIES * D + VECTORS * 4);
                    copy_in(sm.q8[place(i)], q8_map, 0, m * QUERIES, head, batch, bar);
                    copy_in(sm.vectors[place(i)], row + m * VECTORS, VECTORS * 4, bar);
                }
            }
        } else if (warp == 1) {  // This warp fetches dO and Q.
            for (int g = first_head; g < first_head + share; g++) {
                int head = kv_head * group + g;
                for (int m = last_tile - 1; m >= first_tile; m--, i++) {
                    u64& bar = sm.wide_full[place(i)];
                    wait(sm.wide_free[place(i)], parity(i) ^ 1);
                    arrive_expect(bar, QUERIES * D * 4);
                    for (int b = 0; b < BLOCKS_D; b++)
                        copy_in(sm.dO[place(i)] + b * 4096, do_map, b * 64, m * QUERIES, head, batch, bar);
                    for (int b = 0; b < BLOCKS_D; b++)
                        copy_in(sm.q[place(i)] + b * 4096, q_map, b * 64, m * QUERIES, head, batch, bar);
                }
            }
        } else if (warp - 2 < BLOCKS_D) {  // These warps add 64 columns of dQ each to global memory.
            const int block = warp - 2;
            int part = -1;
            for (int g = first_head; g < first_head + share; g++) {
                int bh = bh_kv * group + g;
                for (int m = last_tile - 1; m >= first_tile; m--, i++) {
                    int before = part, from = block * ROUND + i % ROUND;
                    part = (bh * q_tiles + m) * BLOCKS_D + block;
                    if (turns) {
                        int turn = turn_of(work.block, m, problem);
                        while (load_relaxed(turns + part) != turn) continue;
                    }
                    wait(sm.dq_full[from], i / ROUND & 1);
                    add_out(dq_sum + (u64)part * DQ_PART, sm.dq[from], DQ_PART * 4);
                    copies_commit();
                    copies_wait_read();
                    arrive(sm.dq_free[from]);
                    if (turns && before >= 0) copies_wait<1>(), add_relaxed(turns + before, 1);
                }
            }
            if (turns && part >= 0) copies_wait<0>(), add_relaxed(turns + part, 1);
        }
        return;
    }

    more_registers<CONSUMER_REGISTERS>();
    const int wg = warpgroup - 1;

    // int becomes float because accumulators begin at MAGIC's bits. The scale has 22 bits, so that MAGIC times it is
    // exact.
    const float MAGIC = 12582912.f;
    float ks[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
        int key = first_key + wg * 64 + warp * 16 + lane / 4 + 8 * r;
        ks[r] = key < n_k ? k_scale[bh_kv * n_k + key] : 0.f;
        ks[r] = __int_as_float(__float_as_int(ks[r]) & -4);
    }

    // These are the operands in shared memory, and the places where this thread writes.
    const u64 k8_op = operand<D == 128 ? 128 : 64>(sm.k8 + wg * 64 * D), v_op = operand(sm.v + wg * 64 * 64);
    const u64 k_op = operand(sm.k + wg / ROUND * KEYS * 64);
    u32 ds_row = address(sm.ds[0]) + (wg * 64 + warp * 16 + lane % 16) * 128 + ((lane / 16 ^ lane % 8) << 4);
    u32 columns = address(sm.vectors) + (AHEAD ? lane % 4 * 32 + 8 : lane % 4 * 16);
    u32 dq_at = address(sm.dq[wg]) + (warp * 8 * 32 + lane) * 16;
    hold(ds_row), hold(columns), hold(dq_at);  // Otherwise every tile would compute them again.

    float dk[D / 2], dv[D / 2], p[32], dp[32];
    float q_scale[16], lse[16];  // The vectors of the columns.
    u32 s[32], p16[16], ds16[16], ones[4];
#pragma unroll
    for (int i = 0; i < D / 2; i++) dk[i] = dv[i] = 0.f;

    auto signal = [&](u64& bar) {
        __syncwarp();
        if (lane == 0) arrive(bar);
    };
    auto widen_k = [&] {  // Widen half of the columns to bfloat16, a row by each thread.
        const int thread = wg * 128 + warp * 32 + lane, row = thread % KEYS, key = first_key + row;
        const float factor = key < n_k ? k_scale[bh_kv * n_k + key] : 0.f;
#pragma unroll 1
        for (int i = 0; i < D / 32; i++) {
            int column = thread / KEYS * (D / 2) + 16 * i;
            float4 x = load_shared(address(sm.k8) + row * D + (column ^ (D == 128 ? row % 8 : row / 2 % 4) << 4));
            const float words[4] = {x.x, x.y, x.z, x.w};
            float y[16], packed[8];
#pragma unroll
            // code + 128 is the lowest byte of 2^23 + 128 + code.
            for (int j = 0; j < 16; j++) {
                u32 bytes = __float_as_int(words[j / 4]) ^ 0x80808080;
                y[j] = (__uint_as_float(__byte_perm(bytes, 0x4B000000, 0x7650 + j % 4)) - 8388736.f) * factor;
            }
#pragma unroll
            for (int j = 0; j < 8; j++) packed[j] = __uint_as_float(pack_bf16(y[2 * j], y[2 * j + 1]));
            u32 to = address(sm.k) + column / 64 * (KEYS * 128) + row * 128;
            store_shared(to + (column % 64 * 2 ^ row % 8 << 4), packed);
            store_shared(to + (column % 64 * 2 + 16 ^ row % 8 << 4), packed + 4);
        }
    };
    // Return whether this warpgroup computes dQ of the tile.
    auto mine = [&](int t) { return ROUND == 1 || t % ROUND == wg; };
    auto issue_s = [&](int stage) {
#pragma unroll
        for (int i = 0; i < 32; i++) s[i] = 0x4B400000;
        pin(s);
        wgmma_fence();
        u64 q_op = operand<D == 128 ? 128 : 64>(sm.q8[stage]);
#pragma unroll
        for (int i = 0; i < D / 32; i++) multiply_codes(s, k8_op + 2 * i, q_op + 2 * i);
        wgmma_commit();
    };
    auto begin_dp = [&](int stage) {  // Compute dP - delta: the sums begin at -delta.
        if (AHEAD) {  // Ones times the parts of -delta is a product of another shape, so it needs a fence.
            int same = lane;
            hold(same);  // Otherwise the operand would be held throughout.
            ones[0] = ones[1] = same % 4 < 2 ? 0x3F800000 : 0;  // Rows 1 1 0 0 0 0 0 0 of A.
            ones[2] = ones[3] = 0;
            wgmma_fence();
            multiply_tf32(dp, ones, operand<16>(sm.vectors[stage], 0));
            wgmma_commit();
        } else {
#pragma unroll
            for (int j = 0; j < 4; j++) {
                float4 x = load_shared(columns + stage * (VECTORS * 4) + 2 * QUERIES * 4 + 64 * j);
                dp[8 * j] = dp[8 * j + 2] = x.x;
                dp[8 * j + 1] = dp[8 * j + 3] = x.y;
                dp[8 * j + 4] = dp[8 * j + 6] = x.z;
                dp[8 * j + 5] = dp[8 * j + 7] = x.w;
            }
            pin(dp);
        }
    };
    auto issue_dp = [&](int stage) {
        u64 do_op = operand(sm.dO[stage]);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < D / 16; i++)
            multiply_rows(dp, v_op + i / 4 * (KEYS * 8) + i % 4 * 2, do_op + i / 4 * (QUERIES * 8) + i % 4 * 2);
        wgmma_commit();
    };
    auto load_columns = [&](int stage) {
        const u32 from = columns + stage * (VECTORS * 4);
        if (AHEAD) {
#pragma unroll
            for (int i = 0; i < 16; i++) {
                float2 x = load_shared_pair(from + i / 2 * 128 + i % 2 * 16);
                q_scale[i] = x.x, lse[i] = x.y;
            }
        } else {
#pragma unroll
            for (int i = 0; i < 8; i++) {
                float4 x = load_shared(from + 64 * i);
                float* y = (i < 4 ? q_scale : lse) + i % 4 * 4;
                y[0] = x.x, y[1] = x.y, y[2] = x.z, y[3] = x.w;
            }
        }
        pin(q_scale);
        pin(lse);
    };
    auto compute_p = [&](int m) {
#pragma unroll
        for (int i = 0; i < 32; i++) {
            int c = i / 4 * 2 + i % 2, r = i / 2 % 2;
            float x = __fmaf_rn(__uint_as_float(s[i]), ks[r], -MAGIC * ks[r]);
            p[i] = power2(__fmaf_rn(x, q_scale[c], -lse[c]));
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
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < 4; i++) multiply(dv, p16 + 4 * i, b + 128 * i);
        wgmma_commit();
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
            arrive(sm.ds_full[buffer]);
            if (t > 1 && mine(t - 2)) arrive(sm.dq_full[wg]);
        }
    };
    auto issue_dk = [&](int stage) {
        u64 b = operand(sm.q[stage], QUERIES * 128);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < 4; i++) multiply_bf16(dk, ds16 + 4 * i, b + 128 * i);
        wgmma_commit();
    };
    auto issue_dq = [&](float (&dq)[32], int t) {  // The result of tile -1 is never used.
        wait(sm.ds_full[t & 1], t >> 1 & 1);
        u64 ds_op = operand(sm.ds[t & 1]);
        wgmma_fence();
        multiply_columns<0>(dq, ds_op, k_op);
#pragma unroll
        for (int i = 1; i < KEYS / 16; i++) multiply_columns<1>(dq, ds_op + 128 * i, k_op + 128 * i);
        wgmma_commit();
    };
    // Send dQ to shared memory. The next compute_ds says that it is there.
    auto send_dq = [&](float (&dq)[32], int t) {
        if (t < 0) return;
        if (lane == 0) arrive(sm.ds_free[t & 1]);
        wait(sm.dq_free[wg], t / ROUND & 1 ^ 1);
#pragma unroll
        for (int j = 0; j < 8; j++) store_shared(dq_at + 512 * j, dq + 4 * j);
    };
    auto compute_dq = [&](int t) {
        float dq[32];
        issue_dq(dq, t);
        wgmma_wait<0>();
        pin(dq);
        send_dq(dq, t);
    };

    const int tiles = (last_tile - first_tile) * share;
    int m = last_tile - 1;
    wait(sm.keys_full, 0);
    widen_k();  // The copy is fenced and announced with the first dS.
    if (tiles) wait(sm.codes_full[0], 0);
    load_columns(0);
    issue_s(0);
    if (AHEAD) begin_dp(0);
    wgmma_wait<0>();
    pin(s);
    for (int t = 0; t < tiles; t++) {
        const int now = place(t), next = place(t + 1);
        auto multiply_dp = [&] {
            wait(sm.wide_full[now], parity(t));
            issue_dp(now);
            wait(sm.ds_free[t & 1], t >> 1 & 1 ^ 1);
        };
        auto await_codes = [&] {
            if (t + 1 < tiles) wait(sm.codes_full[next], parity(t + 1));
        };
        auto end_dk = [&] {
            wgmma_wait<1>();
            pin(p16);
            pin(ds16);
            signal(sm.wide_free[now]);
        };
        if (AHEAD) multiply_dp();
        compute_p(m);
        if (!AHEAD) begin_dp(now), multiply_dp();
        issue_dv(now);
        wgmma_wait<1>();
        pin(dp);
        // The signal comes no earlier, because loads may be on their way until their values are used.
        signal(sm.codes_free[now]);
        compute_ds(t);
        issue_dk(now);
        if (AHEAD) {
            float dq[32];
            issue_dq(dq, t - 1);
            end_dk();
            await_codes();
            load_columns(next);
            issue_s(next);
            wgmma_wait<1>();
            pin(dq);
            send_dq(dq, t - 1);
            begin_dp(next);
        } else {
            if (mine(t - 1)) compute_dq(t - 1);
            await_codes();
            issue_s(next);
            end_dk();
            load_columns(next);
        }
        wgmma_wait<0>();
        pin(s);
        if (AHEAD) pin(ones);
        if (--m < first_tile) m = last_tile - 1;
    }
    wgmma_wait<0>();
    pin(dk);
    pin(dv);
    fence_async();
    if (tiles > 1 && mine(tiles - 2)) signal(sm.dq_full[wg]);
    if (tiles && mine(tiles - 1)) {
        compute_dq(tiles - 1);
        fence_async();
        signal(sm.dq_full[wg]);
    }

    const u32 out_row = (warp * 16 + lane % 16) * 128 + ((lane / 16 ^ lane % 8) << 4);
    // Narrow columns of 64 keys to 16 bits, and store them for the copy engine.
    auto send = [&](auto& x, float factor, u32 to, int block_bytes) {
#pragma unroll
        for (int i = 0; i < (int)sizeof x / 32; i++) {
            u32 y[4];
#pragma unroll
            for (int j = 0; j < 4; j++) y[j] = pack(x[8 * i + 2 * j] * factor, x[8 * i + 2 * j + 1] * factor);
            store_matrices((to + out_row ^ i % 4 << 5) + i / 4 * block_bytes, y);
        }
        fence_async();
        warpgroup_barrier(wg);
    };
    if (CLUSTER > 1) {
        cluster_barrier();  // No warpgroup needs its tiles any more, and the warps that add dQ have ended.
        // Each thread has its 64 columns of dV, and then of dK, in words of 16 bytes.
        constexpr int STEP = 128 * CONSUMERS * 16;
        const u32 own = address(&sm) + (wg * 128 + warp * 32 + lane) * 16;
#pragma unroll
        for (int i = 0; i < D / 8; i++) {
            store_shared(own + i * STEP, dv + 4 * i);
            store_shared(own + (D / 8 + i) * STEP, dk + 4 * i);
        }
        cluster_barrier();  // They are there.
        for (int part = rank; part < 2 * BLOCKS_D; part += CLUSTER) {
            float x[32] = {};
            for (int other = 0; other < CLUSTER; other++)
#pragma unroll
                for (int i = 0; i < 8; i++) {
                    const float4 y = load_shared_of(other, own + (8 * part + i) * STEP);
                    x[4 * i] += y.x, x[4 * i + 1] += y.y, x[4 * i + 2] += y.z, x[4 * i + 3] += y.w;
                }
            const bool of_v = part < BLOCKS_D;
            const int column = part % BLOCKS_D * 64;
            send(x, of_v ? 1.f : scale, address(sm.dO[0] + wg * 4096), 0);
            if (warp == 0 && lane == 0) {
                if (of_v) copy_out(dv_map, column, first_key + wg * 64, kv_head, batch, sm.dO[0] + wg * 4096);
                else copy_out(dk_map, column, first_key + wg * 64, kv_head, batch, sm.dO[0] + wg * 4096);
                copies_commit();
                copies_wait_read();
            }
            warpgroup_barrier(wg);  // The next part goes to the same place.
        }
        cluster_barrier();  // Other blocks may still read this one's shared memory.
        return;
    }
    // dV leaves through this warpgroup's part of V, and dK through its part of dQ.
    send(dv, 1.f, address(sm.v + wg * 64 * 64), KEYS * 128);
    const int rounds = (tiles + ROUND - 1 - wg % ROUND) / ROUND;  // The number of tiles that were `mine`.
    if (rounds) wait(sm.dq_free[wg], rounds - 1 & 1);
    send(dk, scale, address(sm.dq[wg]), 64 * 128);
    if (warp == 0 && lane == 0) {
        for (int b = 0; b < BLOCKS_D; b++) {
            copy_out(dv_map, b * 64, first_key + wg * 64, kv_head, batch, sm.v + b * KEYS * 64 + wg * 64 * 64);
            copy_out(dk_map, b * 64, first_key + wg * 64, kv_head, batch, (char*)sm.dq[wg] + b * 64 * 128);
        }
        copies_commit();
        copies_wait_read();  // The next block need not wait until the copies have been written.
    }
}
