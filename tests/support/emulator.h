// The functions of kernels/sagekernels/device.cuh on a CPU, and the machine that runs kernels there. Every thread is a
// fiber, and turns of warps are drawn at random. hopper_emulator.h and mma_emulator.h include this file and define what
// is asynchronous.
//
// The run ends with a message if a program does something forbidden, or if no thread can go on.
#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#define __device__
#define __forceinline__ inline
#define __global__
#define __grid_constant__
#define __launch_bounds__(...)
#define DEVICE inline
typedef unsigned int u32;
typedef unsigned long long u64;
struct Index { int x; };
struct uint2 { u32 x, y; };
struct uint4 { u32 x, y, z, w; };
struct float2 { float x, y; };
struct float4 { float x, y, z, w; };
extern "C" { int CAUSAL, PACKED, FP16, SMOOTH, SINKS; }  // The macros of emulator.FLAGS.
static Index threadIdx, blockIdx, gridDim;
static int mutant;  // The planted mistake that is made, if any.

template <class To, class From> static To bits(From x) { To y; memcpy(&y, &x, sizeof y); return y; }
static float __int_as_float(u32 x) { return bits<float>(x); }
static float __uint_as_float(u32 x) { return bits<float>(x); }
static int __float_as_int(float x) { return bits<int>(x); }
static float __int2float_rn(int x) { return (float)x; }
static float __fmul_rn(float a, float b) { return a * b; }
static float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
static uint2 make_uint2(u32 x, u32 y) { return {x, y}; }
static u32 __byte_perm(u32 a, u32 b, u32 s) {
    u64 both = (u64)b << 32 | a;
    u32 y = 0;
    for (int i = 0; i < 4; i++) y |= (u32)(both >> 8 * (s >> 4 * i & 7) & 255) << 8 * i;
    return y;
}
static int atomicAdd(int *p, int x) { return std::exchange(*p, *p + x); }
static u32 larger_halves(u32 x, u32 y) {
    return std::max(x >> 16, y >> 16) << 16 | std::max(x & 0xFFFF, y & 0xFFFF);
}
static float power2(float x) { return exp2f(x); }
static float logarithm2(float x) { return log2f(x); }
static float from_bf16(u32 x) { return bits<float>(x << 16); }
static u32 to_bf16(float x) { u32 b = bits<u32>(x); return x != x ? 0x7FFF : (b + 0x7FFF + (b >> 16 & 1)) >> 16; }
static float from_16(u32 x) { return FP16 ? (float)bits<_Float16>((uint16_t)x) : from_bf16(x); }
static u32 to_16(float x) { return FP16 ? bits<uint16_t>((_Float16)x) : to_bf16(x); }
static u32 pack(float low, float high) { return to_16(low) | to_16(high) << 16; }
static u32 pack_bf16(float low, float high) { return to_bf16(low) | to_bf16(high) << 16; }
static void unpack(u32 x, float &low, float &high) { low = from_16(x & 0xFFFF), high = from_16(x >> 16); }

// ---- Blocks of fibers, each with the state that the including header gives it

struct Fiber : FiberState {
    ucontext_t context;
    jmp_buf at;
    bool started = false, done = false;
    std::function<bool()> ready;
    std::string waits;
    const int *loaded = nullptr;
    int value = 0;
};
struct Warp : WarpState {
    int arrived = 0, turn = 0;
    long asleep = 0;  // The time until which the fiber sleeps.
    const char *what = "";
    void *shown[32];
};
struct Meeting : MeetingState { int count = 0, turn = 0; };
// An event ends with the block that issued it, unless `outlives` is set.
struct Event { long due; std::function<void()> act; bool outlives = false; };
struct Block : BlockState {
    // limit: the bytes of shared memory that the kernel has.
    int index, threads, limit = 0;
    alignas(1024) unsigned char memory[SHARED];
    std::vector<Fiber> fibers;
    std::vector<Warp> warps;
    std::map<int, Meeting> meetings;
    Block(int index, int threads) : index(index), threads(threads), fibers(threads), warps(threads / 32) {
        memset(memory, 0xFF, SHARED);
    }
};
static Block *block;
static std::vector<std::unique_ptr<Block>> blocks;  // Those that run.
static Fiber *me;
static long now;
static int begun;  // So many blocks have begun.
static std::vector<Event> events;
static u64 random_bits;
static jmp_buf scheduler;
static std::string failure;
static std::function<void()> kernel;

