// Hopper's instructions, as far as the kernels use them. The host's stand-ins are in tests/support/hopper_emulator.h.
#include "device.cuh"

struct alignas(64) TensorMap { u64 words[16]; };

// ---- Barriers

DEVICE void barrier_init(u64 &barrier, u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(address(&barrier)), "r"(arrivals) : "memory");
}
DEVICE void fence_barriers() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
DEVICE void arrive(u64 &barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(address(&barrier)) : "memory");
}
DEVICE void arrive_expect(u64 &barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(address(&barrier)), "r"(bytes)
                 : "memory");
}
// Arrive at the barrier of a block of the cluster.
DEVICE void arrive_at(u64 &barrier, int block) {
    asm volatile(
        "{ .reg .b32 there; mapa.shared::cluster.u32 there, %0, %1;\n"
        "mbarrier.arrive.shared::cluster.b64 _, [there]; }" ::"r"(address(&barrier)), "r"(block)
        : "memory");
}
// Store x in a block of the cluster and arrive at a barrier there. The one who waits for it by wait_sent sees x.
DEVICE void send(int &to, int x, u64 &barrier, int block) {
    asm volatile(
        "{ .reg .b32 there, full; mapa.shared::cluster.u32 there, %0, %3; mapa.shared::cluster.u32 full, %1, %3;\n"
        "st.shared::cluster.s32 [there], %2;\n"
        "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [full]; }" ::"r"(address(&to)), "r"(address(&barrier)),
        "r"(x), "r"(block)
        : "memory");
}
#define WAIT(name, seen)                                                                                            \
    DEVICE void name(u64 &barrier, u32 parity) {                                                                    \
        asm volatile(                                                                                               \
            "{ .reg .pred done;\n"                                                                                  \
            "again: mbarrier.try_wait.parity" seen ".shared::cta.b64 done, [%0], %1;\n"                             \
            "@!done bra again; }" ::"r"(address(&barrier)), "r"(parity)                                             \
            : "memory");                                                                                            \
    }
WAIT(wait, "")
WAIT(wait_sent, ".acquire.cluster")
// Load four floats from a block of the cluster, at the address that they would have in this one.
DEVICE float4 load_shared_of(int block, u32 from) {
    float4 x;
    asm volatile(
        "{ .reg .b32 there; mapa.shared::cluster.u32 there, %4, %5;\n"
        "ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [there]; }"
        : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
        : "r"(from), "r"(block)
        : "memory");
    return x;
}
// Wait for all threads of the cluster that have not ended.
DEVICE void cluster_barrier() {
    asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}
#define CLUSTER_OF(n) __cluster_dims__(n, 1, 1)
DEVICE void warpgroup_barrier(int i) { asm volatile("bar.sync %0, 128;" ::"r"(1 + i) : "memory"); }

// ---- Bulk copies

DEVICE void fence_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
DEVICE void copy_in(void *to, const void *from, u32 bytes, u64 &barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     address(to)), "l"(from), "r"(bytes), "r"(address(&barrier))
                 : "memory");
}
// Copy boxes. Coordinates begin with the contiguous dimension.
DEVICE void copy_in(void *to, const TensorMap &map, int x, int y, int z, u64 &barrier) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];" ::
            "r"(address(to)), "l"(&map), "r"(x), "r"(y), "r"(z), "r"(address(&barrier))
        : "memory");
}
// Copy a box to the same place in all blocks of the cluster that `blocks` has bits of, and count its bytes there.
DEVICE void copy_in_all(void *to, const TensorMap &map, int x, int y, int z, u64 &barrier, unsigned short blocks) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
        "[%0], [%1, {%2, %3, %4}], [%5], %6;" ::"r"(address(to)), "l"(&map), "r"(x), "r"(y), "r"(z),
        "r"(address(&barrier)), "h"(blocks)
        : "memory");
}
DEVICE void copy_in(void *to, const TensorMap &map, int x, int y, int z, int w, u64 &barrier) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5}], "
        "[%6];" ::"r"(address(to)), "l"(&map), "r"(x), "r"(y), "r"(z), "r"(w), "r"(address(&barrier))
        : "memory");
}
DEVICE void copy_out(const TensorMap &map, int x, int y, int z, int w, const void *from) {
    asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%1, %2, %3, %4}], [%5];" ::"l"(&map),
                 "r"(x), "r"(y), "r"(z), "r"(w), "r"(address(from))
                 : "memory");
}
DEVICE void add_out(float *to, const float *from, u32 bytes) {
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(to),
                 "r"(address(from)), "r"(bytes)
                 : "memory");
}
DEVICE void copies_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Wait until all but the last LEFT groups of copies have read what they copy.
template <int LEFT = 0> DEVICE void copies_wait_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(LEFT) : "memory");
}
// Wait until all but the last LEFT groups of copies are complete.
template <int LEFT> DEVICE void copies_wait() { asm volatile("cp.async.bulk.wait_group %0;" ::"n"(LEFT) : "memory"); }
DEVICE void store_matrices(u32 to, const u32 *x) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(x[0]), "r"(x[1]),
                 "r"(x[2]), "r"(x[3])
                 : "memory");
}

// ---- Registers

template <int N> DEVICE void fewer_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N)); }
template <int N> DEVICE void more_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N)); }

// ---- Products

DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING> DEVICE void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}
// Keep arithmetic on registers on its side of this line. The compiler does not know that a wait writes registers.
template <int N> DEVICE void pin(float (&x)[N]) {
#pragma unroll
    for (int i = 0; i < N; i++) asm volatile("" : "+f"(x[i])::"memory");
}
template <int N> DEVICE void pin(u32 (&x)[N]) {
#pragma unroll
    for (int i = 0; i < N; i++) asm volatile("" : "+r"(x[i])::"memory");
}

