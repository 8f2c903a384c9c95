// The functions of kernels/sagekernels/mma.cuh on a CPU. Copies are late, and races are found.
//
// A copy poisons its destination when it is issued, and brings its bytes at the wait that covers it. Every word of
// shared memory knows who wrote and read it last. The run ends at an access that no barrier, __syncwarp or program
// order puts behind them. It also ends at copies from outside of all arguments, at words that nobody wrote, and at bank
// conflicts of ldmatrix.
#include <cstdint>
#include <deque>
#include <utility>
#include <vector>

struct Copy { uint32_t to; const void *from; bool wanted; };
struct FiberState {
    int barriers = 0, syncs = 0;  // The numbers of those passed.
    std::vector<Copy> open;
    std::deque<std::vector<Copy>> groups;
};
struct WarpState {};
struct MeetingState {};
constexpr int SHARED = 166912, MANY = -2;
// The last access, or all since a barrier.
struct Access { int thread = -1, warp = -1, barrier = -1, sync = -1; };
struct Word { Access written, read; bool atomic = false, coming = false; };
struct BlockState { std::vector<Word> words; };
#include "emulator.h"

// The kernel may copy from these arrays.
static std::vector<std::pair<const char *, const char *>> arrays;
extern "C" void may_copy_from(const char *first, int64_t bytes) {
    first ? arrays.push_back({first, first + bytes}) : arrays.clear();
}

static bool behind(const Access &a) {
    return a.barrier < me->barriers || a.thread == threadIdx.x || a.warp == threadIdx.x / 32 && a.sync < me->syncs;
}
static void note(Access &a, bool with_others) {
    int thread = threadIdx.x, warp = thread / 32;
    if (with_others && a.barrier == me->barriers)
        a = {a.thread == thread ? thread : MANY, a.warp == warp ? warp : MANY, a.barrier, std::max(a.sync, me->syncs)};
    else
        a = {thread, warp, me->barriers, me->syncs};
}
template <class F> static void each_word(u32 at, int bytes, F f) {
    if (at + bytes > (u32)block->limit) fail("outside of shared memory");
    if (block->words.empty()) block->words.resize(SHARED / 4);
    if (at % bytes) fail("an address that is not a multiple of " + std::to_string(bytes));
    for (u32 i = at / 4; i < (at + bytes + 3) / 4; i++) f(block->words[i]);
}
static void reading(u32 from, int bytes) {
    each_word(from, bytes, [](Word &w) {
        if (w.coming) fail("reads what a copy has not brought yet");
        if (w.written.barrier < 0) fail("reads what nobody wrote");
        if (!behind(w.written)) fail("reads what another thread writes");
        note(w.read, true);
    });
}
static void writing(u32 to, int bytes) {
    each_word(to, bytes, [](Word &w) {
        if (w.coming) fail("writes where a copy goes");
        if (!behind(w.written)) fail("writes what another thread writes");
        if (!behind(w.read)) fail("overwrites what another thread may still read");
        note(w.written, false);
        w.atomic = false;
    });
}
static void arriving(Meeting &) {}
static void passing(Meeting &) { me->barriers++, me->syncs++; }
static void ending() {
    if (!me->open.empty() || !me->groups.empty()) fail("a thread leaves before its copies are there");
}
static void __syncwarp() {
    together("syncwarp", *me, [](Fiber **) {});
    me->syncs++;
}

static void copy_async(u32 to, const void *from, bool wanted = true) {
    const char *first = (const char *)from;
    auto holds = [first](auto &a) { return a.first <= first && first + 16 <= a.second; };
    if (wanted && std::none_of(arrays.begin(), arrays.end(), holds)) fail("copies from outside of all arrays");
    if ((uintptr_t)from % 16) fail("copies from an address that is not a multiple of 16");
    writing(to, 16);
    each_word(to, 16, [](Word &w) { w.coming = true; });
    memset(block->memory + to, 0xFF, 16);
    me->open.push_back({to, from, wanted});
}
static void copies_commit() { me->groups.push_back(std::exchange(me->open, {})); }
template <int LEFT> static void copies_wait() {
    for (; me->groups.size() > LEFT; me->groups.pop_front())
        for (auto &c : me->groups[0]) {
            c.wanted ? memcpy(block->memory + c.to, c.from, 16) : memset(block->memory + c.to, 0, 16);
            each_word(c.to, 16, [](Word &w) { w.coming = false, note(w.written, false); });
        }
}

static void load_matrices_turned(u32 *x, u32 from) {
    struct { u32 from, x[4]; } mine{from};
    reading(from, 16);
    together("ldmatrix.trans", mine, [](auto **all) {
        check_banks(all);
        for (int lane = 0; lane < 32; lane++)
            for (int i = 0; i < 4; i++)
                for (int e = 0; e < 2; e++)
                    memcpy((char *)(all[lane]->x + i) + 2 * e,
                           block->memory + all[8 * i + lane % 4 * 2 + e]->from + lane / 4 * 2, 2);
    });
    memcpy(x, mine.x, 16);
}
static float load_shared_float(u32 from) { return load<float>(from); }
static void store_shared_word(u32 to, u32 x) { store(to, &x, 4); }
static void max_shared(u32 to, int x) {
    each_word(to, 4, [](Word &w) {
        if (w.coming || w.written.barrier < 0) fail("an atomic maximum of what is not there");
        if (!behind(w.written) && !w.atomic) fail("writes what another thread writes");
        if (!behind(w.read)) fail("overwrites what another thread may still read");
        note(w.written, w.atomic), w.atomic = true;
    });
    int &old = *(int *)(block->memory + to);
    old = std::max(old, x);
}
static void add_global(float *to, float x) { *to += x; }

