/* A task of attention in bfloat16 on the processor's matrix unit (Intel AMX).
 *
 * Keys and values are read where they lie. Queries and weights are sums of two bfloat16 planes, 16
 * bits in all, since one would round scores as bfloat16 does. A product of tiles adds two neighbours
 * of the inner dimension at once: pairs of elements for scores, for values pairs of keys 16 apart.
 */
#include "vectors.h"

#if defined(__AMX_BF16__) && defined(__linux__)
#include <immintrin.h>

#define GROUP 64 /* keys of one step: four tiles of 16 */
#define TILE 256 /* words: 16 lines of 64 bytes */
#define UPPER 0xffff0000u

typedef struct {
    const attention *a;
    const part *p;
    count kv_head, begin;
    int size;                /* keys */
    int rows, tiles, height; /* query rows (m, g); cut into tiles of so many rows */
    int width;               /* of a tile of scores: the power of two that holds its rows */
    const span *span;        /* of the next keys, and its first key in the session */
    count offset;
    const char *next; /* what is fetched while this group is computed with: the next one */
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

/* Both planes of pairs of numbers: word j has low[j] in its lower half, high[j] in its upper. */
INLINE void split(f16 low, f16 high, uint32_t *to, count second_plane) {
    u16 words = bits_of(low) >> 16 | (bits_of(high) & UPPER);
    memcpy(to, &words, sizeof words);
    low -= upper_of(low), high -= upper_of(high);
    words = (bits_of(low) + 0x8000) >> 16 | ((bits_of(high) + 0x8000) & UPPER); /* rounded */
    memcpy(to + second_plane, &words, sizeof words);
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

/* Tiles 0 to 3 are sums, of `lines` lines of `words`; `left` and the one behind it are left factors,
 * of lines of 16 words; the other two are right factors, of 16 lines. */
static void shape_tiles(int lines, int words, int left) {
    struct {
        uint8_t palette, start, reserved[14];
        uint16_t line_bytes[16];
        uint8_t lines[16];
    } shape = {.palette = 1};
    for (int i = 0; i < 8; i++) {
        int is_left = i == left || i == left + 1;
        shape.line_bytes[i] = is_left ? 64 : 4 * words;
        shape.lines[i] = i < 4 || is_left ? lines : 16;
    }
    __asm__ volatile("" ::"r"(&shape) : "memory"); /* the intrinsic reads more than it declares */
    _tile_loadconfig(&shape);
}

#define EACH_SUM(DO) DO(0) DO(1) DO(2) DO(3)
#define ZERO(i) _tile_zero(i);

/* ---- keys and values ---- */

/* GROUP rows of the pool from key `start` on: where they lie, or copied where they are in several
 * spans or fewer, with zeros behind them. */
static const char *rows_at(task *t, const void *pool, count start, count end, char *copy) {
    count bytes = t->a->head_dim * 2;
    const char *base = (const char *)pool + t->kv_head * t->a->head_stride * 2;
    while (start >= t->offset + t->span->num_keys) t->offset += t->span->num_keys, t->span++;
    const char *rows = base + (t->span->pool_row + start - t->offset) * bytes;
    t->next = rows + GROUP * bytes;
    if (start + GROUP <= end && start + GROUP <= t->offset + t->span->num_keys) return rows;
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

/* Ask for the next bytes of the next group: a few at a time, since a core waits for few at once. */
INLINE void fetch(task *t, count bytes) {
    for (count at = 0; at < bytes; at += 64) _mm_prefetch(t->next + at, _MM_HINT_T0);
    t->next += bytes;
}

/* ---- scores ---- */

/* Queries as right factors: [tiles][2][D / 32][TILE]; word of a line: the row. */
static void split_queries(const task *t, uint32_t *to) {
    count n = t->a->head_dim, groups = t->a->num_heads / t->a->num_kv_heads, steps = n / 32;
    for (int tile = 0; tile < t->tiles; tile++, to += 2 * steps * TILE)
        for (count k = 0; k < n; k += 16) {
            f16 x[16];
            for (int r = 0; r < 16; r++) {
                count row = tile * t->height + r, m = t->p->first_row + row / groups;
                count head = m * t->a->num_heads + t->kv_head * groups + row % groups;
                int is_there = r < t->height && row < t->rows;
                x[r] = is_there ? load(t->a->queries, head * n + k, 0) : splat(0.0f);
            }
            transpose(x, 16);
            for (int j = 0; j < 8; j++) {
                uint32_t words[2 * LANES];
                split(x[2 * j], x[2 * j + 1], words, LANES);
                for (int plane = 0; plane < 2; plane++)
                    memcpy(to + (plane * steps + k / 32) * TILE + (k % 32 / 2 + j) * t->width,
                           words + plane * LANES, t->width * sizeof *to);
            }
        }
}

/* Scores of a tile of rows against GROUP keys, to `out` [GROUP][width]. */
INLINE void score_tile(task *t, const char *keys, const uint32_t *queries, float *out, int is_new) {
    const count steps = t->a->head_dim / 32, line = 2 * t->a->head_dim, width = 4 * t->width;
    EACH_SUM(ZERO)
    for (count s = 0; s < steps; s++) {
        _tile_loadd(4, queries + (steps + s) * TILE, width);
        _tile_loadd(5, queries + s * TILE, width);
#define ADD(g)                                               \
    _tile_loadd(6, keys + s * 64 + g * 16 * line, line);     \
    if (is_new) fetch(t, 16 * 64); /* in all tiles: GROUP */ \
    _tile_dpbf16ps(g, 6, 4);                                 \
    _tile_dpbf16ps(g, 6, 5);
        EACH_SUM(ADD)
#undef ADD
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
            if (seen < 16)
                row = pick(lane < (int)(seen > 0 ? seen : 0), row, splat(-__builtin_inff()));
            peaks[first + r] = larger(row, peaks[first + r]);
            store(weights, (first + r) * CHUNK + at + g * 16, row, 0);
        }
    }
}

static void score_chunk(task *t, float *weights, f16 *peaks) {
    count n = t->a->head_dim, end = t->begin + t->size, size = n / 16 * TILE;
    uint32_t queries[t->tiles * size] __attribute__((aligned(64)));
    char copy[GROUP * n * 2] __attribute__((aligned(64)));
    float scores[GROUP * 16] __attribute__((aligned(64)));
    split_queries(t, queries);
    rewind_to_begin(t);
    shape_tiles(16, t->width, 6);
    for (int at = 0; at < t->size; at += GROUP) {
        const char *keys = rows_at(t, t->a->keys, t->begin + at, end, copy);
        for (int tile = 0; tile < t->tiles; tile++) {
            score_tile(t, keys, queries + tile * size, scores, tile == 0);
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

/* GROUP values as right factors: [2][D / 16][TILE]. Line j of a tile has keys j and 16 + j, and
 * columns of two tiles in the order of `natural`. */
INLINE void split_values(task *t, const char *values, uint32_t *to) {
    count line = t->a->head_dim * 2, tiles = t->a->head_dim / 16;
    for (int half = 0; half < 2; half++, values += 32 * line)
        for (int j = 0; j < 16; j++) {
            const char *low = values + j * line, *high = low + 16 * line;
            fetch(t, line / 2); /* in all: a quarter of GROUP */
            for (count v = 0; v < tiles; v += 2) {
                __m512i x = _mm512_loadu_si512(low + v * 32), y = _mm512_loadu_si512(high + v * 32);
                uint32_t *pair = to + (half * tiles + v) * TILE + j * 16;
                _mm512_store_si512(pair, _mm512_unpacklo_epi16(x, y));
                _mm512_store_si512(pair + TILE, _mm512_unpackhi_epi16(x, y));
            }
        }
}

/* exp(score - peak) of a tile's rows and GROUP keys as left factors: [2][2][TILE]. */
INLINE void weigh(const task *t, int tile, const float *scores, const float *peaks, f16 *totals,
                  uint32_t *to) {
    int first = tile * t->height;
    int rows = t->rows - first < t->height ? t->rows - first : t->height;
    for (int r = 0; r < rows; r++) {
        const float *row = scores + (first + r) * CHUNK;
        for (int half = 0; half < 2; half++) {
            f16 low = exp16(load(row, half * 32, 0) - peaks[first + r]);
            f16 high = exp16(load(row, half * 32 + 16, 0) - peaks[first + r]);
            totals[first + r] += low;
            totals[first + r] += high;
            split(low, high, to + half * 2 * TILE + r * 16, TILE);
        }
    }
}

/* acc [4][TILE] += a tile of weights . GROUP values, 64 columns of them. */
INLINE void mix_tile(task *t, const uint32_t *weights, const uint32_t *values, float *acc,
                     int is_first, int is_new) {
    if (is_first) {
        EACH_SUM(ZERO)
    } else {
#define LOAD(v) _tile_loadd(v, acc + v * TILE, 64);
        EACH_SUM(LOAD)
#undef LOAD
    }
    count size = t->a->head_dim / 16 * TILE; /* of 32 values */
    for (int half = 0; half < 2; half++, weights += 2 * TILE, values += size) {
        if (is_new) fetch(t, 48 * 64); /* in all: the rest of GROUP */
        _tile_loadd(4, weights + TILE, 64);
        _tile_loadd(5, weights, 64);
#define ADD(v)                             \
    _tile_loadd(6, values + v * TILE, 64); \
    _tile_dpbf16ps(v, 4, 6);               \
    _tile_dpbf16ps(v, 5, 6);
        EACH_SUM(ADD)
#undef ADD
    }
#define KEEP(v) _tile_stored(v, acc + v * TILE, 64);
    EACH_SUM(KEEP)
#undef KEEP
}

/* Columns of two tiles in the order of elements. */
INLINE void natural(const float *from, float *to) {
    f16 x = load(from, 0, 0), y = load(from, TILE, 0);
    store(to, 0, SHUFFLE(x, y, 0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23), 0);
    store(to, 16, SHUFFLE(x, y, 8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31), 0);
}

static void mix_chunk(task *t, const float *scores, const float *peaks, f16 *totals,
                      float *partial) {
    count n = t->a->head_dim, tiles = n / 16, end = t->begin + t->size;
    float acc[t->tiles * tiles * TILE] __attribute__((aligned(64)));
    uint32_t values[2 * tiles * TILE] __attribute__((aligned(64)));
    uint32_t weights[4 * TILE] __attribute__((aligned(64)));
    char copy[GROUP * n * 2] __attribute__((aligned(64)));
    rewind_to_begin(t);
    shape_tiles(t->height, 16, 4);
    for (int at = 0; at < t->size; at += GROUP) {
        split_values(t, rows_at(t, t->a->values, t->begin + at, end, copy), values);
        for (int tile = 0; tile < t->tiles; tile++) {
            weigh(t, tile, scores + at, peaks, totals, weights);
            for (count v = 0; v < tiles; v += 4)
                mix_tile(t, weights, values + v * TILE, acc + (tile * tiles + v) * TILE, at == 0,
                         tile == 0);
        }
    }
    for (int r = 0; r < t->rows; r++)
        for (count v = 0; v < tiles; v += 2)
            natural(acc + (r / t->height * tiles + v) * TILE + r % t->height * 16,
                    partial + r * (n + 2) + v * 16);
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
    count n = a->head_dim;
    float weights[t.rows * CHUNK] __attribute__((aligned(64))), peaks[t.rows];
    f16 lanes[t.rows];
    for (int r = 0; r < t.rows; r++) lanes[r] = splat(-__builtin_inff());
    score_chunk(&t, weights, lanes);
    for (int r = 0; r < t.rows; r++) {
        float peak = largest(lanes[r]);
        partial[r * (n + 2) + n] = peak;
        peaks[r] = peak > -__builtin_inff() ? peak : 0.0f; /* no key is seen: all weights are 0 */
        lanes[r] = splat(0.0f);
    }
    mix_chunk(&t, weights, peaks, lanes, partial);
    for (int r = 0; r < t.rows; r++) partial[r * (n + 2) + n + 1] = sum(lanes[r]);
    _tile_release();
}

#else

void dlite_attend_tiles(const attention *a, const part *p, count chunk, count kv_head,
                        float *partial) {
    (void)a, (void)p, (void)chunk, (void)kv_head, (void)partial; /* nobody asks: uses_tiles is 0 */
}

#endif
