/* A task of attention on the processor's matrix unit (Intel AMX): attention_kernels.c says of what.
 *
 * Numbers are sums of bfloat16 planes, each holding the next 8 bits: keys and values in bfloat16 are
 * one plane, in float32 three, which is exact; queries and weights are two (16 bits) beside bfloat16,
 * three beside float32. Products of planes below the last bit of the sum are left out. A product of
 * tiles adds two neighbours of the inner dimension at once, so scores take pairs of elements as they
 * lie (float32: 16 apart), and values pairs of keys 16 apart.
 */
#include "vectors.h"

#if defined(__AMX_BF16__) && defined(__linux__)
#include <immintrin.h>

#define GROUP 64 /* keys of one step: four tiles of 16 */
#define TILE 256 /* words: 16 lines of 64 bytes */
#define MAX_PLANES 3
#define AHEAD_BYTES 2048 /* that keys and values are fetched before they are used */
#define UPPER 0xffff0000u

typedef uint16_t h32 __attribute__((vector_size(64)));

typedef struct {
    const attention *a;
    const part *p;
    count kv_head, begin;
    int size;                /* keys */
    int rows, tiles, height; /* query rows (m, g); cut into tiles of so many rows */
    int width;               /* of a tile of scores: the power of two that holds its rows */
    const span *span;        /* of the next keys, and its first key in the session */
    count offset;
} task;

/* ---- planes ---- */

INLINE u16 bits_of(f16 x) {
    u16 out;
    memcpy(&out, &x, sizeof out);
    return out;
}

INLINE f16 upper_of(f16 x) {
    u16 bits = bits_of(x) & UPPER;
    f16 out;
    memcpy(&out, &bits, sizeof out);
    return out;
}

/* Planes of pairs of numbers: word j of each has low[j] in its lower half, high[j] in its upper. */
INLINE void split(f16 low, f16 high, uint32_t *to, count plane, const int planes) {
#pragma GCC unroll 3
    for (int i = 0; i < planes; i++) {
        u16 words = bits_of(low) >> 16 | (bits_of(high) & UPPER);
        memcpy(to + i * plane, &words, sizeof words);
        low -= upper_of(low), high -= upper_of(high);
    }
}

/* [16][width] to [width][16], in place: each turn moves the lowest bit of the index to the top. */
INLINE void transpose(f16 *x, const int width) {
    f16 y[16];
    for (int turn = 1; turn < width; turn *= 2) {
#pragma GCC unroll 8
        for (int i = 0; i < width / 2; i++) {
            y[i] = SHUFFLE(x[2 * i], x[2 * i + 1], EVEN);
            y[width / 2 + i] = SHUFFLE(x[2 * i], x[2 * i + 1], ODD);
        }
#pragma GCC unroll 16
        for (int i = 0; i < width; i++) x[i] = y[i];
    }
}

/* ---- tiles ---- */

/* Tiles 0 to 3 are sums of `sum_lines` lines; so is the left factor, of 16 words; the right factor
 * has 16 lines. Lines of sums and of the right factor are `sum_words` long. */
static void shape_tiles(int sum_lines, int sum_words, int first_left, int num_left) {
    struct {
        uint8_t palette, start, reserved[14];
        uint16_t line_bytes[16];
        uint8_t lines[16];
    } shape = {.palette = 1};
    for (int i = 0; i < 8; i++) {
        int is_left = i >= first_left && i < first_left + num_left;
        shape.line_bytes[i] = is_left ? 64 : 4 * sum_words;
        shape.lines[i] = i < 4 || is_left ? sum_lines : 16;
    }
    __asm__ volatile("" ::"r"(&shape) : "memory"); /* the intrinsic reads more than it declares */
    _tile_loadconfig(&shape);
}

#define EACH_SUM(DO) DO(0) DO(1) DO(2) DO(3)
#define ZERO(i) _tile_zero(i);

/* ---- keys and values ---- */

/* GROUP rows of the pool from key `start` on: where they lie, or copied where they are in several
 * spans or fewer, with zeros behind them. */
