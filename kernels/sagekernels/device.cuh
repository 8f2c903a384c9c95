// Instructions of every GPU from sm_80 on, as far as the kernels use them. The host's stand-ins are in
// tests/support/emulator.h.
//
// Macro: FP16 (1 where 16-bit values are float16, 0 where they are bfloat16).
#pragma once

typedef unsigned int u32;
typedef unsigned long long u64;
#define DEVICE __device__ __forceinline__
#if FP16
#define TYPES "f32.f16.f16"  // The sums and the operands of a product in 16 bits.
#else
#define TYPES "f32.bf16.bf16"
#endif

DEVICE u32 address(const void *p) { return (u32)__cvta_generic_to_shared(p); }
template <class T> DEVICE T &shared_memory() {
    extern __shared__ __align__(1024) unsigned char memory[];
    return *(T *)memory;
}

// ---- Registers and memory

// Keep x in a register.
template <class T> DEVICE void hold(T &x) { asm volatile("" : "+r"(x)); }
// The load is not hoisted. Use it where registers are short.
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
DEVICE float2 load_shared_pair(u32 from) {
    float2 x;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "r"(from));
    return x;
}
DEVICE void store_shared(u32 to, const float *x) {
    asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(to), "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3])
                 : "memory");
}
DEVICE void store_shared_pair(u32 to, float x, float y) {
    asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(to), "f"(x), "f"(y) : "memory");
}
// Load four matrices of 8 rows of 16 bytes, with one lane's address for each row. A lane gets bytes 4 (lane % 4) of row
// lane / 4 of each matrix.
DEVICE void load_matrices(u32 *x, u32 from) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(from)
                 : "memory");
}
DEVICE int load_relaxed(const int *from) {
    int x;
    asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(x) : "l"(from) : "memory");
    return x;
}
DEVICE void add_relaxed(int *to, int x) {
    asm volatile("red.relaxed.gpu.global.add.s32 [%0], %1;" ::"l"(to), "r"(x) : "memory");
}
// After the wait a thread sees everything that was written before the addition, also by threads that met the adding
// thread at a barrier.
DEVICE void add_release(int *to, int x) {
    asm volatile("red.release.gpu.global.add.s32 [%0], %1;" ::"l"(to), "r"(x) : "memory");
}
DEVICE void wait_count(const int *from, int count) {
    for (int x;;) {
        asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(x) : "l"(from) : "memory");
        if (x >= count) return;
        __nanosleep(64);
    }
}

// ---- Arithmetic

DEVICE float power2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
DEVICE float logarithm2(float x) {
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
// Return the larger one of the low and of the high 16 bits, unsigned.
DEVICE u32 larger_halves(u32 x, u32 y) {
    u32 z;
    asm("max.u16x2 %0, %1, %2;" : "=r"(z) : "r"(x), "r"(y));
    return z;
}
// Convert two floats to 16 bits, the first in the low half, and back.
DEVICE u32 pack_bf16(float low, float high) {
    u32 y;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
    return y;
}
DEVICE u32 pack_half(float low, float high) {
    u32 y;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
    return y;
}
DEVICE void unpack_half(u32 x, float &low, float &high) {
    asm("{ .reg .f16 a, b; mov.b32 {a, b}, %2; cvt.f32.f16 %0, a; cvt.f32.f16 %1, b; }"
        : "=f"(low), "=f"(high)
        : "r"(x));
}
DEVICE u32 pack(float low, float high) { return FP16 ? pack_half(low, high) : pack_bf16(low, high); }
DEVICE void unpack(u32 x, float &low, float &high) {
    if (FP16) unpack_half(x, low, high);
    else low = __int_as_float(x << 16), high = __int_as_float(x & 0xFFFF0000);
}
