// The functions of kernels/sagekernels/hopper.cuh on a CPU. Everything asynchronous happens at the worst moment.
//
// Time is counted in turns of warps, which are drawn at random. Copies and products get a random time between their
// issue and the wait that covers them: they read then, and write later. Until then the destination of a copy and the
// registers of a product's sums hold poison. Layouts are those of the PTX manual: fragments, matrix descriptors,
// swizzles.
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <utility>
#include <vector>

typedef std::vector<uint32_t> Clock;  // The time up to which one has heard of each warp.
static void hear(Clock &mine, const Clock &other) {
    mine.resize(std::max(mine.size(), other.size()));
    for (size_t i = 0; i < other.size(); i++) mine[i] = std::max(mine[i], other[i]);
}
struct FiberState {
    std::vector<uint32_t> written;  // The units of shared memory that were written and not fenced.
    // The groups of copies: reads and writes to come, in the low and high half.
    std::deque<std::shared_ptr<int>> copies;
    std::shared_ptr<int> copying;
    size_t met = 0;  // The barriers of the cluster that it came to.
};
struct Product;
struct WarpState {
    long last = 0;  // The time of its last product.
    Clock clock = Clock(32);
    bool fenced = false;
    std::vector<std::shared_ptr<Product>> open;
    std::deque<std::vector<std::shared_ptr<Product>>> groups;
    // The sums of products in flight, by the register of lane 0.
    std::map<void *, std::pair<int, std::vector<uint32_t>>> sums;
};
struct Barrier { int count, pending, bytes; uint32_t phase; bool fenced; Clock heard, complete; };
struct MeetingState { Clock heard; };
// A write by a thread. Copies and products see it once it is fenced and heard of.
struct Write { int warp; uint32_t time; };
constexpr int SHARED = 232448, UNIT = 16;
struct BlockState {
    int spare = 0;  // The registers that were given back.
    int ended = 0;                // So many threads have ended.
    std::map<size_t, int> there;  // So many threads came to each barrier of the cluster.
    std::map<const void *, Barrier> barriers;
    std::vector<Write> writes = std::vector<Write>(SHARED / UNIT, {-1, 0});
};
#include "emulator.h"

// The struct of emulator.tensor_map.
struct TensorMap { int64_t base, element, swizzle, size[4], stride[4], box[4]; };
constexpr u32 NEVER = ~0u, POISON = 0x7FC0BEEF;
static void publish(Clock &to) { warp().clock[threadIdx.x / 32]++, hear(to, warp().clock); }
static void arriving(Meeting &m) { publish(m.heard); }
static void passing(Meeting &m) { hear(warp().clock, m.heard); }
static void ending() {
    if (me->copying || std::any_of(me->copies.begin(), me->copies.end(), [](auto &g) { return g && *g & 0xFFFF; }))
        fail("a thread leaves while copies read its shared memory");
    block->ended++;
}
static void __syncwarp() { together("syncwarp", *me, [](Fiber **) {}); }
static void warpgroup_barrier(int i) { meet(1 + i, 128); }
template <class T> static void pin(T &) {}
template <int N> static void fewer_registers() {
    block->spare += 65536 / block->threads / 8 * 8 - N;
}
template <int N> static void more_registers() {
    until([b = block] { return b->spare >= N - 65536 / b->threads / 8 * 8; }, "setmaxnreg.inc");
    block->spare -= N - 65536 / block->threads / 8 * 8;
}

// ---- Shared memory and barriers

static void reading(u32, int) {}
static void writing(u32 to, int bytes) {
    for (u32 unit = to / UNIT; unit <= (to + bytes - 1) / UNIT; unit++)
        block->writes[unit] = {threadIdx.x / 32, NEVER}, me->written.push_back(unit);
}
static void fence_async() {
    for (u32 unit : me->written) {
        Write &w = block->writes[unit];
        if (w.warp == threadIdx.x / 32) w.time = warp().clock[w.warp];
    }
    me->written.clear();
}
// Return whether a copy or product that this warp issues may read or overwrite there: everything stored is fenced and
// heard of.
static bool visible(u32 from, u32 bytes) {
    if (from + bytes > SHARED) fail("outside of shared memory");
    for (u32 unit = from / UNIT; unit < (from + bytes + UNIT - 1) / UNIT; unit++) {
        const Write &w = block->writes[unit];
        bool own = w.warp == threadIdx.x / 32;
        if (w.warp >= 0 && (w.time == NEVER || !own && warp().clock[w.warp] <= w.time)) return false;
    }
    return true;
}
static void store_matrices(u32 to, const u32 *x) {
    struct { u32 to; const u32 *x; u32 at[4]; } mine{to, x};
    together("stmatrix", mine, [](auto **all) {
        for (int lane = 0; lane < 32; lane++)
            for (int i = 0; i < 4; i++) all[lane]->at[i] = all[8 * i + lane / 4]->to + lane % 4 * 4;
    });
    for (int i = 0; i < 4; i++) store(mine.at[i], x + i, 4);
}

