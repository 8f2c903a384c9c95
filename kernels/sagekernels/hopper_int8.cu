// The product a b^T of INT8 codes with their scales on Hopper.
//
// A block of threads is persistent. One warp fetches (TMA), and two warpgroups own 64 rows of a tile of 128 x 256 each.
// The CLUSTER blocks of a cluster have tiles one below the other. Each of them fetches a part of b for all, so a tile
// takes 32 KB from L2 for 128 x 256 x 128 products, and not 48. Results leave by the copy engine, beside the products of
// the next tile.
//
// Macros: CLUSTER (2), STAGES, RESULT (2: fp32), FP16 (16-bit results are float16), SHARED_BYTES.

#include "hopper.cuh"

constexpr int BLOCK_M = 128, BLOCK_N = 256, BLOCK_K = 128, CONSUMERS = 2, THREADS = 128 * (CONSUMERS + 1);
constexpr int A_BYTES = BLOCK_M * BLOCK_K, B_BYTES = BLOCK_N * BLOCK_K;
// Rows of 128 bytes are stored at a time.
constexpr int STORED = RESULT == 2 ? 32 : 64, CHUNK_BYTES = 64 * 128;
constexpr int CONSUMER_REGISTERS = 232, PRODUCER_REGISTERS = 40;
static_assert(128 * (PRODUCER_REGISTERS + CONSUMERS * CONSUMER_REGISTERS) <= 65536 / THREADS / 8 * 8 * THREADS);

struct Shared {
    alignas(1024) unsigned char a[STAGES][A_BYTES];
    alignas(1024) unsigned char b[STAGES][B_BYTES];
    alignas(1024) unsigned char out[CONSUMERS][2][CHUNK_BYTES];
    float scale[CONSUMERS][BLOCK_N];
    int tile[STAGES];  // The tile that begins with the codes of a stage; -1: there is none left.
    int sent;  // The next tile of the cluster, from its first block.
    u64 full[STAGES], free[STAGES], sent_full, sent_free;
};
static_assert(sizeof(Shared) == SHARED_BYTES);

// The place in the pipeline, and the parity of the barriers there.
struct Ring {
    int stage;
    u32 parity;
    DEVICE Ring next() const { return stage + 1 == STAGES ? Ring{0, parity ^ 1} : Ring{stage + 1, parity}; }
};

// Tiles of a cluster are numbered down groups of them, which share the part of b that L2 holds, then to the right.
struct Tiles {
    int down, across, group;

    DEVICE void place(int tile, int &top, int &left) const {
        int first = tile / (group * across) * group, within = tile % (group * across);
        int high = down - first < group ? down - first : group;
        top = (first + within % high) * BLOCK_M * CLUSTER + blockIdx.x % CLUSTER * BLOCK_M;
        left = within / high * BLOCK_N;
    }
};

DEVICE void produce(
    Shared &shared, const TensorMap &a, const TensorMap &b, const Tiles &tiles, int steps, int *taken) {
    constexpr int PART = BLOCK_N / CLUSTER;
    const int rank = blockIdx.x % CLUSTER;
    Ring at{0, 0};
    int next;
    u32 sent = 0;
    for (int tile = blockIdx.x / CLUSTER; tile < tiles.down * tiles.across; tile = next) {
        // Where others may hold multiprocessors, some blocks begin late. Tiles then come from a counter.
        if (!taken) {
            next = tile + gridDim.x / CLUSTER;
        } else if (rank == 0) {
            next = gridDim.x / CLUSTER + atomicAdd(taken, 1);
            wait(shared.sent_free, sent ^ 1);
            send(shared.sent, next, shared.sent_full, 1);
        } else {
            wait_sent(shared.sent_full, sent);
            next = shared.sent;
            arrive_at(shared.sent_free, 0);
        }
        sent ^= 1;
        int top, left;
        tiles.place(tile, top, left);
#pragma unroll 1
        for (int step = 0; step < steps; step++, at = at.next()) {
            // Codes of another block may come before this one expects them, but not before it has given the stage back.
            wait(shared.free[at.stage], at.parity ^ 1);
            shared.tile[at.stage] = tile;
            arrive_expect(shared.full[at.stage], A_BYTES + B_BYTES);
            copy_in(shared.a[at.stage], a, step * BLOCK_K, top, 0, shared.full[at.stage]);
            unsigned char *to = shared.b[at.stage] + rank * PART * BLOCK_K;
            copy_in_all(to, b, step * BLOCK_K, left + rank * PART, 0, shared.full[at.stage], (1 << CLUSTER) - 1);
        }
    }
    wait(shared.free[at.stage], at.parity ^ 1);
    shared.tile[at.stage] = -1;
    arrive(shared.full[at.stage]);
}

