// The instructions themselves; they need the kernel's types. See hopper_backward_emulator.h.

extern "C" {
Shared memory[1];
}
DEVICE u32 address(const void* p) { return (u32)((const char*)p - (const char*)memory); }
static char* at(u32 a) { return (char*)memory + a; }
#if HALF
static float wide(unsigned short x) { return half_to_float(x); }
#else
static float wide(unsigned short x) { return bf16_to_float(x); }
#endif

template <class T> void hold(T&) {}
template <class T> void pin(T&) {}
template <int n> void give_registers() {}
template <int n> void take_registers() {}
static int thread_index() { return threadIdx.x; }
static float4 load_shared(u32 a) { return *(float4*)at(a); }
static void store_shared(u32 a, const float* x) { memcpy(at(a), x, 16); }
static void warpgroup_barrier(int i) { meet(-2 - i, 128); }
static int load_relaxed(const int* x) { return *x; }
static void fence_async() {}
static void copies_commit() {}
static void copies_wait_read() {}
template <int left = 0> void copies_wait() {}
template <int left> void end_turn(int* turn) { ++*turn; }
static float power_of_2(float x) { return std::exp2(x); }
static u32 pack_bf16(float low, float high) { return to_bf16(low) | (u32)to_bf16(high) << 16; }
static u32 pack(float low, float high) { return HALF ? to_half(low) | (u32)to_half(high) << 16 : pack_bf16(low, high); }

static void copy_in(void* to, const TensorMap& map, int d, int n, int h, int b, u64& bar) {
    int bytes = 0;
    each_byte(map, d, n, h, b, [&](int i, int row_bytes, char* from) {
        *at(swizzled(address(to) + i, row_bytes)) = from ? *from : 0;
        bytes++;
    });
    complete(bar, bytes);
}
static void copy_out(const TensorMap& map, int d, int n, int h, int b, const void* from) {
    each_byte(map, d, n, h, b, [&](int i, int row_bytes, char* to) {
        if (to) *to = *at(swizzled(address(from) + i, row_bytes));
    });
}
static void copy_in(void* to, const void* from, int bytes, u64& bar) {
    memcpy(to, from, bytes);
    complete(bar, bytes);
}
static void add_out(float* to, const float* from, int bytes) {
    for (int i = 0; i < bytes / 4; i++) to[i] += from[i];
}

// registers of the lanes of a warp, for instructions that exchange them
static u32 lanes[THREADS][4];
static void show(const u32* x) {
    __syncwarp();
    memcpy(lanes[threadIdx.x], x, 16);
    __syncwarp();
}
static void store_matrices(u32 to, const u32* x) {
    static u32 rows[THREADS];
    rows[threadIdx.x] = to;
    show(x);
    int warp = threadIdx.x / 32 * 32, lane = threadIdx.x % 32;
    for (int i = 0; i < 4; i++) *(u32*)at(rows[warp + 8 * i + lane / 4] + lane % 4 * 4) = x[i];
    __syncwarp();
}

static void products_begin() {}
static void products_commit() {}
template <int left> void products_wait() {}

template <int row_bytes = 128> u64 operand(const void* tile, int block_bytes = 16) {
    u64 mode = row_bytes == 128 ? 1 : 2, group = 8 * row_bytes >> 4, block = block_bytes >> 4;
    return mode << 62 | group << 32 | block << 16 | (address(tile) & 0x3FFFF) >> 4;
}
// byte of row r (eight to a group), contracted along the row, or element (k, column) where rows are contracted
static u32 along(u64 op, int r, int byte) {
    int row_bytes = op >> 62 == 1 ? 128 : 64;
    return swizzled((op & 0x3FFF) * 16 + r / 8 * (int)(op >> 32 & 0x3FFF) * 16 + r % 8 * row_bytes + byte, row_bytes);
}
static u32 across(u64 op, int k, int column) {
    int block = (op >> 16 & 0x3FFF) * 16, group = (op >> 32 & 0x3FFF) * 16;
    int start = (op & 0x3FFF) * 16 + column / 64 * block + k / 8 * group;
    return swizzled(start + k % 8 * 128 + column % 64 * 2, 128);
}
// d (+)= product of 16 or 32 elements: a and b give the elements (row or column, k)
template <class T, int n, class A, class B> void multiply(T (&d)[n], int depth, bool more, A a, B b) {
    int thread = threadIdx.x % 128;
    for (int i = 0; i < n; i++) {
        int row = thread / 32 * 16 + thread % 32 / 4 + i / 2 % 2 * 8, column = i / 4 * 8 + thread % 4 * 2 + i % 2;
        T sum = more ? d[i] : 0;
        for (int k = 0; k < depth; k++) sum += a(row, k) * b(column, k);
        d[i] = sum;
    }
}
static unsigned short word(u32 a) { return *(unsigned short*)at(a); }
static unsigned short fragment(int row, int k) {
    u32 x = lanes[threadIdx.x / 32 * 32 + row % 8 * 4 + k % 8 / 2][row / 8 % 2 + k / 8 * 2];
    return k % 2 ? x >> 16 : x;
}
static void multiply_codes(u32 (&s)[32], u64 a, u64 b) {
    multiply(s, 32, true, [&](int r, int k) { return (int)*(signed char*)at(along(a, r, k)); },
             [&](int c, int k) { return (int)*(signed char*)at(along(b, c, k)); });
}
static void multiply_wide(float (&dp)[32], u64 a, u64 b) {
    multiply(dp, 16, true, [&](int r, int k) { return wide(word(along(a, r, 2 * k))); },
             [&](int c, int k) { return wide(word(along(b, c, 2 * k))); });
}
template <int n> void add_dv(float (&sum)[n], const u32* a, u64 b) {
    show(a);
    multiply(sum, 16, true, [&](int r, int k) { return wide(fragment(r % 16, k)); },
             [&](int c, int k) { return wide(word(across(b, k, c))); });
}
template <int n> void add_dk(float (&sum)[n], const u32* a, u64 b) {
    show(a);
    multiply(sum, 16, true, [&](int r, int k) { return bf16_to_float(fragment(r % 16, k)); },
             [&](int c, int k) { return bf16_to_float(word(across(b, k, c))); });
}
template <int more, int n> void add_dq(float (&dq)[n], u64 a, u64 b) {
    multiply(dq, 16, more, [&](int r, int k) { return bf16_to_float(word(across(a, k, r))); },
             [&](int c, int k) { return bf16_to_float(word(across(b, k, c))); });
}
