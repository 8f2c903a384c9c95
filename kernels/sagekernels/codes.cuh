// INT8 codes as quantize.quantize_twin makes them; after device.cuh or its stand-in.

DEVICE int least(int a, int b) { return a < b ? a : b; }
DEVICE int most(int a, int b) { return a > b ? a : b; }
DEVICE int magnitude(float x) { return __float_as_int(x) & 0x7FFFFFFF; }  // orders as |x| does, NaN above infinity

// What the values of a group are multiplied by, from the largest magnitude; negative if that is not finite: then codes
// are 0, and NaN times the scale.
DEVICE float inverse_scale(int largest) {
    float top = __int_as_float(largest);
    return largest >= 0x7F800000 ? -1.0f : top > 0x1p-119f ? 127.0f / top : 0.0f;
}
DEVICE u32 four_codes(const float *y, float inverse) {
    u32 z[4];
#pragma unroll
    for (int e = 0; e < 4; e++) z[e] = __float_as_int(__fmul_rn(y[e], inverse) + 12582912.0f);  // to nearest even
    u32 word = __byte_perm(__byte_perm(z[0], z[1], 0x40), __byte_perm(z[2], z[3], 0x40), 0x5410);
    return inverse < 0.0f ? 0 : word;
}
