/* Softmax(q.k).v of a few rows, each session's against its own spans of the pool.
 *
 * A task is a chunk of keys of one kv head, against all rows of a session and all query heads that
 * share the head: its keys and values are read once. Chunks are merged in the order of positions.
 * bfloat16 goes to the matrix unit where there is one (tile_attention.c), the rest to vectors. Which
 * of them depends on the heads alone, so a row comes out the same, bit for bit, in any company.
 */
#include "interface.h"
#include "vectors.h"

typedef float f16u __attribute__((vector_size(64), aligned(4), may_alias));

#define BLOCK 32   /* keys whose scores are computed before their values are read */
#define MAX_VECTORS 16 /* head_dim <= 256 */
#define LOWER_HALVES 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23
#define UPPER_HALVES 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31

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

/* Scores of two queries against BLOCK keys [BLOCK, vectors]: each key is loaded once for both. */
INLINE void score_two(const f16 *queries, const f16u *keys, f16 *scores, const int vectors) {
    for (int g = 0; g < BLOCK / LANES; g++) {
        f16 half[2]; /* of 8 keys: of the first query, then of the second */
#pragma GCC unroll 2
        for (int h = 0; h < 2; h++) {
            f16 x[LANES];
            const f16u *group = keys + (g * LANES + h * 8) * vectors;
#pragma GCC unroll 8
            for (int j = 0; j < 8; j++) {
                f16 key = group[j * vectors];
                x[j] = key * queries[0], x[8 + j] = key * queries[vectors];
            }
            for (int v = 1; v < vectors; v++)
#pragma GCC unroll 8
                for (int j = 0; j < 8; j++) {
                    f16 key = group[j * vectors + v];
                    x[j] += key * queries[v], x[8 + j] += key * queries[vectors + v];
                }
            half[h] = sums(x);
        }
        scores[g] = SHUFFLE(half[0], half[1], LOWER_HALVES);
        scores[BLOCK / LANES + g] = SHUFFLE(half[0], half[1], UPPER_HALVES);
    }
}

/* The same of one query, every sum in the same order. */
INLINE void score(const f16 *query, const f16u *keys, f16 *scores, const int vectors) {
    for (int g = 0; g < BLOCK / LANES; g++) {
        f16 x[LANES];
        const f16u *group = keys + g * LANES * vectors;
#pragma GCC unroll 16
        for (int j = 0; j < LANES; j++) x[j] = group[j * vectors] * query[0];
        for (int v = 1; v < vectors; v++)
#pragma GCC unroll 16
            for (int j = 0; j < LANES; j++) x[j] += group[j * vectors + v] * query[v];
        scores[g] = sums(x);
    }
}

/* Ask for part `i` of `parts` of the bytes behind a block: evenly while the block is computed with,
 * since a core waits for few lines of memory at once. */
INLINE void fetch(const char *next, int bytes, int i, int parts) {
    int from = bytes / 64 * i / parts, to = bytes / 64 * (i + 1) / parts;
    for (; from < to; from++) __builtin_prefetch(next + from * 64);
}