INLINE const char *rows_at(task *t, const void *pool, count start, count end, char *copy,
                           const int is_bf16) {
    count bytes = t->a->head_dim * (is_bf16 ? 2 : 4);
    const char *base = (const char *)pool + t->kv_head * t->a->head_stride * (is_bf16 ? 2 : 4);
    while (start >= t->offset + t->span->num_keys) t->offset += t->span->num_keys, t->span++;
    if (start + GROUP <= end && start + GROUP <= t->offset + t->span->num_keys)
        return base + (t->span->pool_row + start - t->offset) * bytes;
    for (count i = start; i < start + GROUP; i++) {
        char *to = copy + (i - start) * bytes;
        if (i >= end) {
            memset(to, 0, bytes);
            continue;
        }
        if (i >= t->offset + t->span->num_keys) t->offset += t->span->num_keys, t->span++;
        memcpy(to, base + (t->span->pool_row + i - t->offset) * bytes, bytes);
    }
    return copy;
}

static void rewind_to_begin(task *t) {
    t->span = t->a->spans + t->p->first_span, t->offset = 0;
}

INLINE void fetch(const char *from, count bytes) {
    for (count at = 0; at < bytes; at += 64) _mm_prefetch(from + at + AHEAD_BYTES, _MM_HINT_T0);
}

/* ---- scores ---- */

/* Queries as right factors: [tiles][planes][D / 32][TILE]; word of a line: the row. */
INLINE void split_queries(const task *t, uint32_t *to, const int planes, const int is_bf16) {
    count n = t->a->head_dim, groups = t->a->num_heads / t->a->num_kv_heads, steps = n / 32;
    for (int tile = 0; tile < t->tiles; tile++, to += planes * steps * TILE)
        for (count s = 0; s < steps; s++) {
            f16 x[2][16];
            for (int r = 0; r < 16; r++) {
                count row = tile * t->height + r, m = t->p->first_row + row / groups;
                const float *query = t->a->queries +
                    (m * t->a->num_heads + t->kv_head * groups + row % groups) * n + s * 32;
                int is_there = r < t->height && row < t->rows;
                x[0][r] = is_there ? load(query, 0, 0) : splat(0.0f);
                x[1][r] = is_there ? load(query, 16, 0) : splat(0.0f);
            }
            transpose(x[0], 16);
            transpose(x[1], 16);
            const f16 *flat = x[0];
            for (int j = 0; j < 16; j++) { /* elements (2j, 2j + 1), or (j, 16 + j) */
                uint32_t words[MAX_PLANES * 16];
                if (is_bf16)
                    split(flat[2 * j], flat[2 * j + 1], words, 16, planes);
                else
                    split(x[0][j], x[1][j], words, 16, planes);
                for (int i = 0; i < planes; i++)
                    memcpy(to + (i * steps + s) * TILE + j * t->width, words + i * 16,
                           t->width * sizeof *to);
            }
        }
}

/* float32 keys as left factors: [3][GROUP][D / 2] words. */
INLINE void split_keys(const char *keys, count n, uint32_t *to) {
    for (int key = 0; key < GROUP; key++, keys += n * 4) {
        fetch(keys, n * 4);
        for (count s = 0; s < n / 32; s++)
            split(load(keys, s * 32, 0), load(keys, s * 32 + 16, 0), to + (key * n / 2 + s * 16),
                  GROUP * n / 2, 3);
    }
}