static std::string name(const void *p) { return "the barrier at " + std::to_string(address(p)); }
static Barrier &barrier_at(const void *p) {
    auto found = block->barriers.find(p);
    if (found == block->barriers.end()) fail(name(p) + " was not initialized");
    return found->second;
}
static void settle(Barrier &b) {
    if (b.pending == 0 && b.bytes == 0) b.pending = b.count, b.phase ^= 1, b.complete = b.heard;
}
static void barrier_init(u64 &b, u32 arrivals) { block->barriers[&b] = {(int)arrivals, (int)arrivals, 0, 0, false}; }
static void fence_barriers() { for (auto &b : block->barriers) b.second.fenced = true; }
static void arrive_expect(u64 &at, u32 bytes) {
    Barrier &b = barrier_at(&at);
    publish(b.heard);
    b.bytes += bytes;
    if (b.pending-- == 0) fail("one arrival too many at " + name(&at));
    settle(b);
}
static void arrive(u64 &at) { arrive_expect(at, 0); }

// ---- Clusters: CLUSTER blocks that follow one another run at the same time

#ifndef CLUSTER
#define CLUSTER 1
#endif
#define CLUSTER_OF(n)
static Block &neighbour(int rank) {
    int index = block->index / CLUSTER * CLUSTER + rank;
    for (auto &b : blocks) if (b->index == index) return *b;
    fail("block " + std::to_string(index) + " of the cluster has ended");
}
template <class T> static T &there(Block &other, T &mine) { return *(T *)(other.memory + address(&mine)); }
static void arrive_at(u64 &at, int rank) {
    Block &other = neighbour(rank), *home = block;
    u64 &theirs = there(other, at);
    if (&other == home) return arrive(at);
    block = &other;
    Barrier &b = barrier_at(&theirs);
    if (b.pending-- == 0) fail("one arrival too many at " + name(&theirs));
    settle(b);
    block = home;
}
static void send(int &to, int x, u64 &at, int rank) {
    there(neighbour(rank), to) = x;
    arrive_at(at, rank);
}
static void wait_sent(u64 &at, u32 parity) {
    Barrier &b = barrier_at(&at);
    until([&b, parity] { return b.phase != parity; }, "what another block sends by " + name(&at));
}
static void cluster_barrier() {
    // Nothing is known to be ready in another block before the barrier.
    block->there[me->met]++;
    until([turn = me->met++, cluster = block->index / CLUSTER] {
        return begun >= (cluster + 1) * CLUSTER && std::all_of(blocks.begin(), blocks.end(), [=](auto &b) {
            return b->index / CLUSTER != cluster || b->there[turn] + b->ended >= b->threads; });
    }, "barrier.cluster");
}
static float4 load_shared_of(int rank, u32 from) {
    float4 x;
    memcpy(&x, neighbour(rank).memory + from, sizeof x);
    return x;
}
static void wait(u64 &at, u32 parity) {
    Barrier &b = barrier_at(&at);
    until([&b, parity] { return b.phase != parity; }, "parity " + std::to_string(parity) + " of " + name(&at));
    hear(warp().clock, b.complete);
}

// ---- Copies

