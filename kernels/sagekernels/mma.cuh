// Warp-wide products (mma.sync) and asynchronous copies, all of sm_80, with the functions that they need. The host's
// stand-ins are in tests/support/mma_emulator.h.
//
// Fragments, with g = lane / 4 and c = lane % 4. Sums [16 x 8] are rows g and g + 8, columns 2c and 2c + 1. A of codes
// [16 x 32] is rows g and g + 8 with columns 4c .. 4c + 3, then the same rows with columns 16 + 4c and on. B of codes
// [32 x 8] is rows from 4c and from 16 + 4c of column g. In 16 bits A is [16 x 16] and B [16 x 8], with 2c, 2c + 1 and
// 8 + 2c, 8 + 2c + 1.
#pragma once
#include "device.cuh"

// ---- Copies from global to shared memory, 16 bytes a thread

DEVICE void copy_async(u32 to, const void *from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
// Copy zeros where the source is not `wanted`. The source is not read then.
DEVICE void copy_async(u32 to, const void *from, bool wanted) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(wanted ? 16 : 0) : "memory");
}
DEVICE void copies_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Wait until all but the last LEFT groups of this thread's copies are there. Other threads see them behind a barrier.
template <int LEFT> DEVICE void copies_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory"); }

// ---- Shared and global memory

// Load transposed matrices: a lane gets bytes 2 (lane / 4) of rows 2 (lane % 4) and 2 (lane % 4) + 1 of each.
DEVICE void load_matrices_turned(u32 *x, u32 from) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(from)
                 : "memory");
}
DEVICE float load_shared_float(u32 from) {
    float x;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(from));
    return x;
}
DEVICE void store_shared_word(u32 to, u32 x) { asm volatile("st.shared.b32 [%0], %1;" ::"r"(to), "r"(x) : "memory"); }
DEVICE void max_shared(u32 to, int x) { asm volatile("red.shared.max.s32 [%0], %1;" ::"r"(to), "r"(x) : "memory"); }
DEVICE void add_global(float *to, float x) { asm volatile("red.global.add.f32 [%0], %1;" ::"l"(to), "f"(x) : "memory"); }

// ---- Arithmetic

DEVICE float reciprocal(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
// Return the larger one, or NaN if either is.
DEVICE float larger_or_nan(float x, float y) {
    float z;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));
    return z;
}

// ---- Products

// Convert int to float without an instruction: sums that start at MAGIC's bits are the floats MAGIC + sum, below 2^22.
constexpr float MAGIC = 12582912.f;
constexpr u32 MAGIC_BITS = 0x4B400000;

#define FOUR_OF(c, x) c((x)[0]), c((x)[1]), c((x)[2]), c((x)[3])
// Compute sum = a b + start for INT8 codes. The codes of a are unsigned if the parameter says so.
template <bool UNSIGNED = false> DEVICE void multiply_codes(u32 *sum, const u32 *a, u32 b0, u32 b1, const u32 *start) {
#define MULTIPLY_CODES(type)                                                                                          \
    asm("mma.sync.aligned.m16n8k32.row.col.s32." type ".s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "        \
        "{%10, %11, %12, %13};"                                                                                       \
        : FOUR_OF("=r", sum)                                                                                          \
        : FOUR_OF("r", a), "r"(b0), "r"(b1), FOUR_OF("r", start))
    if (UNSIGNED) MULTIPLY_CODES("u8");
    else MULTIPLY_CODES("s8");
}
// Compute sum += a b in 16 bits.
DEVICE void multiply(float *sum, const u32 *a, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col." TYPES ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : FOUR_OF("+f", sum)
        : FOUR_OF("r", a), "r"(b0), "r"(b1));
}
// Compute sum += a b in float16, with sums in float16 too. A register holds two of them, rows g and g + 8.
DEVICE void multiply_half(u32 *sum, const u32 *a, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16 {%0, %1}, {%2, %3, %4, %5}, {%6, %7}, {%0, %1};"
        : "+r"(sum[0]), "+r"(sum[1])
        : FOUR_OF("r", a), "r"(b0), "r"(b1));
}
// Transpose an 8 x 8 matrix of 16 bits, of which each lane has columns 2c and 2c + 1 of row g.
DEVICE u32 turned(u32 x) {
    u32 y;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
    return y;
}