static Warp &warp() { return block->warps[threadIdx.x / 32]; }
static long draw(long n) { return ((random_bits = random_bits * 6364136223846793005 + 1442695040888963407) >> 33) % n; }
static long soon(int longest = 9) { return draw(2) ? now : now + draw(2L << draw(longest)); }
static void leave() { if (!_setjmp(me->at)) _longjmp(scheduler, 1); }
[[noreturn]] static void fail(const std::string &what) {
    failure = what + " (block " + std::to_string(block->index) + ", thread " + std::to_string(threadIdx.x) + ")";
    _longjmp(scheduler, 2);
}
static void until(std::function<bool()> ready, std::string waits) {
    if (ready()) return;
    me->ready = std::move(ready), me->waits = std::move(waits);
    leave();
}
// The including header defines these: a thread comes to a barrier, passes it, reads or writes shared memory, ends.
static void arriving(Meeting &), passing(Meeting &), reading(u32 from, int bytes), writing(u32 to, int bytes), ending();
static void meet(int key, int size) {
    Meeting &m = block->meetings[key];
    int turn = m.turn;
    arriving(m);
    if (++m.count == size) m.count = 0, m.turn++;
    until([&m, turn] { return m.turn != turn; }, "bar.sync " + std::to_string(key));
    passing(m);
}
// All lanes bring a value. The last one to come does the work for all.
template <class T, class F> static void together(const char *what, T &mine, F act) {
    Warp &w = warp();
    int turn = w.turn;
    if (w.arrived && strcmp(w.what, what)) fail(std::string("lanes meet at ") + w.what + " and " + what);
    w.what = what, w.shown[threadIdx.x % 32] = &mine;
    if (++w.arrived == 32) w.arrived = 0, act((T **)w.shown), w.turn++;
    until([&w, turn] { return w.turn != turn; }, what);
}
static void __syncthreads() { meet(0, block->threads); }
template <class T> static T exchange(T x, int lane) {
    struct { T in, out; int lane; } mine{x, x, lane};
    together("shfl", mine, [](auto **all) { for (int i = 0; i < 32; i++) all[i]->out = all[all[i]->lane]->in; });
    return mine.out;
}
template <class T> static T __shfl_xor_sync(u32, T x, int d) { return exchange(x, threadIdx.x % 32 ^ d); }
template <class T> static T __shfl_sync(u32, T x, int lane) { return exchange(x, lane); }
static bool __any_sync(u32, bool x) {
    int mine = x;
    together("vote", mine, [](int **all) {
        int any = 0;
        for (int i = 0; i < 32; i++) any |= *all[i];
        for (int i = 0; i < 32; i++) *all[i] = any;
    });
    return mine;
}
static int thread_index() { return threadIdx.x; }
template <class T> static void hold(T &) {}

// ---- Shared and global memory

template <class T> static T &shared_memory() {
    static_assert(sizeof(T) <= SHARED);
    block->limit = sizeof(T);
    return *(T *)block->memory;
}
static u32 address(const void *p) { return (unsigned char *)p - block->memory; }
static void store(u32 to, const void *from, int bytes) {
    writing(to, bytes);
    memcpy(block->memory + to, from, bytes);
}
template <class T> static T load(u32 from) {
    T x;
    reading(from, sizeof x);
    memcpy(&x, block->memory + from, sizeof x);
    return x;
}
static float4 load_shared(u32 from) { return load<float4>(from); }
static float2 load_shared_pair(u32 from) { return load<float2>(from); }
static void store_shared(u32 to, const float *x) { store(to, x, 16); }
static void store_shared_pair(u32 to, float x, float y) {
    float both[2] = {x, y};
    store(to, both, 8);
}
// Check that eight rows of 16 bytes, read at one time, come from different banks, or from where another lane reads.
template <class T> static void check_banks(T **all) {
    for (int i = 0; i < 32; i++)
        for (int j = i & ~7; j < i; j++)
            if (all[i]->from / 16 % 8 == all[j]->from / 16 % 8 && all[i]->from != all[j]->from)
                fail("ldmatrix from one bank twice");
}
static void load_matrices(u32 *x, u32 from) {
    struct { u32 from, x[4]; } mine{from};
    reading(from, 16);
    together("ldmatrix", mine, [](auto **all) {
        check_banks(all);
        for (int lane = 0; lane < 32; lane++)
            for (int i = 0; i < 4; i++)
                memcpy(all[lane]->x + i, block->memory + all[8 * i + lane / 4]->from + lane % 4 * 4, 4);
    });
    memcpy(x, mine.x, 16);
}
static int load_relaxed(const int *from) {  // A thread that loads the same value again is spinning.
    if (me->loaded == from) until([from, old = me->value] { return *from != old; }, "a turn in global memory");
    me->loaded = from;
    return me->value = *from;
}
static void add_relaxed(int *to, int x) { *to += x; }
static void add_release(int *to, int x) { *to += x; }
static void wait_count(const int *from, int count) {
    until([=] { return *from >= count; }, "a count in global memory");
}

