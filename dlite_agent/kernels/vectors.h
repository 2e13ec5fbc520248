/* Vectors of 16 floats, in GCC's vector extensions, and elements of bfloat16 or float32. */
#ifndef DLITE_VECTORS_H
#define DLITE_VECTORS_H
#include <string.h>

#include "interface.h"

typedef float f16 __attribute__((vector_size(64)));
typedef int32_t i16 __attribute__((vector_size(64)));
typedef uint32_t u16 __attribute__((vector_size(64)));
typedef uint16_t h16 __attribute__((vector_size(32)));

#define INLINE static inline __attribute__((always_inline))
#define LANES 16
#define SHUFFLE(...) __builtin_shufflevector(__VA_ARGS__)
#define EVEN 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30
#define ODD 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31
#define EVEN_TWICE 0, 0, 2, 2, 4, 4, 6, 6, 8, 8, 10, 10, 12, 12, 14, 14
#define ODD_TWICE 1, 1, 3, 3, 5, 5, 7, 7, 9, 9, 11, 11, 13, 13, 15, 15
#define SWAPPED 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14

/* ---- elements ---- */

INLINE f16 splat(float x) { return x - (f16){}; }

INLINE f16 pick(i16 mask, f16 yes, f16 no) { /* mask: -1 or 0 in each lane */
    i16 a, b;
    memcpy(&a, &yes, sizeof a);
    memcpy(&b, &no, sizeof b);
    a = (a & mask) | (b & ~mask);
    memcpy(&yes, &a, sizeof a);
    return yes;
}

INLINE f16 load(const void *base, count at, int is_bf16) {
    f16 out;
    if (is_bf16) {
        h16 raw;
        memcpy(&raw, (const uint16_t *)base + at, sizeof raw);
        u16 wide = __builtin_convertvector(raw, u16) << 16;
        memcpy(&out, &wide, sizeof out);
    } else {
        memcpy(&out, (const float *)base + at, sizeof out);
    }
    return out;
}

INLINE void store(void *base, count at, f16 x, int is_bf16) {
    if (is_bf16) {
        u16 bits;
        memcpy(&bits, &x, sizeof bits);
        u16 rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16; /* to nearest, ties to even */
        u16 is_nan = (u16)(x != x);
        h16 raw = __builtin_convertvector((rounded & ~is_nan) | (0x7fc0 & is_nan), h16);
        memcpy((uint16_t *)base + at, &raw, sizeof raw);
    } else {
        memcpy((float *)base + at, &x, sizeof x);
    }
}

/* The last, incomplete vector of a row: zeros behind its n elements. */
INLINE f16 load_part(const void *base, count at, int n, int is_bf16) {
    uint32_t raw[LANES] = {0};
    if (is_bf16) {
        for (int i = 0; i < n; i++) raw[i] = (uint32_t)((const uint16_t *)base)[at + i] << 16;
    } else {
        memcpy(raw, (const float *)base + at, n * sizeof(float));
    }
    f16 out;
    memcpy(&out, raw, sizeof out);
    return out;
}

INLINE void store_part(void *base, count at, f16 x, int n, int is_bf16) {
    char raw[64];
    store(raw, 0, x, is_bf16);
    if (is_bf16)
        memcpy((uint16_t *)base + at, raw, n * sizeof(uint16_t));
    else
        memcpy((float *)base + at, raw, n * sizeof(float));
}

INLINE f16 load_row(const void *base, count at, count left, int is_bf16) {
    return left >= LANES ? load(base, at, is_bf16) : load_part(base, at, (int)left, is_bf16);
}

INLINE void store_row(void *base, count at, f16 x, count left, int is_bf16) {
    if (left >= LANES)
        store(base, at, x, is_bf16);
    else
        store_part(base, at, x, (int)left, is_bf16);
}

INLINE float sum(f16 x) {
    float part[LANES];
    memcpy(part, &x, sizeof part);
    for (int width = LANES / 2; width > 0; width /= 2)
        for (int i = 0; i < width; i++) part[i] += part[i + width];
    return part[0];
}

INLINE float largest(f16 x) {
    float part[LANES];
    memcpy(part, &x, sizeof part);
    for (int width = LANES / 2; width > 0; width /= 2)
        for (int i = 0; i < width; i++)
            part[i] = part[i] > part[i + width] ? part[i] : part[i + width];
    return part[0];
}

INLINE f16 larger(f16 a, f16 b) { return pick(a > b, a, b); }

/* exp(x) for x <= 88: x = n ln 2 + r, a polynomial of degree 6 in r, and n into the exponent.
 * Relative error below 2e-7; 0 below -87, -inf included. Coefficients: Cephes expf. */
INLINE f16 exp16(f16 x) {
    i16 is_tiny = x < -87.0f;
    f16 clipped = pick(is_tiny, splat(-87.0f), x);
    f16 n = clipped * 1.44269504f + 12582912.0f; /* 1.5 * 2^23: rounds to a whole number */
    n -= 12582912.0f;
    f16 r = clipped - n * 0.693359375f;
    r -= n * -2.12194440e-4f;
    f16 p = splat(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    i16 bits;
    memcpy(&bits, &p, sizeof bits);
    bits += __builtin_convertvector(n, i16) << 23;
    memcpy(&p, &bits, sizeof p);
    return pick(is_tiny, splat(0.0f), p);
}

#endif