/* Scores of a tile of rows against GROUP keys, to `out` [GROUP][width]. */
INLINE void score_tile(const task *t, const char *keys, const uint32_t *queries, float *out,
                       int is_new, const int is_bf16) {
    const count n = t->a->head_dim, steps = n / 32, line = 2 * n;
    const int width = t->width * 4;
    EACH_SUM(ZERO)
    for (count s = 0; s < steps; s++) {
        const char *left = keys + s * 64;
        const uint32_t *right = queries + s * TILE;
        if (is_bf16) {
            _tile_loadd(4, right + steps * TILE, width);
            _tile_loadd(5, right, width);
#define ADD(g)                                                                       \
    _tile_loadd(6, left + g * 16 * line, line);                                      \
    if (is_new) fetch(keys + (g * steps + s) * 16 * 64, 16 * 64);                    \
    _tile_dpbf16ps(g, 6, 4);                                                         \
    _tile_dpbf16ps(g, 6, 5);
            EACH_SUM(ADD)
#undef ADD
        } else {
            const count plane = GROUP * line;
            _tile_loadd(4, right + 2 * steps * TILE, width);
            _tile_loadd(5, right + steps * TILE, width);
            _tile_loadd(6, right, width);
#define ADD(g)                                              \
    _tile_loadd(7, left + 2 * plane + g * 16 * line, line); \
    _tile_dpbf16ps(g, 7, 6);
            EACH_SUM(ADD)
#undef ADD
#define ADD(g)                                          \
    _tile_loadd(7, left + plane + g * 16 * line, line); \
    _tile_dpbf16ps(g, 7, 5);                            \
    _tile_dpbf16ps(g, 7, 6);
            EACH_SUM(ADD)
#undef ADD
#define ADD(g)                                  \
    _tile_loadd(7, left + g * 16 * line, line); \
    _tile_dpbf16ps(g, 7, 4);                    \
    _tile_dpbf16ps(g, 7, 5);                    \
    _tile_dpbf16ps(g, 7, 6);
            EACH_SUM(ADD)
#undef ADD
        }
    }
#define KEEP(g) _tile_stored(g, out + g * 16 * t->width, width);
    EACH_SUM(KEEP)
#undef KEEP
}

/* Scores [GROUP][width] to rows of `weights`, those of keys that a row does not see to -inf. */
INLINE void place_scores(const task *t, int tile, int at, const float *scores, float *weights,
                         f16 *peaks, const int width) {
    const i16 lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    count groups = t->a->num_heads / t->a->num_kv_heads;
    int first = tile * t->height;
    int rows = t->rows - first < t->height ? t->rows - first : t->height;
    for (int g = 0; g < GROUP / 16; g++) {
        f16 x[16];
#pragma GCC unroll 16
        for (int i = 0; i < width; i++) x[i] = load(scores, (g * width + i) * LANES, 0);
        transpose(x, width);
        for (int r = 0; r < rows; r++) {
            count seen = t->p->num_keys - t->p->num_rows + (first + r) / groups + 1 - t->begin -
                         at - g * 16;
            f16 row = x[r];
            if (seen < 16) row = pick(lane < (int)(seen > 0 ? seen : 0), row, splat(-__builtin_inff()));
            peaks[first + r] = larger(row, peaks[first + r]);
            store(weights, (first + r) * CHUNK + at + g * 16, row, 0);
        }
    }
}

INLINE void score_chunk(task *t, float *weights, f16 *peaks, const int is_bf16) {
    const int planes = is_bf16 ? 2 : 3;
    count n = t->a->head_dim, end = t->begin + t->size, size = planes * n / 32 * TILE;
    uint32_t queries[t->tiles * size] __attribute__((aligned(64)));
    uint32_t split_up[is_bf16 ? 1 : 3 * GROUP * n / 2] __attribute__((aligned(64)));
    char copy[GROUP * n * 4] __attribute__((aligned(64)));
    float scores[GROUP * 16] __attribute__((aligned(64)));
    split_queries(t, queries, planes, is_bf16);
    rewind_to_begin(t);
    shape_tiles(16, t->width, is_bf16 ? 6 : 7, is_bf16 ? 2 : 1);
    for (int at = 0; at < t->size; at += GROUP) {
        const char *keys = rows_at(t, t->a->keys, t->begin + at, end, copy, is_bf16);
        if (!is_bf16) split_keys(keys, n, split_up), keys = (const char *)split_up;
        for (int tile = 0; tile < t->tiles; tile++) {
            score_tile(t, keys, queries + tile * size, scores, tile == 0, is_bf16);
            switch (t->width) {
                case 1: place_scores(t, tile, at, scores, weights, peaks, 1); break;
                case 2: place_scores(t, tile, at, scores, weights, peaks, 2); break;
                case 4: place_scores(t, tile, at, scores, weights, peaks, 4); break;
                case 8: place_scores(t, tile, at, scores, weights, peaks, 8); break;
                default: place_scores(t, tile, at, scores, weights, peaks, 16);
            }
        }
    }
}

/* ---- values ---- */

/* GROUP values as right factors: [2][planes][D / 16][TILE]. Line j of a tile has keys j and 16 + j;
 * bfloat16: columns of two tiles in the order of `natural`. */
