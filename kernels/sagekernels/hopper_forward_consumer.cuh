// A consumer of hopper_forward.cu, which includes this file behind its constants and structs: 64 queries, their scores,
// softmax and sums.
//
// A thread owns rows lane / 4 and lane / 4 + 8 of its warp's 16. Of every 8 keys, or dimensions of O, it owns columns 2
// c and 2 c + 1 with c = lane % 4: x[4 i + 2 r + b] is row r, column 8 i + 2 c + b.

struct Rows {  // The rows of a block that is done.
    u32 *out;
    int words, left;  // The distance from row to row, and the rows from the first one on.
    float inverse[2];
};

struct Consumer {
    Shared &shared;
    const Problem &problem;
    int wg, c, row;
    u32 q[D / 8];            // INT8 codes, operand A of Q K^T.
    float q_scale[2];        // The unit is log2 units of a score.
    u32 s[BLOCK_N / 2];      // INT32 scores, then floats.
    u32 p[BLOCK_N / 4];      // 16 bits, operand A of P V.
    float o[D / 2];
    // The reference of the exponentials in log2 units, and this thread's part of the row sum.
    float m[2], l[2];
    float4 k_scale[BLOCK_N / 16];

    // Wait for the next block of queries and load its codes. Return how many key tiles are to be skipped, or -1 if
    // there are no more blocks.
    DEVICE int start(u32 parity) {
        wait(shared.q_coded[wg], parity);
        const Part &part = shared.part[parity][wg];
        int skipped = uniform(part.skipped), lane = threadIdx.x % 32, first = threadIdx.x / 32 % 4 * 16;
        if (skipped < 0) return skipped;
        row = part.row + first + lane / 4;
        q_scale[0] = shared.q_scale[wg][first + lane / 4];
        q_scale[1] = shared.q_scale[wg][first + lane / 4 + 8];
        int at = first + lane % 16, swizzle = D == 128 ? at % 8 : at / 2 % 4;
#pragma unroll
        for (int i = 0; i < D / 32; i++)
            load_matrices(q + 4 * i, address(shared.q[wg]) + CODES_AT + at * D + ((2 * i + lane / 16 ^ swizzle) << 4));
        return skipped;
    }

    // Give back the first tiles of a block of queries if only the warpgroups after this one see them.
    DEVICE Ring skip(Ring at, int tiles) {
#pragma unroll 1
        for (; tiles > 0; tiles--, at = at.next()) {
            wait(shared.k_full[at.stage], at.parity);
            wait(shared.v_full[at.stage], at.parity);
            __syncwarp();
            if (threadIdx.x % 32 == 0) arrive(shared.free[at.stage]);
        }
        return at;
    }

    DEVICE void issue_scores(int stage) {
        load_scales(stage);
        pin(s);
        wgmma_fence();
        u64 k = operand<D>(shared.k[stage]);
#pragma unroll
        for (int i = 0; i < D / 32; i++) multiply_codes(s, q + 4 * i, k + 2 * i, i > 0);
        wgmma_commit();
    }

    DEVICE void issue_values(int stage) {
        pin(o);
        wgmma_fence();
        u64 v = operand(shared.v[stage], V_BYTES / HALVES);
#pragma unroll
        for (int i = 0; i < BLOCK_N / 16; i++) multiply(o, p + 4 * i, v + 128 * i);
        wgmma_commit();
    }

    // Compute the scores as floats, -inf where masked, without the scale of the query.
    template <bool MASKED> DEVICE float scaled(int i, int e, const int *first, const int *last) {
        const float4 &four = k_scale[i / 2];
        float t = __int2float_rn(s[4 * i + e]) * (i % 2 ? (e % 2 ? four.w : four.z) : (e % 2 ? four.y : four.x));
        if (MASKED) {
            int key = 8 * i + e % 2, r = e / 2;
            bool seen = key <= last[r];
            if (PACKED) seen = seen && key >= first[r];
            if (!seen) t = __int_as_float(0xFF800000);
        }
        return t;
    }

