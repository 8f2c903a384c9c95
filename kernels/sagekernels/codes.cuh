// Make INT8 codes as quantize.quantize_twin does. Include this file after device.cuh or its stand-in.

DEVICE int least(int a, int b) { return a < b ? a : b; }
DEVICE int most(int a, int b) { return a > b ? a : b; }
// The result orders as |x| does, with NaN above infinity.
DEVICE int magnitude(float x) { return __float_as_int(x) & 0x7FFFFFFF; }

// Return the factor for the values of a group, from the largest magnitude. A negative factor says that the magnitude is
// not finite: codes are then 0, and NaN times the scale.
DEVICE float inverse_scale(int largest) {
    float top = __int_as_float(largest);
    return largest >= 0x7F800000 ? -1.0f : top > 0x1p-119f ? 127.0f / top : 0.0f;
}
DEVICE u32 four_codes(const float *y, float inverse) {
    u32 z[4];
#pragma unroll
    // The addition rounds ties to even.
    for (int e = 0; e < 4; e++) z[e] = __float_as_int(__fmul_rn(y[e], inverse) + 12582912.0f);
    u32 word = __byte_perm(__byte_perm(z[0], z[1], 0x40), __byte_perm(z[2], z[3], 0x40), 0x5410);
    return inverse < 0.0f ? 0 : word;
}
// Convert eight values in 16 bits.
DEVICE void unpack(const uint4 &x, float *y) {
    unpack(x.x, y[0], y[1]), unpack(x.y, y[2], y[3]), unpack(x.z, y[4], y[5]), unpack(x.w, y[6], y[7]);
}