INLINE void split_values(const char *values, count n, uint32_t *to, const int is_bf16) {
    count line = n * (is_bf16 ? 2 : 4), tiles = n / 16;
    for (int half = 0; half < 2; half++, values += 32 * line)
        for (int j = 0; j < 16; j++) {
            const char *low = values + j * line, *high = low + 16 * line;
            fetch(low, line);
            fetch(high, line);
            if (is_bf16) {
                for (count c = 0; c < n / 32; c++) {
                    h32 x, y;
                    memcpy(&x, low + c * 64, sizeof x);
                    memcpy(&y, high + c * 64, sizeof y);
                    uint32_t *pair = to + (half * tiles + 2 * c) * TILE + j * 16;
                    h32 lower = (h32)_mm512_unpacklo_epi16((__m512i)x, (__m512i)y);
                    h32 upper = (h32)_mm512_unpackhi_epi16((__m512i)x, (__m512i)y);
                    memcpy(pair, &lower, sizeof lower);
                    memcpy(pair + TILE, &upper, sizeof upper);
                }
            } else {
                for (count c = 0; c < tiles; c++)
                    split(load(low, c * 16, 0), load(high, c * 16, 0),
                          to + (half * 3 * tiles + c) * TILE + j * 16, tiles * TILE, 3);
            }
        }
}

/* exp(score - peak) of a tile's rows and GROUP keys as left factors: [2][planes][TILE]. */
INLINE void weigh(const task *t, int tile, const float *scores, const float *peaks, f16 *totals,
                  uint32_t *to, const int planes) {
    int first = tile * t->height;
    int rows = t->rows - first < t->height ? t->rows - first : t->height;
    for (int r = 0; r < rows; r++) {
        const float *row = scores + (first + r) * CHUNK;
        for (int half = 0; half < 2; half++) {
            f16 low = exp16(load(row, half * 32, 0) - peaks[first + r]);
            f16 high = exp16(load(row, half * 32 + 16, 0) - peaks[first + r]);
            totals[first + r] += low;
            totals[first + r] += high;
            split(low, high, to + half * planes * TILE + r * 16, TILE, planes);
        }
    }
}

/* acc [4][TILE] += a tile of weights . GROUP values, 64 columns of them. */
INLINE void mix_tile(const uint32_t *weights, const uint32_t *values, count n, float *acc,
                     int is_first, const int is_bf16) {
    const count tiles = n / 16;
    if (is_first) {
        EACH_SUM(ZERO)
    } else {
#define LOAD(v) _tile_loadd(v, acc + v * TILE, 64);
        EACH_SUM(LOAD)
#undef LOAD
    }
    for (int half = 0; half < 2; half++) {
        if (is_bf16) {
            const uint32_t *right = values + half * tiles * TILE;
            _tile_loadd(4, weights + (2 * half + 1) * TILE, 64);
            _tile_loadd(5, weights + 2 * half * TILE, 64);
#define ADD(v)                           \
    _tile_loadd(6, right + v * TILE, 64); \
    _tile_dpbf16ps(v, 4, 6);             \
    _tile_dpbf16ps(v, 5, 6);
            EACH_SUM(ADD)
#undef ADD
        } else {
            const uint32_t *right = values + half * 3 * tiles * TILE;
            _tile_loadd(4, weights + (3 * half + 2) * TILE, 64);
            _tile_loadd(5, weights + (3 * half + 1) * TILE, 64);
            _tile_loadd(6, weights + 3 * half * TILE, 64);
#define ADD(v)                                          \
    _tile_loadd(7, right + (2 * tiles + v) * TILE, 64); \
    _tile_dpbf16ps(v, 6, 7);
            EACH_SUM(ADD)
#undef ADD
#define ADD(v)                                      \
    _tile_loadd(7, right + (tiles + v) * TILE, 64); \
    _tile_dpbf16ps(v, 5, 7);                        \
    _tile_dpbf16ps(v, 6, 7);
            EACH_SUM(ADD)
#undef ADD
#define ADD(v)                            \
    _tile_loadd(7, right + v * TILE, 64); \
    _tile_dpbf16ps(v, 4, 7);              \
    _tile_dpbf16ps(v, 5, 7);              \
    _tile_dpbf16ps(v, 6, 7);
            EACH_SUM(ADD)
#undef ADD
        }
    }
#define KEEP(v) _tile_stored(v, acc + v * TILE, 64);
    EACH_SUM(KEEP)
#undef KEEP
}