static float reciprocal(float x) { return 1 / x; }
static float larger_or_nan(float x, float y) { return x != x ? x : y != y ? y : std::max(x, y); }
static float from_half(u32 x) { return bits<_Float16>((uint16_t)x); }
static u32 to_half(float x) { return bits<uint16_t>((_Float16)x); }
static u32 pack_half(float low, float high) { return to_half(low) | to_half(high) << 16; }
static void unpack_half(u32 x, float &low, float &high) { low = from_half(x & 0xFFFF), high = from_half(x >> 16); }

constexpr float MAGIC = 12582912.f;
constexpr u32 MAGIC_BITS = 0x4B400000;

// Multiply a [16 x K] by b [K x 8] of one warp. A register holds `per` elements, and the two functions turn each into
// T.
template <class T> struct Factors { T a[16][32], b[8][32], sum[16][8]; };
template <class T, class M, class FA, class FB>
static void multiply_warp(Factors<T> &f, M **all, int per, FA fa, FB fb) {
    // The bits of an element, and half of the contracted columns.
    int size = 32 / per, k = 8 * per;
    for (int lane = 0; lane < 32; lane++)
        for (int e = 0; e < per; e++)
            for (int h = 0; h < 2; h++) {
                int column = h * k / 2 + lane % 4 * per + e;
                for (int r = 0; r < 2; r++) f.a[lane / 4 + 8 * r][column] = fa(all[lane]->a[2 * h + r] >> size * e);
                f.b[lane / 4][column] = fb(all[lane]->b[h] >> size * e);
            }
    for (int r = 0; r < 16; r++)
        for (int c = 0; c < 8; c++) {
            T sum = 0;
            for (int i = 0; i < k; i++) sum += f.a[r][i] * f.b[c][i];
            f.sum[r][c] = sum;
        }
}
template <bool UNSIGNED = false>
static void multiply_codes(u32 *sum, const u32 *a, u32 b0, u32 b1, const u32 *start) {
    struct { u32 a[4], b[2], sum[4]; } mine{{a[0], a[1], a[2], a[3]}, {b0, b1}, {start[0], start[1], start[2], start[3]}};
    together(UNSIGNED ? "mma.u8" : "mma.s8", mine, [](auto **all) {
        static Factors<int> f;
        multiply_warp(f, all, 4, [](u32 x) { return UNSIGNED ? (int)(uint8_t)x : (int)(int8_t)x; },
                      [](u32 x) { return (int)(int8_t)x; });
        for (int lane = 0; lane < 32; lane++)
            for (int i = 0; i < 4; i++) all[lane]->sum[i] += f.sum[lane / 4 + i / 2 * 8][lane % 4 * 2 + i % 2];
    });
    memcpy(sum, mine.sum, 16);
}
static void multiply(float *sum, const u32 *a, u32 b0, u32 b1) {
    struct { u32 a[4], b[2]; float sum[4]; } mine{{a[0], a[1], a[2], a[3]}, {b0, b1}, {sum[0], sum[1], sum[2], sum[3]}};
    together("mma.16", mine, [](auto **all) {
        static Factors<float> f;
        auto number = [](u32 x) { return from_16(x & 0xFFFF); };
        multiply_warp(f, all, 2, number, number);
        for (int lane = 0; lane < 32; lane++)
            for (int i = 0; i < 4; i++) all[lane]->sum[i] += f.sum[lane / 4 + i / 2 * 8][lane % 4 * 2 + i % 2];
    });
    memcpy(sum, mine.sum, 16);
}
static void multiply_half(u32 *sum, const u32 *a, u32 b0, u32 b1) {
    struct { u32 a[4], b[2], sum[2]; } mine{{a[0], a[1], a[2], a[3]}, {b0, b1}, {sum[0], sum[1]}};
    together("mma.half", mine, [](auto **all) {
        static Factors<float> f;
        auto number = [](u32 x) { return from_half(x & 0xFFFF); };
        multiply_warp(f, all, 2, number, number);
        for (int lane = 0; lane < 32; lane++)
            for (int r = 0; r < 2; r++) {
                float low, high, *row = f.sum[lane / 4 + 8 * r] + lane % 4 * 2;
                unpack_half(all[lane]->sum[r], low, high);
                all[lane]->sum[r] = pack_half(low + row[0], high + row[1]);
            }
    });
    memcpy(sum, mine.sum, 8);
}
static u32 turned(u32 x) {
    struct { u32 in, out; } mine{x, 0};
    together("movmatrix", mine, [](auto **all) {
        for (int lane = 0; lane < 32; lane++)
            for (int e = 0; e < 2; e++)
                all[lane]->out |= (all[(lane % 4 * 2 + e) * 4 + lane / 8]->in >> 16 * (lane / 4 % 2) & 0xFFFF) << 16 * e;
    });
    return mine.out;
}
