// Stand-ins for Hopper's instructions, to run hopper_forward.cu on a CPU: every thread of a block is a fiber.
//
// Copies land late and in any order, out-of-range rows become zeros, and shared memory starts poisoned. Products read
// their operands, in registers and in shared memory, when they are waited for: as late as the hardware may. Layouts are
// those of the PTX manual: fragments, matrix descriptors, swizzles. When no fiber can go on, run() says so.
#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <vector>

#define __device__
#define __forceinline__ inline
#define __global__
#define __shared__
#define __grid_constant__
#define __align__(n)
#define __launch_bounds__(...)

struct Index { int x; };
struct uint2 { unsigned x, y; };
struct float4 { float x, y, z, w; };
static Index threadIdx, blockIdx, gridDim;
alignas(1024) unsigned char memory[232448];

static float __int_as_float(unsigned x) { float y; memcpy(&y, &x, 4); return y; }
static int __float_as_int(float x) { int y; memcpy(&y, &x, 4); return y; }
static float __int2float_rn(int x) { return (float)x; }
static float __fmul_rn(float a, float b) { return a * b; }
static uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
static unsigned __byte_perm(unsigned a, unsigned b, unsigned s) {
    uint64_t both = (uint64_t)b << 32 | a;
    unsigned y = 0;
    for (int i = 0; i < 4; i++) y |= (unsigned)(both >> 8 * (s >> 4 * i & 7) & 255) << 8 * i;
    return y;
}
static int atomicAdd(int *p, int x) { int old = *p; *p += x; return old; }

// ---- Fibers

struct Op { int kind, accumulate; void *sums; const unsigned *a; uint64_t b; };
struct Fiber {
    ucontext_t context;
    std::vector<char> stack;
    bool done;
    std::vector<Op> open;
    std::vector<std::vector<Op>> groups;
    unsigned word;
    const unsigned *fragment, *column;
};
struct Meeting { int count = 0; unsigned turn = 0; };
static std::vector<Fiber> fibers;
static std::vector<Meeting> warps;
static Meeting all;
static ucontext_t scheduler;
static bool progress;

static Fiber &me() { return fibers[threadIdx.x]; }
static void yield() {
    int x = threadIdx.x;
    swapcontext(&fibers[x].context, &scheduler);
}
static void meet(Meeting &m, int size) {
    unsigned turn = m.turn;
    if (++m.count == size) m.count = 0, m.turn++, progress = true;
    else while (m.turn == turn) yield();
}
static void __syncwarp() { meet(warps[threadIdx.x / 32], 32); }
static void __syncthreads() { meet(all, (int)fibers.size()); }
static unsigned exchange(unsigned x, int lane) {
    me().word = x;
    __syncwarp();
    unsigned y = fibers[threadIdx.x / 32 * 32 + lane].word;
    __syncwarp();
    return y;
}
static int __shfl_xor_sync(unsigned, int x, int d) { return exchange(x, threadIdx.x % 32 ^ d); }
static unsigned __shfl_xor_sync(unsigned, unsigned x, int d) { return exchange(x, threadIdx.x % 32 ^ d); }
static float __shfl_xor_sync(unsigned, float x, int d) {
    return __int_as_float(exchange(__float_as_int(x), threadIdx.x % 32 ^ d));
}
static int __shfl_sync(unsigned, int x, int lane) { return exchange(x, lane); }
static bool __any_sync(unsigned, bool x) {
    me().word = x;
    __syncwarp();
    bool y = false;
    for (int i = 0; i < 32; i++) y |= fibers[threadIdx.x / 32 * 32 + i].word;
    __syncwarp();
    return y;
}

// ---- Barriers and copies

struct Barrier { int count, pending, bytes; unsigned phase; };
static std::map<const void *, Barrier> barriers;
static void settle(Barrier &b) {
    if (b.pending < 0) abort();
    if (b.pending == 0 && b.bytes == 0) b.pending = b.count, b.phase ^= 1, progress = true;
}
static void barrier_init(u64 &b, u32 arrivals) { barriers[&b] = {(int)arrivals, (int)arrivals, 0, 0}; }
static void fence_barriers() {}
static void arrive(u64 &b) { Barrier &x = barriers.at(&b); x.pending--; settle(x); }
static void arrive_expect(u64 &b, u32 bytes) { Barrier &x = barriers.at(&b); x.bytes += bytes; x.pending--; settle(x); }
static void wait(u64 &b, u32 parity) { while (barriers.at(&b).phase == parity) yield(); }