/* Columns of two tiles of bfloat16 values in the order of elements. */
INLINE void natural(const float *from, float *to) {
    f16 x = load(from, 0, 0), y = load(from, TILE, 0);
    store(to, 0, SHUFFLE(x, y, 0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23), 0);
    store(to, 16, SHUFFLE(x, y, 8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31), 0);
}

INLINE void mix_chunk(task *t, const float *scores, const float *peaks, f16 *totals, float *partial,
                      const int is_bf16) {
    const int planes = is_bf16 ? 2 : 3;
    count n = t->a->head_dim, tiles = n / 16, end = t->begin + t->size;
    float acc[t->tiles * tiles * TILE] __attribute__((aligned(64)));
    uint32_t values[2 * (is_bf16 ? 1 : 3) * tiles * TILE] __attribute__((aligned(64)));
    uint32_t weights[2 * planes * TILE] __attribute__((aligned(64)));
    char copy[GROUP * n * 4] __attribute__((aligned(64)));
    rewind_to_begin(t);
    shape_tiles(t->height, 16, 4, planes);
    for (int at = 0; at < t->size; at += GROUP) {
        const char *rows = rows_at(t, t->a->values, t->begin + at, end, copy, is_bf16);
        split_values(rows, n, values, is_bf16);
        for (int tile = 0; tile < t->tiles; tile++) {
            weigh(t, tile, scores + at, peaks, totals, weights, planes);
            for (count v = 0; v < tiles; v += 4)
                mix_tile(weights, values + v * TILE, n, acc + (tile * tiles + v) * TILE, at == 0,
                         is_bf16);
        }
    }
    for (int r = 0; r < t->rows; r++) {
        const float *from = acc + (r / t->height * tiles * TILE + r % t->height * 16);
        for (count v = 0; v < tiles; v += is_bf16 ? 2 : 1) {
            if (is_bf16)
                natural(from + v * TILE, partial + r * (n + 2) + v * 16);
            else
                store(partial, r * (n + 2) + v * 16, load(from, v * TILE, 0), 0);
        }
    }
}

INLINE void attend(task *t, float *partial, const int is_bf16) {
    count n = t->a->head_dim;
    float weights[t->rows * CHUNK] __attribute__((aligned(64))), peaks[t->rows];
    f16 lanes[t->rows];
    for (int r = 0; r < t->rows; r++) lanes[r] = splat(-__builtin_inff());
    score_chunk(t, weights, lanes, is_bf16);
    for (int r = 0; r < t->rows; r++) {
        float peak = largest(lanes[r]);
        partial[r * (n + 2) + n] = peak;
        peaks[r] = peak > -__builtin_inff() ? peak : 0.0f; /* no key is seen: all weights are 0 */
        lanes[r] = splat(0.0f);
    }
    mix_chunk(t, weights, peaks, lanes, partial, is_bf16);
    for (int r = 0; r < t->rows; r++) partial[r * (n + 2) + n + 1] = sum(lanes[r]);
    _tile_release();
}

void dlite_attend_tiles(const attention *a, const part *p, count chunk, count kv_head,
                        float *partial) {
    task t = {a, p, kv_head, chunk * CHUNK};
    t.size = (int)(p->num_keys - t.begin < CHUNK ? p->num_keys - t.begin : CHUNK);
    t.rows = (int)(a->num_heads / a->num_kv_heads * p->num_rows);
    t.tiles = (t.rows + 15) / 16;
    t.height = (t.rows + t.tiles - 1) / t.tiles;
    t.width = 1;
    while (t.width < t.height) t.width *= 2;
    if (a->is_bf16)
        attend(&t, partial, 1);
    else
        attend(&t, partial, 0);
}

#else

void dlite_attend_tiles(const attention *a, const part *p, count chunk, count kv_head,
                        float *partial) {
    (void)a, (void)p, (void)chunk, (void)kv_head, (void)partial; /* nobody asks: uses_tiles is 0 */
}

#endif
