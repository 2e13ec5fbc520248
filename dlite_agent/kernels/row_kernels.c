/* Row kernels of the forward for a CPU: norms, rotary heads, attention of a few rows, SwiGLU.
 *
 * Compiled on the user's machine, for its processor (kernels/native.py). Plain C with GCC's vector
 * extensions, so that one source serves every processor that the compiler knows. Elements are
 * bfloat16 (stored as the upper half of a float) or float32; everything is computed in float32. Each result depends on its own row only: the order of
 * every sum is fixed by positions, never by the number of rows, sessions or threads, so a row comes
 * out the same, bit for bit, in any batch. Pointers are to contiguous tensors.
 */
#include "interface.h"
#include "vectors.h"

#define BLOCK 32   /* keys whose scores are computed before their values are read */
#define CHUNK 512  /* keys of one task; tasks of a row are merged in the order of positions */
#define MAX_VECTORS 16 /* head_dim <= 256 */
#define MAX_ROWS 128   /* query rows that share a kv head in one task */

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

/* ---- attention ---- */

/* Neighbours of 2 * width vectors added: the sums of x[2i], then those of x[2i + 1], into x[i]. */
INLINE void add_pairs(f16 *x, const int width) {
#pragma GCC unroll 8
    for (int i = 0; i < width; i++)
        x[i] = SHUFFLE(x[2 * i], x[2 * i + 1], EVEN) + SHUFFLE(x[2 * i], x[2 * i + 1], ODD);
}

/* 16 sums at once: lane j of the result is the sum of x[j]'s lanes. */
INLINE f16 sums(f16 *x) {
    add_pairs(x, 8);
    add_pairs(x, 4);
    add_pairs(x, 2);
    add_pairs(x, 1);
    return x[0];
}

/* Scores of one query against BLOCK keys [BLOCK, vectors]. */
INLINE void score(const f16 *query, const f16 *keys, f16 *scores, const int vectors) {
    for (int g = 0; g < BLOCK / LANES; g++) {
        f16 x[LANES];
        const f16 *group = keys + g * LANES * vectors;
#pragma GCC unroll 16
        for (int j = 0; j < LANES; j++) x[j] = group[j * vectors] * query[0];
        for (int v = 1; v < vectors; v++)
#pragma GCC unroll 16
            for (int j = 0; j < LANES; j++) x[j] += group[j * vectors + v] * query[v];
        scores[g] = sums(x);
    }
}

/* acc[rows][vectors] += weights[rows][BLOCK] . values[BLOCK][vectors], four vectors of each row */
INLINE void mix(f16 *acc, const float *weights, const f16 *values, const int rows,
                const int vectors) {
    f16 x[4][4];
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < 4; v++) x[r][v] = acc[r * vectors + v];
    for (int j = 0; j < BLOCK; j++)
#pragma GCC unroll 4
        for (int v = 0; v < 4; v++) {
            f16 value = values[j * vectors + v];
#pragma GCC unroll 4
            for (int r = 0; r < rows; r++) x[r][v] += weights[r * CHUNK + j] * value;
        }
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < 4; v++) acc[r * vectors + v] = x[r][v];
}

INLINE void mix_all(f16 *acc, const float *weights, const f16 *values, int rows,
                    const int vectors) {
    for (int v = 0; v < vectors; v += 4) {
        int r = 0;
        for (; r + 4 <= rows; r += 4)
            mix(acc + r * vectors + v, weights + r * CHUNK, values + v, 4, vectors);
        f16 *last = acc + r * vectors + v;
        switch (rows - r) {
            case 3: mix(last, weights + r * CHUNK, values + v, 3, vectors); break;
            case 2: mix(last, weights + r * CHUNK, values + v, 2, vectors); break;
            case 1: mix(last, weights + r * CHUNK, values + v, 1, vectors); break;
        }
    }
}

/* Copy BLOCK rows of the pool as float32, padded to whole vectors; rows that are not there are 0. */
INLINE void gather(const void *pool, const attention *a, const part *p, count kv_head, count start,
                   count end, f16 *to, const int vectors, int is_bf16) {
    count n = a->head_dim, offset = 0;
    const span *s = a->spans + p->first_span;
    while (start >= offset + s->num_keys) offset += s->num_keys, s++;
    for (count i = start; i < end; i++) {
        if (i >= offset + s->num_keys) offset += s->num_keys, s++;
        count at = kv_head * a->head_stride + (s->pool_row + i - offset) * n;
        f16 *row = to + (i - start) * vectors;
        count item = is_bf16 ? 2 : 4;
        const char *next = (const char *)pool + (at + BLOCK * n) * item; /* of the next block */
        for (int b = 0; b < n * item; b += 64) __builtin_prefetch(next + b);
        int whole = (int)(n / LANES);
        for (int v = 0; v < whole; v++) row[v] = load(pool, at + v * LANES, is_bf16);
        if (n % LANES)
            row[whole] = load_part(pool, at + whole * LANES, (int)(n % LANES), is_bf16);
        for (int v = (int)((n + LANES - 1) / LANES); v < vectors; v++) row[v] = splat(0.0f);
    }
    memset(to + (end - start) * vectors, 0, (size_t)(BLOCK - (end - start)) * vectors * sizeof *to);
}