struct Map { const char *base; long size[4], stride[4]; int box[4], element, swizzle; };  // last dimension first
struct Copy { char *to; const Map *map; const void *from; int at[4]; u32 bytes; u64 *barrier; };
static std::vector<Copy> copies;
static u32 swizzled(u32 a, int span) { return a ^ (a >> 7 & (span / 16 - 1)) << 4; }
static void perform(const Copy &c) {
    u32 to = (unsigned char *)c.to - memory, bytes = 0;
    if (!c.map) memcpy(c.to, c.from, bytes = c.bytes);
    else {
        const Map &m = *c.map;
        for (int w = 0; w < m.box[3]; w++) for (int z = 0; z < m.box[2]; z++) for (int y = 0; y < m.box[1]; y++) {
            long at[4] = {c.at[0], c.at[1] + y, c.at[2] + z, c.at[3] + w}, offset = at[0] * m.element;
            bool inside = true;
            for (int d = 1; d < 4; d++) inside &= at[d] >= 0 && at[d] < m.size[d], offset += at[d] * m.stride[d];
            for (int x = 0; x < m.box[0] * m.element; x++)
                memory[swizzled(to + bytes++, m.swizzle)] = inside ? m.base[offset + x] : 0;
        }
    }
    Barrier &b = barriers.at(c.barrier);
    b.bytes -= bytes, progress = true;
    settle(b);
}
static void copy(void *to, const void *from, u32 bytes, u64 &b) {
    copies.push_back({(char *)to, nullptr, from, {}, bytes, &b});
}
static void copy(void *to, const TensorMap &m, int x, int y, int z, int w, u64 &b) {
    copies.push_back({(char *)to, (Map *)m.words[0], nullptr, {x, y, z, w}, 0, &b});
}
static void copy(void *to, const TensorMap &m, int x, int y, int z, u64 &b) { copy(to, m, x, y, z, 0, b); }

// ---- Products

static u64 descriptor(const void *p, u32 leading, u32 stride, u64 swizzle) {
    u64 start = (unsigned char *)p - memory;
    return start >> 4 | (u64)(leading >> 4) << 16 | (u64)(stride >> 4) << 32 | swizzle << 62;
}
static float bf16(unsigned x) { return __int_as_float(x << 16); }
static int byte_of(const unsigned *words, int i) { return (int8_t)(words[i / 4] >> 8 * (i % 4)); }
static void multiply(size_t index, const Op &op) {
    u32 start = (op.b & 0x3FFF) << 4, leading = (op.b >> 16 & 0x3FFF) << 4, stride = (op.b >> 32 & 0x3FFF) << 4;
    int span = op.b >> 62 == 1 ? 128 : 64, lane = threadIdx.x % 32;
    for (int i = 0; i < (op.kind == 0 ? BLOCK_N : D) / 8; i++) for (int e = 0; e < 4; e++) {
        int row = lane / 4 + e / 2 * 8, n = 8 * i + lane % 4 * 2 + e % 2;
        if (op.kind == 0) {
            int sum = op.accumulate ? ((int *)op.sums)[4 * i + e] : 0;
            for (int k = 0; k < 32; k++) {
                const Fiber &owner = fibers[threadIdx.x / 32 * 32 + row % 8 * 4 + k % 16 / 4];
                int a = byte_of(owner.groups[0][index].a + k / 16 * 2 + row / 8, k % 4);
                sum += a * (int8_t)memory[swizzled(start + n / 8 * stride + n % 8 * span + k, span)];
            }
            ((int *)op.sums)[4 * i + e] = sum;
        } else {
            float sum = ((float *)op.sums)[4 * i + e];
            for (int k = 0; k < 16; k++) {
                const Fiber &owner = fibers[threadIdx.x / 32 * 32 + row % 8 * 4 + k % 8 / 2];
                unsigned word = owner.groups[0][index].a[k / 8 * 2 + row / 8];
                u32 at = swizzled(start + n / 64 * leading + k / 8 * stride + k % 8 * 128 + n % 64 * 2, 128);
                sum += bf16(word >> 16 * (k % 2) & 0xFFFF) * bf16(memory[at] | memory[at + 1] << 8);
            }
            ((float *)op.sums)[4 * i + e] = sum;
        }
    }
}
static void wgmma_fence() {}
static void wgmma_commit() { me().groups.push_back(std::move(me().open)); me().open.clear(); }
template <int PENDING> static void wgmma_wait() {
    while (me().groups.size() > PENDING) {
        __syncwarp();
        for (size_t i = 0; i < me().groups[0].size(); i++) multiply(i, me().groups[0][i]);
        __syncwarp();
        me().groups.erase(me().groups.begin());
    }
}
template <class T, int N> static void pin(T (&)[N]) {}
template <int N> static void mma_scores(u32 (&s)[N], const u32 *a, u64 b, int accumulate) {
    me().open.push_back({0, accumulate, s, a, b});
}
template <int N> static void mma_values(float (&o)[N], const u32 *p, u64 v) { me().open.push_back({1, 1, o, p, v}); }
static void mma_warp(u32 *c, const u32 *a, u32 b0, u32 b1) {
    u32 column[2] = {b0, b1};
    me().fragment = a, me().column = column;
    __syncwarp();
    int lane = threadIdx.x % 32, base = threadIdx.x / 32 * 32;
    for (int e = 0; e < 4; e++) for (int k = 0; k < 32; k++) {
        int row = lane / 4 + e / 2 * 8, n = lane % 4 * 2 + e % 2, owner = k % 16 / 4;
        c[e] += byte_of(fibers[base + row % 8 * 4 + owner].fragment + k / 16 * 2 + row / 8, k % 4) *
                byte_of(fibers[base + n * 4 + owner].column + k / 16, k % 4);
    }
    __syncwarp();
}
template <int N> static void fewer_registers() {}
template <int N> static void more_registers() {}
static float power2(float x) { return exp2f(x); }
static float logarithm2(float x) { return log2f(x); }
static u32 round16(float x) { u32 b = __float_as_int(x); return x != x ? 0x7FFF : (b + 0x7FFF + (b >> 16 & 1)) >> 16; }
static u32 pack(float low, float high) { return round16(low) | round16(high) << 16; }
static void unpack(u32 x, float &low, float &high) { low = bf16(x & 0xFFFF), high = bf16(x >> 16); }
