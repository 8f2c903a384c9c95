// Layouts of tiles for the kernels by mma.sync: in shared memory and, where whole tiles are copied, in global memory
// too.

// Return the byte at which 16 bytes of a row stand. Eight rows that are read at one time lie in different banks.
template <int ROW_BYTES> DEVICE u32 place(u32 row, u32 chunk) {
    return row * ROW_BYTES + 16 * (ROW_BYTES == 64 ? chunk ^ (row >> 1 & 3) : chunk ^ (row & 7));
}

// Transposed codes have D rows of 64 tokens, in the order in which the other operand comes out of a product. Word w of
// a row holds four tokens, those with e from 0 to 3. AsColumns: sums of a product are rows g of it with columns 2c and
// 2c + 1 of each eight. Four of them, of two eights, are a register of the A operand of the next product.
struct AsColumns {
    static DEVICE int token(int w, int e) { return w / 4 * 16 + e / 2 * 8 + w % 4 * 2 + e % 2; }
};
// AsRows: movmatrix transposes rows g and g + 8 of sums, as two bytes.
struct AsRows {
    static DEVICE int token(int w, int e) { return w / 4 * 16 + e % 2 * 8 + w % 4 * 2 + e / 2; }
};

// 64 queries as mma_prepare.cu writes them and mma_backward.cu copies them, in one piece: codes of Q and dO in 16 bits
// as rows, both as transposed codes in the order AsColumns, and pairs of floats (see mma_prepare.cu) of two queries.
template <int D> struct QueryTile {
    signed char q8[64 * D], q_turned[D * 64];
    unsigned short dO[64 * D];
    signed char do_turned[D * 64];
    float4 exponent[32], gradient[32];
};

// Return the same value in a register that ptxas does not look through. Otherwise ptxas would compute an address from
// its parts, or move a constant into place, at every use.
DEVICE u32 opaque(u32 x) { return __shfl_sync(~0u, x, threadIdx.x % 32); }