static u32 swizzled(u32 a, int span) { return span < 32 ? a : a ^ (a >> 7 & (span / 16 - 1)) << 4; }
static u32 box_bytes(const TensorMap &m) { return m.box[0] * m.box[1] * m.box[2] * m.box[3] * m.element; }
// Call f(address in shared memory, bytes, in global memory or null) for 16 bytes at a time.
template <class F> static void each_piece(const TensorMap &m, u32 shared, int x, int y, int z, int w, F f) {
    for (int d = 0; d < m.box[3]; d++) for (int c = 0; c < m.box[2]; c++) for (int b = 0; b < m.box[1]; b++) {
        bool inside = y + b < m.size[1] && z + c < m.size[2] && w + d < m.size[3];
        char *row = (char *)m.base + x * m.element + (y + b) * m.stride[1] + (z + c) * m.stride[2] +
                    (w + d) * m.stride[3];
        for (int a = 0; a < m.box[0] * m.element; a += 16, shared += 16)
            f(swizzled(shared, m.swizzle), inside && x + a / m.element < m.size[0] ? row + a : nullptr);
    }
}
static void land(void *to, u32 bytes, u64 &barrier, std::function<void()> act) {
    if (!barrier_at(&barrier).fenced) fail(name(&barrier) + " is not known to the copy engine");
    if (!visible(address(to), bytes)) fail("a copy overtakes what was stored where it goes");
    for (u32 unit = address(to) / UNIT; unit < (address(to) + bytes) / UNIT; unit++) block->writes[unit].warp = -1;
    memset(to, 0xFF, bytes);
    events.push_back({soon(), [=, home = block, b = &barrier_at(&barrier)] {
        block = home, act(), b->bytes -= bytes, settle(*b);
    }});
}
static void copy_in(void *to, const void *from, u32 bytes, u64 &barrier) {
    land(to, bytes, barrier, [=] { memcpy(to, from, bytes); });
}
static void copy_in(void *to, const TensorMap &map, int x, int y, int z, int w, u64 &barrier) {
    if (address(to) % 128) fail("a box goes to an address that is not a multiple of 128");
    land(to, box_bytes(map), barrier, [=, m = &map] {
        each_piece(*m, address(to), x, y, z, w, [](u32 at, char *from) {
            from ? memcpy(block->memory + at, from, 16) : memset(block->memory + at, 0, 16);
        });
    });
}
static void copy_in(void *to, const TensorMap &map, int x, int y, int z, u64 &b) { copy_in(to, map, x, y, z, 0, b); }
static void copy_in_all(void *to, const TensorMap &map, int x, int y, int z, u64 &b, int ranks) {
    Block *home = block;
    for (int rank = 0; rank < CLUSTER; rank++) if (ranks >> rank & 1) {
        Block &other = neighbour(rank);
        void *theirs = other.memory + address(to);
        u64 &barrier = there(other, b);
        block = &other;
        copy_in(theirs, map, x, y, z, barrier);
        block = home;
    }
}
// Read shared memory at one time, and write at another. `left` counts both down.
static void send(const void *from, u32 bytes, std::function<void(const unsigned char *)> write) {
    if (!visible(address(from), bytes)) fail("a copy overtakes what was stored where it reads");
    if (!me->copying) me->copying = std::make_shared<int>(0);
    *me->copying += 0x10001;
    events.push_back({soon(12), [=, left = me->copying] {
        std::vector<unsigned char> content((char *)from, (char *)from + bytes);
        *left -= 1;
        events.push_back({soon(13), [=] { write(content.data()), *left -= 0x10000; }, true});
    }});
}
static void copy_out(const TensorMap &map, int x, int y, int z, int w, const void *from) {
    // The event outlives its block.
    send(from, box_bytes(map), [=, m = map, start = address(from)](const unsigned char *content) {
        each_piece(m, start, x, y, z, w, [=](u32 at, char *to) { if (to) memcpy(to, content + at - start, 16); });
    });
}
static void add_out(float *to, const float *from, u32 bytes) {
    send(from, bytes, [=](const unsigned char *content) {
        for (u32 i = 0; i < bytes / 4; i++) to[i] += ((const float *)content)[i];
    });
}
static void copies_commit() { me->copies.push_back(std::exchange(me->copying, nullptr)); }
static void copies_done(int mask, size_t newest) {
    std::vector<std::shared_ptr<int>> old(me->copies.begin(), me->copies.end() - std::min(newest, me->copies.size()));
    until([=] { return std::all_of(old.begin(), old.end(), [=](auto &g) { return !g || !(*g & mask); }); },
          "cp.async.bulk.wait_group");
}
template <int LEFT = 0> static void copies_wait_read() { copies_done(0xFFFF, LEFT); }
template <int LEFT> static void copies_wait() { copies_done(~0, LEFT); }

// ---- Products