/* One chunk of keys against all rows of a part that share a kv head. */
INLINE void attend_chunk(const attention *a, const part *p, count chunk, count kv_head,
                         float *partial, const int vectors, int is_bf16) {
    int groups = (int)(a->num_heads / a->num_kv_heads), n = (int)a->head_dim;
    int rows = groups * (int)p->num_rows; /* (m, g) */
    f16 query[MAX_ROWS * vectors], acc[MAX_ROWS * vectors], block[BLOCK * vectors];
    float weights[MAX_ROWS * CHUNK] __attribute__((aligned(64)));
    for (int r = 0; r < rows; r++) {
        count head = (p->first_row + r / groups) * a->num_heads + kv_head * groups + r % groups;
        for (int v = 0; v < vectors; v++) {
            int left = n - v * LANES;
            query[r * vectors + v] =
                left > 0 ? load_row(a->queries + head * n, v * LANES, left, 0) : splat(0.0f);
            acc[r * vectors + v] = splat(0.0f);
        }
    }
    count begin = chunk * CHUNK;
    int size = (int)(p->num_keys - begin < CHUNK ? p->num_keys - begin : CHUNK);
    i16 lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    for (int at = 0; at < size; at += BLOCK) {
        int stop = at + BLOCK < size ? at + BLOCK : size;
        gather(a->keys, a, p, kv_head, begin + at, begin + stop, block, vectors, is_bf16);
        for (int r = 0; r < rows; r++) {
            f16 scores[BLOCK / LANES];
            score(query + r * vectors, block, scores, vectors);
            count seen = p->num_keys - p->num_rows + r / groups + 1 - begin - at;
            if (seen < BLOCK)
                for (int g = 0; g < BLOCK / LANES; g++)
                    scores[g] = pick(lane < (int)(seen > 0 ? seen : 0) - g * LANES, scores[g],
                                     splat(-__builtin_inff()));
            memcpy(weights + r * CHUNK + at, scores, sizeof scores);
        }
    }
    for (int r = 0; r < rows; r++) {
        float *row = weights + r * CHUNK;
        f16 top = splat(-__builtin_inff()), total = {};
        for (int at = 0; at < size; at += LANES) top = larger(load(row, at, 0), top);
        float peak = largest(top);
        for (int at = 0; at < (size + BLOCK - 1) / BLOCK * BLOCK; at += LANES) {
            f16 weight = peak > -__builtin_inff() ? exp16(load(row, at, 0) - peak) : splat(0.0f);
            store(row, at, weight, 0);
            total += weight;
        }
        partial[r * (n + 2) + n] = peak;
        partial[r * (n + 2) + n + 1] = sum(total);
    }
    for (int at = 0; at < size; at += BLOCK) {
        int stop = at + BLOCK < size ? at + BLOCK : size;
        gather(a->values, a, p, kv_head, begin + at, begin + stop, block, vectors, is_bf16);
        mix_all(acc, weights + at, block, rows, vectors);
    }
    for (int r = 0; r < rows; r++)
        memcpy(partial + r * (n + 2), acc + r * vectors, n * sizeof(float));
}

static void run_task(const attention *a, count task, count kv_head) {
    const part *p = a->parts + a->tasks[2 * task];
    count chunk = a->tasks[2 * task + 1];
    count rows = a->num_heads / a->num_kv_heads * p->num_rows;
    float *partial = a->partial + a->partial_at[task] + kv_head * rows * (a->head_dim + 2);
    int vectors = a->head_dim <= 64 ? 4 : a->head_dim <= 128 ? 8 : 16;
#define CASE(V)                                                            \
    case V:                                                                \
        if (a->is_bf16)                                                    \
            attend_chunk(a, p, chunk, kv_head, partial, V, 1);             \
        else                                                               \
            attend_chunk(a, p, chunk, kv_head, partial, V, 0);             \
        break;
    switch (vectors) { CASE(4) CASE(8) CASE(16) }
#undef CASE
}

/* The chunks of one query row and head, in the order of positions. */
INLINE void merge(const attention *a, const part *p, count r, count kv_head,
                  int is_bf16) {
    count groups = a->num_heads / a->num_kv_heads, n = a->head_dim;
    count rows = groups * p->num_rows, chunks = (p->num_keys + CHUNK - 1) / CHUNK;
    count at = (kv_head * rows + r) * (n + 2);
    float best = -__builtin_inff(), mass = 0.0f;
    for (count c = 0; c < chunks; c++) {
        float peak = (a->partial + a->partial_at[p->first_task + c])[at + n];
        best = peak > best ? peak : best;
    }
    f16 acc[MAX_VECTORS];
    int vectors = (int)((n + LANES - 1) / LANES);
    for (int v = 0; v < vectors; v++) acc[v] = splat(0.0f);
    for (count c = 0; c < chunks; c++) {
        const float *from = a->partial + a->partial_at[p->first_task + c] + at;
        float factor = exp16(splat(from[n] - best))[0];
        mass += from[n + 1] * factor;
        for (int v = 0; v < vectors; v++)
            acc[v] += load_row(from, v * LANES, n - v * LANES, 0) * factor;
    }
    count head = (p->first_row + r / groups) * a->num_heads + kv_head * groups + r % groups;
    for (int v = 0; v < vectors; v++)
        store_row(a->out, head * n + v * LANES, acc[v] / mass, n - v * LANES, is_bf16);
}

/* Softmax(q.k).v of the rows of several sessions, each against its own spans. */
void dlite_attend(const attention *a) {
#pragma omp parallel num_threads(a->threads) if (a->threads > 1)
    {
#pragma omp for schedule(dynamic, 1)
        for (count i = 0; i < a->num_tasks * a->num_kv_heads; i++)
            run_task(a, i / a->num_kv_heads, i % a->num_kv_heads);
#pragma omp for schedule(static)
        for (count i = 0; i < a->num_parts; i++) {
            const part *p = a->parts + i;
            count rows = a->num_heads / a->num_kv_heads * p->num_rows;
            for (count k = 0; k < a->num_kv_heads; k++)
                for (count r = 0; r < rows; r++) {
                    if (a->is_bf16)
                        merge(a, p, r, k, 1);
                    else
                        merge(a, p, r, k, 0);
                }
        }
    }
}