DEVICE void consume(
    Shared &shared, const TensorMap &out, const float *a_scale, const float *b_scale,
    const Tiles &tiles, int rows, int columns, int steps) {
    const int wg = threadIdx.x / 128 - 1, thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32;
    auto give_back = [&](int stage) {
        if (lane < CLUSTER) arrive_at(shared.free[stage], lane);
    };
    Ring at{0, 0};
    for (;;) {
        wait(shared.full[at.stage], at.parity);
        const int tile = shared.tile[at.stage];
        if (tile < 0) break;
        int top, left;
        tiles.place(tile, top, left);
        float of_row[2], of_column[2];
#pragma unroll
        for (int r = 0; r < 2; r++) {
            int row = top + wg * 64 + warp * 16 + lane / 4 + 8 * r, column = left + thread + 128 * r;
            of_row[r] = row < rows ? a_scale[row] : 0.0f;
            of_column[r] = column < columns ? b_scale[column] : 0.0f;
        }
        u32 sum[128];
        int before = 0;
#pragma unroll 1
        for (int step = 0; step < steps; step++) {
            if (step) wait(shared.full[at.stage], at.parity);
            u64 a = operand(shared.a[at.stage] + wg * 64 * BLOCK_K), b = operand(shared.b[at.stage]);
            wgmma_fence();
#pragma unroll
            for (int j = 0; j < BLOCK_K / 32; j++) multiply_codes(sum, a + 2 * j, b + 2 * j, step + j > 0);
            wgmma_commit();
            wgmma_wait<1>();
            if (step) give_back(before);
            before = at.stage;
            at = at.next();
        }
        wgmma_wait<0>();
        pin(sum);
        give_back(before);
        // ---- Results
#pragma unroll
        for (int r = 0; r < 2; r++) shared.scale[wg][thread + 128 * r] = of_column[r];
        const int row = warp * 16 + lane / 4;
#pragma unroll
        for (int chunk = 0; chunk < BLOCK_N / STORED; chunk++) {
            unsigned char *to = shared.out[wg][chunk % 2];
            if (thread == 0) copies_wait_read<1>();
            warpgroup_barrier(wg);
            const u32 base = address(to);
#pragma unroll
            for (int i = 0; i < STORED / 8; i += 2) {
                float x[8];
#pragma unroll
                for (int e = 0; e < 8; e++) {
                    const int column = chunk * STORED + 8 * (i + e / 4) + lane % 4 * 2 + e % 2;
                    const int word = 4 * (chunk * STORED / 8 + i) + e;
                    x[e] = __int2float_rn((int)sum[word]) * of_row[e / 2 % 2] * shared.scale[wg][column];
                }
#if RESULT == 2
#pragma unroll
                for (int e = 0; e < 8; e += 2) {
                    // Pairs of 8 bytes, in pieces of 16 that are swizzled.
                    const int line = row + e / 2 % 2 * 8, piece = 2 * (i + e / 4) + lane % 4 / 2;
                    store_shared_pair(base + line * 128 + ((piece ^ line % 8) << 4) + lane % 2 * 8, x[e], x[e + 1]);
                }
#else
                const u32 words[4] = {pack(x[0], x[1]), pack(x[2], x[3]), pack(x[4], x[5]), pack(x[6], x[7])};
                const int line = warp * 16 + lane % 16;
                store_matrices(base + line * 128 + (((i + lane / 16) ^ line % 8) << 4), words);
#endif
            }
            fence_async();
            warpgroup_barrier(wg);
            if (thread == 0) {
                copy_out(out, left + chunk * STORED, top + wg * 64, 0, 0, to);
                copies_commit();
            }
        }
    }
    if (thread == 0) copies_wait<0>();
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) CLUSTER_OF(CLUSTER) int8_product(
    const __grid_constant__ TensorMap a, const __grid_constant__ TensorMap b, const __grid_constant__ TensorMap out,
    const float *a_scale, const float *b_scale, int rows, int columns, int inner, int group, int *taken) {
    Shared &shared = shared_memory<Shared>();
    const int per_cluster = BLOCK_M * CLUSTER;
    const Tiles tiles{(rows + per_cluster - 1) / per_cluster, (columns + BLOCK_N - 1) / BLOCK_N, group};
    const int steps = (inner + BLOCK_K - 1) / BLOCK_K;
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) {
            barrier_init(shared.full[i], 1);
            barrier_init(shared.free[i], 4 * CONSUMERS * CLUSTER);
        }
        barrier_init(shared.sent_full, 1);
        barrier_init(shared.sent_free, 1);
        fence_barriers();
    }
    __syncthreads();
    cluster_barrier();
    if (threadIdx.x < 128) {
        fewer_registers<PRODUCER_REGISTERS>();
        if (threadIdx.x == 0) produce(shared, a, b, tiles, steps, taken);
    } else {
        more_registers<CONSUMER_REGISTERS>();
        consume(shared, out, a_scale, b_scale, tiles, rows, columns, steps);
    }
    __syncthreads();
    cluster_barrier();  // Other blocks may still write to this one's shared memory.
}