struct Factor {  // The factor is in shared memory if `registers` is null.
    u64 descriptor;
    const u32 *registers;
    u32 start() const { return (descriptor & 0x3FFF) << 4; }
    u32 leading() const { return (descriptor >> 16 & 0x3FFF) << 4; }
    u32 stride() const { return (descriptor >> 32 & 0x3FFF) << 4; }
    int span() const { return descriptor >> 62 == 1 ? 128 : descriptor >> 62 == 2 ? 64 : 16; }
    u32 along(int row, int byte) const {  // Rows are contiguous, and the contracted dim runs along the row.
        u32 block = byte / span() * leading();
        return swizzled(start() + row / 8 * stride() + row % 8 * span() + block + byte % span(), span());
    }
    u32 across(int k, int column) const {  // The rows are contracted.
        return swizzled(start() + column / 64 * leading() + k / 8 * stride() + k % 8 * 128 + column % 64 * 2, 128);
    }
};
enum Kind { CODES, ROWS, TF32, VALUES, VALUES_BF16, COLUMNS };
struct Product {
    Kind kind;
    int n, more;
    u32 *sums;
    Factor a, b;
    u32 *lanes[32];          // The registers of the sums, by lane.
    // The registers of A by lane, where A is in registers.
    const u32 *a_lanes[32];
    u32 a_values[32][4];
    bool seen = true, done = false;
    int depth() const { return kind == CODES ? 32 : kind == TF32 ? 8 : 16; }
};
static float tf32(u32 x) { return bits<float>(x & 0xFFFFE000); }
static u32 word16(u32 at) { return *(uint16_t *)(block->memory + at); }
template <class T> static void multiply_warp(const Product &p, int warp, T *sum, T (*element)(const Product &, u32)) {
    int depth = p.depth(), columns = p.n * 2;
    static T a[16][32], b[32][256];
    for (int r = 0; r < 16; r++) for (int k = 0; k < depth; k++) {
        int row = warp % 4 * 16 + r, size = 32 / depth;  // The size is that of an element in bytes.
        if (!p.a.registers)
            a[r][k] = element(p, p.kind == COLUMNS ? p.a.across(k, row) : p.a.along(row, k * size));
        else {
            // The byte is one of 32, of which lanes own 4 of each 16.
            int byte = k * size;
            u32 word = p.a_values[r % 8 * 4 + byte % 16 / 4][byte / 16 * 2 + r / 8];
            a[r][k] = size == 1 ? (T)(int8_t)(word >> 8 * (byte % 4))
                    : size == 4 ? (T)tf32(word)
                                : (T)(p.kind == VALUES ? from_16 : from_bf16)(word >> 8 * (byte % 4) & 0xFFFF);
        }
    }
    for (int k = 0; k < depth; k++) for (int c = 0; c < columns; c++)
        b[k][c] = element(p, p.kind >= VALUES ? p.b.across(k, c) : p.b.along(c, k * (32 / depth)));
    for (int r = 0; r < 16; r++) {
        T *row = sum + r * columns;
        for (int c = 0; c < columns && !p.more; c++) row[c] = 0;
        for (int k = 0; k < depth; k++) for (int c = 0; c < columns; c++) row[c] += a[r][k] * b[k][c];
    }
}
static void perform(Product &p, int index) {
    std::vector<u32> &sums = block->warps[index].sums.at(p.sums).second;
    void *sum = sums.data();
    p.done = true;
    if (!p.seen)
        std::fill(sums.begin(), sums.end(), POISON);
    else if (p.kind == CODES)
        multiply_warp<int>(p, index, (int *)sum,
                           [](const Product &, u32 at) -> int { return (int8_t)block->memory[at]; });
    else
        multiply_warp<float>(p, index, (float *)sum, [](const Product &p, u32 at) {
            if (p.kind == TF32) return tf32(*(u32 *)(block->memory + at));
            return p.kind == ROWS || p.kind == VALUES ? from_16(word16(at)) : from_bf16(word16(at));
        });
}
static u32 *element_of(std::vector<u32> &sums, int n, int lane, int i) {
    return &sums[(lane / 4 + i / 2 % 2 * 8) * 2 * n + i / 4 * 8 + lane % 4 * 2 + i % 2];
}
static void issue(Product mine) {
    together("wgmma", mine, [](Product **all) {
        Warp &w = warp();
        int index = threadIdx.x / 32;
        auto p = std::make_shared<Product>(*all[0]);
        for (int lane = 0; lane < 32; lane++) {
            p->lanes[lane] = all[lane]->sums, p->a_lanes[lane] = all[lane]->a.registers;
            if (p->a.registers) memcpy(p->a_values[lane], p->a_lanes[lane], 16);
        }
        if (!w.fenced) fail("a product without wgmma.fence");
        auto &[flying, sums] = w.sums[p->sums];
        if (flying++ == 0) {
            sums.resize(16 * 2 * p->n);
            for (int lane = 0; lane < 32; lane++) for (int i = 0; i < p->n; i++)
                *element_of(sums, p->n, lane, i) = std::exchange(p->lanes[lane][i], POISON);
        }
        // A product that may not read yields poison, which is an error only if somebody looks.
        for (int i = 0; i < p->depth(); i++) for (int c = 0; c < 64 && p->kind == COLUMNS; c += 8)
            p->seen &= visible(p->a.across(i, c), 16);
        for (int c = 0; c < 2 * p->n; c++) for (int i = 0; i < 32; i++)
            if (p->kind < VALUES && i % 16 == 0) p->seen &= visible(p->b.along(c, i), 16);
            else if (p->kind >= VALUES && c % 8 == 0 && i < 16) p->seen &= visible(p->b.across(i, c), 16);
        w.open.push_back(p);
        w.last = std::max(w.last, soon());
        events.push_back({w.last, [p, index, home = block] { block = home, perform(*p, index); }});
    });
}
static void wgmma_fence() {
    together("wgmma.fence", *me, [](Fiber **) { warp().fenced = true; });
}
static void wgmma_commit() {
    together("wgmma.commit_group", *me, [](Fiber **) {
        Warp &w = warp();
        w.groups.push_back(std::move(w.open)), w.open.clear(), w.fenced = false;
    });
}
template <int PENDING> static void wgmma_wait() {
    Warp &w = warp();
    auto complete = [&w] {
        for (size_t i = 0; i + PENDING < w.groups.size(); i++)
            for (auto &p : w.groups[i]) if (!p->done) return false;
        return true;
    };
    until(complete, "wgmma.wait_group");
    together("wgmma.wait_group", *me, [](Fiber **) {
        Warp &w = warp();
        for (; w.groups.size() > PENDING; w.groups.pop_front()) for (auto &p : w.groups[0]) {
            auto &[flying, sums] = w.sums[p->sums];
            bool last = --flying == 0;
            for (int lane = 0; lane < 32; lane++) {
                if (p->a.registers && memcmp(p->a_values[lane], p->a_lanes[lane], 16))
                    fail("an operand's registers were written while the product was in flight");
                for (int i = 0; i < p->n && last; i++)
                    if (std::exchange(p->lanes[lane][i], *element_of(sums, p->n, lane, i)) != POISON)
                        fail("the sums of a product in flight were written");
            }
            if (last) w.sums.erase(p->sums);
        }
    });
}
template <int ROW_BYTES = 128> static u64 operand(const void *tile, u32 block_bytes = 16) {
    u64 mode = ROW_BYTES == 128 ? 1 : ROW_BYTES == 64 ? 2 : 0, group = 8 * ROW_BYTES >> 4, block = block_bytes >> 4;
    return mode << 62 | group << 32 | block << 16 | (address(tile) & 0x3FFFF) >> 4;
}
template <class T> static void issue(Kind kind, int n, T *sum, Factor a, u64 b, int more = 1) {
    issue({kind, n, more, (u32 *)sum, a, {b, nullptr}});
}
template <int N> static void multiply_codes(u32 (&sum)[N], const u32 *a, u64 b, int accumulate) {
    issue(CODES, N, sum, {0, a}, b, accumulate);
}
static void multiply_codes(u32 (&sum)[32], u64 a, u64 b) { issue(CODES, 32, sum, {a, nullptr}, b); }
static void multiply_codes(u32 (&sum)[128], u64 a, u64 b, int accumulate) {
    issue(CODES, 128, sum, {a, nullptr}, b, accumulate);
}
static void multiply_tf32(float (&sum)[32], const u32 *a, u64 b) { issue(TF32, 32, sum, {0, a}, b, 0); }
static void multiply_rows(float (&sum)[32], u64 a, u64 b) { issue(ROWS, 32, sum, {a, nullptr}, b); }
template <int N> static void multiply(float (&sum)[N], const u32 *a, u64 b) { issue(VALUES, N, sum, {0, a}, b); }
template <int N> static void multiply_bf16(float (&sum)[N], const u32 *a, u64 b) {
    issue(VALUES_BF16, N, sum, {0, a}, b);
}
template <int MORE, int N> static void multiply_columns(float (&sum)[N], u64 a, u64 b) {
    issue(COLUMNS, N, sum, {a, nullptr}, b, MORE);
}
static void multiply_in_warp(u32 *sum, const u32 *a, u32 b0, u32 b1) {
    struct { u32 *sum; const u32 *a; u32 b[2]; } mine{sum, a, {b0, b1}};
    auto byte = [](const u32 *words, int i) { return (int8_t)(words[i / 4] >> 8 * (i % 4)); };
    together("mma", mine, [byte](auto **all) {
        for (int lane = 0; lane < 32; lane++) for (int e = 0; e < 4; e++) for (int k = 0; k < 32; k++) {
            int row = lane / 4 + e / 2 * 8, n = lane % 4 * 2 + e % 2, owner = k % 16 / 4;
            all[lane]->sum[e] += byte(all[row % 8 * 4 + owner]->a + k / 16 * 2 + row / 8, k % 4) *
                                 byte(all[n * 4 + owner]->b + k / 16, k % 4);
        }
    });
}

