// Stand-ins on the host for the instructions of hopper_backward.cu: a block of threads as fibers, one after the other.
//
// Everything asynchronous happens at once, at its issue. What is tested is the rest: who computes what, the layouts of
// operands (descriptors and swizzles are decoded as the chip does), fragments, phases of barriers, counts of arrivals.

#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <vector>

constexpr int THREADS = 384;

struct Index {
    int x;
};
struct float4 {
    float x, y, z, w;
};
static Index threadIdx, blockIdx;
static ucontext_t scheduler, fibers[THREADS];
static std::vector<char> stacks[THREADS];
static bool done[THREADS];
static std::function<void()> body;
static long idle;  // resumptions since something last happened

static void wait_for(const std::function<bool()>& ready) {
    while (!ready()) {
        if (++idle > 200L * THREADS) puts("deadlock"), abort();
        int me = threadIdx.x;
        swapcontext(&fibers[me], &scheduler);
        threadIdx.x = me;
    }
    idle = 0;
}
// until `count` threads have come here with this key
static void meet(int key, int count) {
    static std::map<int, int> arrived;
    int round = arrived[key]++ / count;
    wait_for([&] { return arrived[key] >= (round + 1) * count; });
}
static void run_block(int block, std::function<void()> f) {
    body = f;
    for (int i = 0; i < THREADS; i++) {
        stacks[i].resize(1 << 17);
        done[i] = false;
        getcontext(&fibers[i]);
        fibers[i].uc_stack.ss_sp = stacks[i].data();
        fibers[i].uc_stack.ss_size = stacks[i].size();
        fibers[i].uc_link = &scheduler;
        makecontext(&fibers[i], (void (*)())[] { body(); done[threadIdx.x] = true; }, 0);
    }
    blockIdx.x = block;
    for (bool left = true; left;) {
        left = false;
        for (int i = 0; i < THREADS; i++) {
            if (done[i]) continue;
            left = true;
            threadIdx.x = i;
            swapcontext(&scheduler, &fibers[i]);
        }
    }
}

#define __device__
#define __forceinline__ inline
#define __global__
#define __grid_constant__
#define __launch_bounds__(...)
#define __shared__
#define __syncthreads() meet(-1, THREADS)
#define __syncwarp() meet(threadIdx.x / 32, 32)
#define __shfl_sync(mask, x, lane) (x)  // alike in all lanes wherever the kernel asks
using std::max;
using std::min;
static float __fmaf_rn(float a, float b, float c) { return std::fmaf(a, b, c); }
template <class To, class From> To bits(From x) {
    To y;
    memcpy(&y, &x, sizeof(y));
    return y;
}
static float __uint_as_float(unsigned x) { return bits<float>(x); }
static float __int_as_float(int x) { return bits<float>(x); }
static int __float_as_int(float x) { return bits<int>(x); }

struct Bar {
    int count, pending, bytes, phase;
};
static std::map<const void*, Bar> bars;
static void advance(Bar& b) {
    if (b.pending == 0 && b.bytes == 0) b.pending = b.count, b.phase ^= 1;
}
static void barrier_init(unsigned long long& bar, int count) { bars[&bar] = {count, count, 0, 0}; }
static void barriers_ready() {}
static void barrier_arrive(unsigned long long& bar) {
    Bar& b = bars[&bar];
    if (b.pending-- == 0) puts("too many arrivals"), abort();
    advance(b);
}
static void barrier_expect(unsigned long long& bar, int bytes) {
    bars[&bar].bytes += bytes;
    barrier_arrive(bar);
}
static void barrier_wait(unsigned long long& bar, int parity) {
    wait_for([&] { return bars[&bar].phase != parity; });
}
static void complete(unsigned long long& bar, int bytes) {
    bars[&bar].bytes -= bytes;
    advance(bars[&bar]);
}

// 16-byte units of rows of 128 or 64 bytes are swizzled by address
static unsigned swizzled(unsigned a, int row_bytes) { return a ^ (a >> 7 & (row_bytes / 16 - 1)) << 4; }

// words of a stand-in for a tensor map: address; extents of D, N, H, B; bytes between N, H, B; -; rows and columns of a
// box; bytes of an item
template <class Map, class F> void each_byte(const Map& map, int d, int n, int h, int b, F f) {
    const auto* w = map.words;
    int item = w[11], row_bytes = w[10] * item;
    for (int r = 0; r < (int)w[9]; r++)
        for (int c = 0; c < row_bytes; c++) {
            bool inside = n + r < (int)w[2] && d * item + c < (int)w[1] * item;
            char* from = (char*)w[0] + d * item + c + (n + r) * w[5] + h * w[6] + b * w[7];
            f(r * row_bytes + c, row_bytes, inside ? from : nullptr);
        }
}

static float half_to_float(unsigned short x) { return (float)bits<_Float16>(x); }
static float bf16_to_float(unsigned short x) { return bits<float>((unsigned)x << 16); }
static unsigned short to_half(float x) { return bits<unsigned short>((_Float16)x); }
static unsigned short to_bf16(float x) {
    unsigned u = bits<unsigned>(x);
    return std::isnan(x) ? 0x7fff : (u + 0x7fff + (u >> 16 & 1)) >> 16;
}
