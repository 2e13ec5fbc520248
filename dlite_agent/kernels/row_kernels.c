/* Row kernels of the forward for a CPU: norms, rotary heads, SwiGLU.
 *
 * Compiled on the user's machine, for its processor (kernels/native.py). Plain C with GCC's vector
 * extensions, so that one source serves every processor that the compiler knows. Elements are
 * bfloat16 (stored as the upper half of a float) or float32; everything is computed in float32. Each
 * result depends on its own row only: the order of every sum is fixed by positions, never by the
 * number of rows, sessions or threads, so a row comes out the same, bit for bit, in any batch.
 * Pointers are to contiguous tensors.
 */
#include "interface.h"
#include "vectors.h"

#define MAX_VECTORS 16 /* head_dim <= 256 */

float sqrtf(float);

/* ---- normalisation ---- */

INLINE void norm_row(const void *x, const void *delta, const float *weight, void *total, void *out,
                     count size, float eps, int is_bf16) {
    f16 squares[2] = {{}, {}};
    for (count i = 0, turn = 0; i < size; i += LANES, turn ^= 1) {
        f16 value = load_row(x, i, size - i, is_bf16);
        if (delta) {
            value += load_row(delta, i, size - i, is_bf16);
            store_row(total, i, value, size - i, is_bf16);
            value = load_row(total, i, size - i, is_bf16);
        }
        squares[turn] += value * value;
    }
    float scale = 1.0f / sqrtf(sum(squares[0] + squares[1]) / (float)size + eps);
    const void *source = delta ? total : x;
    for (count i = 0; i < size; i += LANES) {
        f16 value = load_row(source, i, size - i, is_bf16) * scale;
        store_row(out, i, value * load_row(weight, i, size - i, 0), size - i, is_bf16);
    }
}

/* out = norm(x) * weight; with a delta: total = x + delta, out = norm(total) * weight. */
void dlite_norm(const void *x, const void *delta, const float *weight, void *total, void *out,
                count rows, count size, float eps, int is_bf16, int threads) {
    count bytes = size * (is_bf16 ? 2 : 4);
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (count m = 0; m < rows; m++) {
        const char *xm = (const char *)x + m * bytes;
        const char *dm = delta ? (const char *)delta + m * bytes : 0;
        char *tm = (char *)total + m * bytes, *om = (char *)out + m * bytes;
        if (is_bf16)
            norm_row(xm, dm, weight, tm, om, size, eps, 1);
        else
            norm_row(xm, dm, weight, tm, om, size, eps, 0);
    }
}

/* ---- SwiGLU ---- */

INLINE void swiglu_row(const void *gate_up, void *out, count size, int is_bf16) {
    for (count i = 0; i < size; i += LANES) {
        f16 gate = load_row(gate_up, i, size - i, is_bf16);
        f16 up = load_row(gate_up, size + i, size - i, is_bf16);
        f16 bounded = pick(gate < -80.0f, splat(-80.0f), gate);
        store_row(out, i, gate / (1.0f + exp16(-bounded)) * up, size - i, is_bf16);
    }
}

/* out [rows, size] = silu(gate) * up; gate_up is [rows, 2 size]. */
void dlite_swiglu(const void *gate_up, void *out, count rows, count size, int is_bf16,
                  int threads) {
    count bytes = size * (is_bf16 ? 2 : 4);
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (count m = 0; m < rows; m++) {
        const char *from = (const char *)gate_up + 2 * m * bytes;
        char *to = (char *)out + m * bytes;
        if (is_bf16)
            swiglu_row(from, to, size, 1);
        else
            swiglu_row(from, to, size, 0);
    }
}

/* ---- heads: norm, rotation, and where they go ---- */

/* Norm and rotate one head of size n; partners stand side by side. */
INLINE void turn_head(const void *from, const float *weight, const float *rotation, void *to,
                      const heads *h, int is_bf16, int is_bf16_out) {
    int n = (int)h->head_dim;
    f16 part[MAX_VECTORS];
    f16 squares = {};
    int vectors = (n + LANES - 1) / LANES;
    for (int v = 0; v < vectors; v++) {
        part[v] = load_row(from, v * LANES, n - v * LANES, is_bf16);
        squares += part[v] * part[v];
    }
    float scale = h->is_normed ? 1.0f / sqrtf(sum(squares) / (float)n + h->eps) : 1.0f;
    const f16 sign = {-1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1};
    for (int v = 0; v < vectors; v++) {
        int at = v * LANES, left = n - v * LANES;
        f16 x = part[v] * scale * load_row(weight, at, left, 0);
        f16 turn = load_row(rotation, at, left, 0);
        f16 cosine = SHUFFLE(turn, turn, EVEN_TWICE), sine = SHUFFLE(turn, turn, ODD_TWICE);
        store_row(to, at, x * cosine + SHUFFLE(x, x, SWAPPED) * (sine * sign), left, is_bf16_out);
    }
}

INLINE void place_row(const void *qkv, const heads *h, count m, int is_bf16) {
    int n = (int)h->head_dim;
    count item = is_bf16 ? 2 : 4, all = h->num_heads + h->num_kv_heads;
    const char *row = (const char *)qkv + m * (all + h->num_kv_heads) * n * item;
    const float *rotation = h->rotation + m * n;
    for (count i = 0; i < h->num_heads; i++)
        turn_head(row + i * n * item, h->weight + i * n, rotation,
                  h->queries + (m * h->num_heads + i) * n, h, is_bf16, 0);
    for (count k = 0; k < h->num_kv_heads; k++) {
        count slot = k * h->head_stride + h->slots[m] * n, i = h->num_heads + k;
        turn_head(row + i * n * item, h->weight + i * n, rotation, (char *)h->keys + slot * item, h,
                  is_bf16, is_bf16);
        memcpy((char *)h->values + slot * item, row + (all + k) * n * item, n * item);
    }
}

/* qkv [rows, (H + 2K) D]: queries to a buffer, keys and values to their rows of the pool. */
void dlite_heads(const void *qkv, const heads *h, count rows) {
#pragma omp parallel for num_threads(h->threads) if (h->threads > 1 && rows > 16)
    for (count m = 0; m < rows; m++) {
        if (h->is_bf16)
            place_row(qkv, h, m, 1);
        else
            place_row(qkv, h, m, 0);
    }
}