/* acc[rows][vectors] += weights[rows][BLOCK] . values[BLOCK][vectors], four vectors of each row */
INLINE void mix(f16 *acc, const float *weights, const f16u *values, const int rows,
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

INLINE void mix_all(f16 *acc, const float *weights, const f16u *values, int rows,
                    const int vectors, const char *next, int next_bytes) {
    int parts = (rows + 3) / 4 * vectors / 4, part = 0;
    for (int v = 0; v < vectors; v += 4) {
        int r = 0;
        if (rows % 4) fetch(next, next_bytes, part++, parts);
        for (; r + 4 <= rows; r += 4, fetch(next, next_bytes, part++, parts))
            mix(acc + r * vectors + v, weights + r * CHUNK, values + v, 4, vectors);
        f16 *last = acc + r * vectors + v;
        switch (rows - r) {
            case 3: mix(last, weights + r * CHUNK, values + v, 3, vectors); break;
            case 2: mix(last, weights + r * CHUNK, values + v, 2, vectors); break;
            case 1: mix(last, weights + r * CHUNK, values + v, 1, vectors); break;
        }
    }
}

/* BLOCK rows of the pool as float32, in whole vectors: where they lie if they lie so, else copied,
 * with zeros for rows that are not there. `next`: where the rows behind them lie. */
INLINE const f16u *rows_of(const void *pool, const attention *a, const part *p, count kv_head,
                           count start, count end, f16 *copy, const char **next, const int vectors,
                           int is_bf16) {
    count n = a->head_dim, offset = 0, item = is_bf16 ? 2 : 4;
    const span *s = a->spans + p->first_span;
    const char *base = (const char *)pool + kv_head * a->head_stride * item;
    while (start >= offset + s->num_keys) offset += s->num_keys, s++;
    const char *from = base + (s->pool_row + start - offset) * n * item;
    *next = from + BLOCK * n * item;
    int is_whole = start + BLOCK <= end && end <= offset + s->num_keys;
    if (!is_bf16 && is_whole && n == vectors * LANES) return (const f16u *)from;
    int whole = (int)(n / LANES);
    for (count i = start; i < end; i++) {
        if (i >= offset + s->num_keys) offset += s->num_keys, s++;
        const char *row = base + (s->pool_row + i - offset) * n * item;
        f16 *to = copy + (i - start) * vectors;
        for (int v = 0; v < whole; v++) to[v] = load(row, v * LANES, is_bf16);
        if (n % LANES) to[whole] = load_part(row, whole * LANES, (int)(n % LANES), is_bf16);
        for (int v = (int)((n + LANES - 1) / LANES); v < vectors; v++) to[v] = splat(0.0f);
    }
    count missing = BLOCK - (end - start);
    memset(copy + (end - start) * vectors, 0, missing * vectors * sizeof *copy);
    return (const f16u *)copy;
}

/* One chunk of keys against all rows of a part that share a kv head. */
INLINE void attend_chunk(const attention *a, const part *p, count chunk, count kv_head,
                         float *partial, const int vectors, int is_bf16) {
    int groups = (int)(a->num_heads / a->num_kv_heads), n = (int)a->head_dim;
    int rows = groups * (int)p->num_rows, block_bytes = BLOCK * n * (is_bf16 ? 2 : 4); /* (m, g) */
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
    const char *next;
    for (int at = 0; at < size; at += BLOCK) {
        int stop = at + BLOCK < size ? at + BLOCK : size;
        const f16u *keys = rows_of(a->keys, a, p, kv_head, begin + at, begin + stop, block, &next,
                                   vectors, is_bf16);
        for (int r = 0; r < rows; r += 2) {
            f16 scores[2 * BLOCK / LANES];
            fetch(next, block_bytes, r / 2, (rows + 1) / 2);
            if (r + 1 < rows)
                score_two(query + r * vectors, keys, scores, vectors);
            else
                score(query + r * vectors, keys, scores, vectors);
            for (int i = r; i < rows && i < r + 2; i++) {
                f16 *row = scores + (i - r) * BLOCK / LANES;
                count seen = p->num_keys - p->num_rows + i / groups + 1 - begin - at;
                if (seen < BLOCK)
                    for (int g = 0; g < BLOCK / LANES; g++)
                        row[g] = pick(lane < (int)(seen > 0 ? seen : 0) - g * LANES, row[g],
                                      splat(-__builtin_inff()));
                memcpy(weights + i * CHUNK + at, row, BLOCK * sizeof(float));
            }
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
        const f16u *values = rows_of(a->values, a, p, kv_head, begin + at, begin + stop, block,
                                     &next, vectors, is_bf16);
        mix_all(acc, weights + at, values, rows, vectors, next, block_bytes);
    }
    for (int r = 0; r < rows; r++)
        memcpy(partial + r * (n + 2), acc + r * vectors, n * sizeof(float));
}

static void run_task(const attention *a, count task, count kv_head) {
    const part *p = a->parts + a->tasks[2 * task];
    count chunk = a->tasks[2 * task + 1];
    count rows = a->num_heads / a->num_kv_heads * p->num_rows;
    float *partial = a->partial + a->partial_at[task] + kv_head * rows * (a->head_dim + 2);
    if (a->uses_tiles && a->is_bf16 && a->head_dim % 64 == 0)
        return dlite_attend_tiles(a, p, chunk, kv_head, partial);
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
            run_task(a, i % a->num_tasks, i / a->num_tasks);
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