    // Return the keys that this thread's rows see, counted from its own first key of the tile.
    DEVICE void bounds(int key0, int *first, int *last) {
#pragma unroll
        for (int r = 0; r < 2; r++) {
            problem.bounds(row + 8 * r, first[r], last[r]);
            first[r] -= key0 + 2 * c, last[r] -= key0 + 2 * c;
        }
    }

    // Compute probabilities relative to the maximum so far. O has to be multiplied by alpha.
    DEVICE void exact_softmax(int key0, float *alpha) {
        float top[2] = {LOWEST, LOWEST};
        int first[2], last[2];
        bounds(key0, first, last);
#pragma unroll
        for (int i = 0; i < BLOCK_N / 2; i++) {
            float t = scaled<true>(i / 4, i % 4, first, last);
            top[i / 2 % 2] = fmaxf(top[i / 2 % 2], t);
            s[i] = __float_as_int(t);
        }
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float old = m[r];
            m[r] = fmaxf(old, row_reduce(top[r], [](float a, float b) { return fmaxf(a, b); }) * q_scale[r]);
            alpha[r] = power2(old - m[r]);
            l[r] *= alpha[r];
        }
#pragma unroll
        for (int i = 0; i < BLOCK_N / 2; i++) {
            int r = i / 2 % 2;
            float x = power2(__int_as_float(s[i]) * q_scale[r] - m[r]);
            l[r] += x;
            s[i] = __float_as_int(x);
        }
    }

    // Compute probabilities relative to an old maximum, which is as good while nothing overflows. Their sum shows an
    // overflow: the probabilities then have to be computed again, and true is returned. Nothing waits for the maximum,
    // and lanes do not meet.
    template <bool MASKED> DEVICE bool softmax(int key0) {
        float sum[2] = {0.0f, 0.0f};
        int first[2], last[2];
        if (MASKED) bounds(key0, first, last);
#pragma unroll
        for (int i = 0; i < BLOCK_N / 2; i += 2) {
            int r = i / 2 % 2;
            float x = scaled<MASKED>(i / 4, i % 4, first, last) * q_scale[r] - m[r];
            float y = scaled<MASKED>(i / 4, i % 4 + 1, first, last) * q_scale[r] - m[r];
            x = power2(x), y = power2(y);
            sum[r] += x;
            sum[r] += y;
            s[i] = __float_as_int(x), s[i + 1] = __float_as_int(y);
        }
        bool again = __any_sync(~0u, !(sum[0] + sum[1] <= LIMIT));
        if (!again) l[0] += sum[0], l[1] += sum[1];
        return again;
    }

    // Compute this warp's scores once more, by the instructions of one warp. This is rare.
    DEVICE void scores_again(int stage) {
        const unsigned char *keys = shared.k[stage] + threadIdx.x % 32 / 4 * D;
        // These bits of the row move the 16-byte pieces of a row of D bytes.
        constexpr int SWIZZLE = D / 16 - 1;
        int row = D == 128 ? threadIdx.x % 32 / 4 : threadIdx.x % 32 / 8;
#pragma unroll
        for (int i = 0; i < BLOCK_N / 8; i++) {
            s[4 * i] = s[4 * i + 1] = s[4 * i + 2] = s[4 * i + 3] = 0;
#pragma unroll
            for (int j = 0; j < D / 32; j++) {
                u32 low = *(const u32 *)(keys + 8 * i * D + ((2 * j) ^ (row & SWIZZLE)) * 16 + 4 * c);
                u32 high = *(const u32 *)(keys + 8 * i * D + ((2 * j + 1) ^ (row & SWIZZLE)) * 16 + 4 * c);
                multiply_in_warp(s + 4 * i, q + 4 * j, low, high);
            }
        }
        load_scales(stage);
    }

    DEVICE void load_scales(int stage) {
#pragma unroll
        for (int i = 0; i < BLOCK_N / 16; i++) k_scale[i] = ((const float4 *)shared.k_scale[stage])[4 * i + c];
    }

    DEVICE void narrow() {
#pragma unroll
        for (int i = 0; i < BLOCK_N / 4; i++) p[i] = pack(__int_as_float(s[2 * i]), __int_as_float(s[2 * i + 1]));
    }

    // Compute P V of the tile in `stage` and, under it, scores and softmax of the next tile, whose first key is key0.
    // EXACT where rows may have seen no key yet.
    template <bool MASKED, bool EXACT> DEVICE void step(Ring &at, int key0) {
        Ring next = at.next();
        wait(shared.v_full[at.stage], at.parity);
        wait(shared.k_full[next.stage], next.parity);
        issue_scores(next.stage);
        issue_values(at.stage);
        wgmma_wait<1>();
        pin(s);
        if (__builtin_expect(EXACT || softmax<MASKED>(key0), EXACT)) {
            float alpha[2];
            if (!EXACT) scores_again(next.stage);
            exact_softmax(key0, alpha);
            wgmma_wait<0>();
            pin(o);
#pragma unroll
            for (int i = 0; i < D / 2; i++) o[i] *= alpha[i / 2 % 2];
        }
        wgmma_wait<0>();
        pin(o);
        pin(p);
        if (threadIdx.x % 32 == 0) arrive(shared.free[at.stage]);
        at = next;
        narrow();
    }

    // Write the log-sum-exp of this thread's rows. Return where their O goes and its factor.
    DEVICE Rows finish(const Part &part, const float *sinks, u32 *out, float *lse) {
        int head = uniform(part.head), batch = uniform(part.batch);
        Rows rows;
        rows.words = problem.heads * D / 2, rows.left = problem.n_q - row;
        rows.out = out + ((long long)batch * problem.n_q + row) * rows.words + (head - batch * problem.heads) * (D / 2) +
                   c % 2 * 4 + c / 2 * 2;
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float sum = row_reduce(l[r], [](float a, float b) { return a + b; }), all = m[r] + logarithm2(sum);
            const long long at = (long long)head * problem.n_q + row + 8 * r;
            rows.inverse[r] = 1.0f / sum;
            if (SINKS && 8 * r < rows.left) {
                const float own = sinks[at] * LOG2E, larger = fmaxf(all, own);
                const float both = larger + logarithm2(power2(all - larger) + power2(own - larger));
                rows.inverse[r] *= power2(all - both);
                all = both;
            }
            if (8 * r < rows.left && c == 0) lse[at] = all * LN2;
        }
        return rows;
    }

    // Lanes exchange pairs of columns, to store four at once.
    DEVICE void store(const Rows &rows) {
#pragma unroll
        for (int r = 0; r < 2; r++) {
            u32 *to = rows.out + 8 * r * rows.words;
#pragma unroll
            for (int i = 0; i < D / 8; i += 2) {
                u32 even = pack(o[4 * i + 2 * r] * rows.inverse[r], o[4 * i + 2 * r + 1] * rows.inverse[r]);
                u32 odd = pack(o[4 * i + 4 + 2 * r] * rows.inverse[r], o[4 * i + 5 + 2 * r] * rows.inverse[r]);
                u32 other = __shfl_xor_sync(~0u, c % 2 ? even : odd, 1);
                uint2 four = c % 2 ? make_uint2(other, odd) : make_uint2(even, other);
                if (8 * r < rows.left) *(uint2 *)(to + 4 * i) = four;
            }
        }
    }

    // Compute the first tile of a block of queries, for which no maximum is known.
    DEVICE void first_softmax(const Part &part) {
        float alpha[2];
        m[0] = m[1] = LOWEST;
        l[0] = l[1] = 0.0f;
        exact_softmax(uniform(part.last) * BLOCK_N, alpha);
    }

    DEVICE void begin() {
        narrow();
#pragma unroll
        for (int i = 0; i < D / 2; i++) o[i] = 0.0f;
    }
};