// ---- Running

static const size_t STACK = 1 << 16;
static void begin() {
    kernel();
    me->done = true;
    ending();
    _longjmp(scheduler, 1);
}
static void resume(Fiber &f, int x) {
    me = &f, threadIdx.x = x, blockIdx.x = block->index;
    f.ready = nullptr;
    int result = _setjmp(scheduler);
    if (result) return;
    if (std::exchange(f.started, true)) _longjmp(f.at, 1);
    setcontext(&f.context);
}
static std::string stuck() {
    std::string text = "deadlock";
    for (auto &b : blocks) for (int x = 0; x < b->threads; x++) {
        const Fiber &f = b->fibers[x];
        if (!f.done && (x % 32 == 0 || b->fibers[x - 1].waits != f.waits || b->fibers[x - 1].done))
            text += "\n  block " + std::to_string(b->index) + " warp " + std::to_string(x / 32) + " lane " +
                    std::to_string(x % 32) + " ... : " + f.waits;
    }
    return text;
}
// Return a message, or nothing if all blocks of threads came to their end. `resident` blocks run at one time.
static void run(int grid, int threads, int resident) {
    resident = std::min(resident, grid);
    static std::vector<char> stacks;
    stacks.resize(STACK * threads * resident);
    blocks.clear();
    std::vector<int> places(resident);
    for (int i = 0; i < resident; i++) places[i] = i;
    events.clear(), failure.clear(), now = 0;
    gridDim.x = grid;
    for (begun = 0; begun < grid || !blocks.empty();) {
        if (begun < grid && (int)blocks.size() < resident) {
            blocks.emplace_back(new Block(begun++, threads));
            Block &b = *blocks.back();
            for (int x = 0; x < threads; x++) {
                ucontext_t &c = b.fibers[x].context;
                getcontext(&c);
                c.uc_stack.ss_sp = &stacks[STACK * (places[blocks.size() - 1] * threads + x)];
                c.uc_stack.ss_size = STACK;
                makecontext(&c, begin, 0);
            }
            continue;
        }
        now++;
        for (size_t i = 0; i < events.size();) {
            if (events[i].due > now) { i++; continue; }
            auto act = std::move(events[i].act);
            events.erase(events.begin() + i);  // Events are in order: products of a warp follow one another.
            act();
        }
        // Choose a warp that can go on, beginning anywhere.
        bool moved = false;
        long awake = events.empty() ? 0 : std::min_element(events.begin(), events.end(), [](auto &a, auto &b) {
            return a.due < b.due; })->due;
        int warps = threads / 32, count = warps * blocks.size(), first = draw(count);
        for (int i = 0; i < count && !moved; i++) {
            int w = (first + i) % count;
            block = blocks[w / warps].get();
            Warp &warp = block->warps[w % warps];
            int lane = draw(32);
            for (int k = 0; k < 32; k++) {
                Fiber &f = block->fibers[w % warps * 32 + (lane + k) % 32];
                if (f.done || f.ready && !f.ready()) continue;
                if (warp.asleep > now) { awake = awake ? std::min(awake, warp.asleep) : warp.asleep; break; }
                moved = true;
                resume(f, w % warps * 32 + (lane + k) % 32);
                if (!failure.empty()) return;
            }
            if (moved && draw(100) == 0) warp.asleep = now + draw(1L << draw(11));
        }
        if (moved) continue;
        for (size_t i = 0; i < blocks.size(); i++) {
            auto &f = blocks[i]->fibers;
            if (!std::all_of(f.begin(), f.end(), [](Fiber &x) { return x.done; })) continue;
            blocks.erase(blocks.begin() + i);
            std::rotate(places.begin() + i, places.begin() + i + 1, places.end());
            moved = true;
            break;
        }
        if (!moved && !awake) { failure = stuck(); return; }
        if (!moved) now = std::max(now, awake - 1);
    }
    for (auto &event : events)
        if (event.outlives) event.act();
        else failure = "copies or products come after the end";
}
template <class... A, size_t... I>
static void with_arguments(void (*f)(A...), void **values, std::index_sequence<I...>) {
    kernel = [=] { f(*(std::remove_reference_t<A> *)values[I]...); };
}
template <class... A> static void with_arguments(void (*f)(A...), void **values) {
    with_arguments(f, values, std::index_sequence_for<A...>());
}