// Describe an operand in shared memory. Rows of ROW_BYTES are swizzled over all of their bytes, and groups of eight
// rows follow one another. block_bytes is the distance between blocks of 64 columns, for an operand whose rows are
// contracted, or between blocks of 16 bytes, for rows of 16.
template <int ROW_BYTES = 128> DEVICE u64 operand(const void *tile, u32 block_bytes = 16) {
    u64 mode = ROW_BYTES == 128 ? 1 : ROW_BYTES == 64 ? 2 : 0, group = 8 * ROW_BYTES >> 4, block = block_bytes >> 4;
    return mode << 62 | group << 32 | block << 16 | (address(tile) & 0x3FFFF) >> 4;
}

#define LIST4(c, x, i) c(x[i]), c(x[i + 1]), c(x[i + 2]), c(x[i + 3])
#define LIST16(c, x, i) LIST4(c, x, i), LIST4(c, x, i + 4), LIST4(c, x, i + 8), LIST4(c, x, i + 12)
#define LIST32(c, x, i) LIST16(c, x, i), LIST16(c, x, i + 16)
#define NAMES16 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define NAMES32 NAMES16 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define NAMES48 NAMES32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define NAMES64 NAMES48 ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define NAMES80 NAMES64 ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"
#define NAMES96 NAMES80 ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define NAMES112 NAMES96 ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111"
#define NAMES128                                                                                                   \
    NAMES112 ", %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define FOUR(a) "r"((a)[0]), "r"((a)[1]), "r"((a)[2]), "r"((a)[3])

// Compute sum (+)= a b^T in INT8, 32 contracted. Rows of b, and of a where it is in shared memory, are contiguous.
DEVICE void multiply_codes(u32 (&sum)[48], const u32 *a, u64 b, int accumulate) {
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %53, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n96k32.s32.s8.s8 {" NAMES48 "}, {%48, %49, %50, %51}, %52, p; }"
        : LIST32("+r", sum, 0), LIST16("+r", sum, 32)
        : FOUR(a), "l"(b), "r"(accumulate));
}
DEVICE void multiply_codes(u32 (&sum)[64], const u32 *a, u64 b, int accumulate) {
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %69, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k32.s32.s8.s8 {" NAMES64 "}, {%64, %65, %66, %67}, %68, p; }"
        : LIST32("+r", sum, 0), LIST32("+r", sum, 32)
        : FOUR(a), "l"(b), "r"(accumulate));
}
DEVICE void multiply_codes(u32 (&sum)[32], u64 a, u64 b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n64k32.s32.s8.s8 {" NAMES32 "}, %32, %33, 1;"
                 : LIST32("+r", sum, 0)
                 : "l"(a), "l"(b));
}
DEVICE void multiply_codes(u32 (&sum)[128], u64 a, u64 b, int accumulate) {
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %130, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n256k32.s32.s8.s8 {" NAMES128 "}, %128, %129, p; }"
        : LIST32("+r", sum, 0), LIST32("+r", sum, 32), LIST32("+r", sum, 64), LIST32("+r", sum, 96)
        : "l"(a), "l"(b), "r"(accumulate));
}
// Compute sum += a b^T in 16 bits, 16 contracted.
DEVICE void multiply_rows(float (&sum)[32], u64 a, u64 b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n64k16." TYPES " {" NAMES32 "}, %32, %33, 1, 1, 1, 0, 0;"
                 : LIST32("+f", sum, 0)
                 : "l"(a), "l"(b));
}
// Compute sum = a b^T in TF32, 8 contracted, with a in registers.
DEVICE void multiply_tf32(float (&sum)[32], const u32 *a, u64 b) {
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n64k8.f32.tf32.tf32 {" NAMES32 "}, {%32, %33, %34, %35}, %36, 0, 1, 1;"
        : LIST32("=f", sum, 0)
        : FOUR(a), "l"(b));
}
// Compute sum += a b, with a in registers.
#define MULTIPLY(name, types)                                                                                         \
    DEVICE void name(float (&sum)[64], const u32 *a, u64 b) {                                                         \
        asm volatile(                                                                                                 \
            "wgmma.mma_async.sync.aligned.m64n128k16." types " {" NAMES64 "}, {%64, %65, %66, %67}, %68, 1, 1, 1, 1;" \
            : LIST32("+f", sum, 0), LIST32("+f", sum, 32)                                                             \
            : FOUR(a), "l"(b));                                                                                       \
    }                                                                                                                 \
    DEVICE void name(float (&sum)[32], const u32 *a, u64 b) {                                                         \
        asm volatile(                                                                                                 \
            "wgmma.mma_async.sync.aligned.m64n64k16." types " {" NAMES32 "}, {%32, %33, %34, %35}, %36, 1, 1, 1, 1;"  \
            : LIST32("+f", sum, 0)                                                                                    \
            : FOUR(a), "l"(b));                                                                                       \
    }
MULTIPLY(multiply, TYPES)
MULTIPLY(multiply_bf16, "f32.bf16.bf16")
// Compute sum (+)= a^T b in bfloat16.
template <int ACCUMULATE> DEVICE void multiply_columns(float (&sum)[32], u64 a, u64 b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" NAMES32 "}, %32, %33, %34, 1, 1, 1, 1;"
                 : LIST32("+f", sum, 0)
                 : "l"(a), "l"(b), "n"(ACCUMULATE));
}
// Compute sum += a b^T by one warp: a 16 x 32 INT8, b 8 x 32, both in registers.
DEVICE void multiply_in_warp(u32 *sum, const u32 *a, u32 b0, u32 b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+r"(sum[0]), "+r"(sum[1]), "+r"(sum[2]), "+r"(sum[3])
        : FOUR(a), "r"(b0), "r"(b1));
}
