/* Products of a packed weight with the rows of a forward: x W^T, for one row or for many.
 *
 * A weight is kept once, in the order in which it is read. A panel is 32 outputs, in two groups of
 * 16; a line is 64 bytes: u neighbouring inputs of each of the 16 outputs of a group (u = 2 for
 * bfloat16, 4 for int8, 1 for float32); 16 lines of both groups, 2 KiB, are a tile pair. That is
 * what the processor's matrix unit wants (Intel AMX), and vectors read it as well. A thread has
 * neighbouring panels, so it streams one piece of memory.
 *
 * Sums are float32 (int32 for int8 with AMX, which is exact) and go through the inputs in one
 * order, whatever the number of rows, chunks or threads: a row comes out the same, bit for bit, in
 * any company. int8 keeps activations: AMX reads them as two digits of 8 bits, 16 bits of the
 * row's largest element; its square error is below that of bfloat16's own 8 bits for that element.
 */
#include <omp.h>

#include "interface.h"
#include "vectors.h"

#if defined(__AMX_BF16__) && defined(__AMX_INT8__) && defined(__linux__)
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
#define HAS_TILES
#endif

#define PANEL 32
#define PAIR_BYTES 2048
#ifdef __AVX512F__
#define BLOCK_ROWS 8 /* whose sums stay in registers */
#else
#define BLOCK_ROWS 4
#endif
#define PASS 256         /* rows whose sums are kept at once */
#define CHUNK_PAIRS 8    /* of a panel, while it goes over several blocks of rows: stays in L1 */
#define AHEAD_BYTES 8192 /* that a weight is fetched before it is used */
#define DIGIT_LIMIT 32512.0f /* 127 * 256: of two signed digits */

typedef struct {
    const void *x;        /* [rows, ins] */
    const void *residual; /* like out, or null */
    void *out;            /* [rows, outs] */
    const char *digits;   /* int8 with AMX: [2, rows, ins], the high digits first */
    const float *steps;   /* of the digits, [rows] */
    count rows;
} product;

typedef float sums[PASS][PANEL];

typedef struct { /* of a thread */
    sums c, low __attribute__((aligned(64))); /* low: of the low digits, then c of the high ones */
    count first, second; /* rows that the tiles are shaped for */
} workspace;

INLINE count pairs_of(const linear *w) {
    return w->ins / (w->kind == BF16 ? 32 : w->kind == INT8 ? 64 : 16);
}

/* 1 where the kernel lets this process use the matrix unit; ask once before the first product. */
int dlite_tiles(void) {
#ifdef HAS_TILES
    return syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* tile data */) == 0;
#else
    return 0;
#endif
}

/* ---- packing ---- */

/* weight [outs, ins] (gates, then ups: [2 outs, ins]) into `to`; outputs that fill a panel are 0. */
void dlite_pack(const linear *w, const void *weight, void *to, int threads) {
    count rows = w->outs * (w->is_gated ? 2 : 1), pairs = pairs_of(w), words = pairs * 16;
    count panels = (rows + PANEL - 1) / PANEL;
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (count p = 0; p < panels; p++)
        for (int g = 0; g < 2; g++)
            for (int n = 0; n < 16; n++) {
                count row = w->is_gated ? g * w->outs + p * 16 + n : p * PANEL + g * 16 + n;
                int is_there = w->is_gated ? p * 16 + n < w->outs : row < rows;
                const uint32_t *from = (const uint32_t *)weight + (is_there ? row : 0) * words;
                uint32_t *line = (uint32_t *)to + p * pairs * (PAIR_BYTES / 4) + g * 256 + n;
                for (count k = 0; k < words; k++)
                    line[k / 16 * (PAIR_BYTES / 4) + k % 16 * 16] = is_there ? from[k] : 0;
            }
}

/* Rows of what was packed, bfloat16 or float32: out [num_ids, ins]. 0 where an id is none. */
int dlite_unpack_rows(const linear *w, const count *ids, count num_ids, void *out) {
    count pairs = pairs_of(w);
    for (count i = 0; i < num_ids; i++) {
        if (ids[i] < 0 || ids[i] >= w->outs) return 0;
        const uint32_t *line = (const uint32_t *)w->weight +
                               ids[i] / PANEL * pairs * (PAIR_BYTES / 4) +
                               ids[i] % PANEL / 16 * 256 + ids[i] % 16;
        uint32_t *row = (uint32_t *)out + i * pairs * 16;
        for (count k = 0; k < pairs * 16; k++)
            row[k] = line[k / 16 * (PAIR_BYTES / 4) + k % 16 * 16];
    }
    return 1;
}

/* ---- vectors: any processor ---- */

/* Input j of a line of u, of 16 outputs. */
INLINE f16 widened(const void *line, int j, int kind) {
    u16 bits;
    memcpy(&bits, line, sizeof bits);
    if (kind == INT8) {
        i16 level = (i16)(bits << (24 - 8 * j)) >> 24;
        return __builtin_convertvector(level, f16);
    }
    if (kind == BF16) bits = j ? bits & 0xffff0000u : bits << 16;
    f16 out;
    memcpy(&out, &bits, sizeof out);
    return out;
}

INLINE float element(const void *x, count at, int is_bf16) {
    if (!is_bf16) return ((const float *)x)[at];
    uint32_t bits = (uint32_t)((const uint16_t *)x)[at] << 16;
    float out;
    memcpy(&out, &bits, sizeof out);
    return out;
}

/* c[rows][PANEL] += the inputs of some tile pairs from input k on. */
INLINE void add_pairs_plain(const linear *w, const char *b, const void *x, count k, count pairs,
                            float (*c)[PANEL], int is_new, const int rows, const int kind) {
    const int unit = kind == BF16 ? 2 : kind == INT8 ? 4 : 1;
    f16 acc[BLOCK_ROWS][2];
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
        acc[r][0] = load(c[r], 0, 0), acc[r][1] = load(c[r], 16, 0);
    for (count t = 0; t < pairs; t++, b += PAIR_BYTES)
        for (int v = 0; v < 16; v++) {
            if (is_new) {
                __builtin_prefetch(b + 64 * v + AHEAD_BYTES);
                __builtin_prefetch(b + 64 * v + AHEAD_BYTES + PAIR_BYTES / 2);
            }
#pragma GCC unroll 4
            for (int j = 0; j < unit; j++, k++) {
                f16 low = widened(b + 64 * v, j, kind);
                f16 high = widened(b + 64 * v + PAIR_BYTES / 2, j, kind);
#pragma GCC unroll 8
                for (int r = 0; r < rows; r++) {
                    f16 value = splat(element(x, r * w->ins + k, kind != FLOAT32));
                    acc[r][0] += low * value, acc[r][1] += high * value;
                }
            }
        }
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
        store(c[r], 0, acc[r][0], 0), store(c[r], 16, acc[r][1], 0);
}

INLINE void add_rows_plain(const linear *w, const char *b, const product *p, count first,
                           count num_rows, count pair, count pairs, sums c, const int kind) {
    count k = pair * (w->ins / pairs_of(w)), bytes = w->ins * (kind == FLOAT32 ? 4 : 2), m = 0;
    if (pair == 0) memset(c, 0, num_rows * sizeof *c);
    for (; m + BLOCK_ROWS <= num_rows; m += BLOCK_ROWS)
        add_pairs_plain(w, b, (const char *)p->x + (first + m) * bytes, k, pairs, c + m, m == 0,
                        BLOCK_ROWS, kind);
    for (; m < num_rows; m++)
        add_pairs_plain(w, b, (const char *)p->x + (first + m) * bytes, k, pairs, c + m, m == 0, 1,
                        kind);
}

/* ---- the matrix unit ---- */

#ifdef HAS_TILES
#define MULTIPLY(kind, sum, x, weight)     \
    if (kind == INT8)                      \
        _tile_dpbssd(sum, x, weight);      \
    else                                   \
        _tile_dpbf16ps(sum, x, weight)

/* Tiles 0 to 3 are sums, 4 and 5 rows of x, 6 and 7 the pair of the weight. */
static void shape_tiles(workspace *s, count first, count second) {
    if (s->first == first && s->second == second) return;
    s->first = first, s->second = second;
    struct {
        uint8_t palette, start, reserved[14];
        uint16_t row_bytes[16];
        uint8_t rows[16];
    } shape = {.palette = 1};
    for (int i = 0; i < 8; i++) {
        shape.row_bytes[i] = 64;
        shape.rows[i] = i >= 6 ? 16 : i == 4 || i < 2 ? first : second ? second : 1;
    }
    __asm__ volatile("" ::"r"(&shape) : "memory"); /* the intrinsic reads more than it declares */
    _tile_loadconfig(&shape);
}

/* Two blocks of up to 16 rows (or of their digits), sums c0 and c1, against some tile pairs. */
INLINE void add_pairs_tiles(const char *b, const char *x0, const char *x1, count row_bytes,
                            count pairs, float (*c0)[PANEL], float (*c1)[PANEL], int is_first,
                            int is_new, const int has_second, const int kind) {
    if (is_first) {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    } else {
        _tile_loadd(0, c0[0], sizeof *c0);
        _tile_loadd(1, c0[0] + 16, sizeof *c0);
        _tile_loadd(2, c1[0], sizeof *c1);
        _tile_loadd(3, c1[0] + 16, sizeof *c1);
    }
    for (count t = 0; t < pairs; t++, b += PAIR_BYTES, x0 += 64, x1 += 64) {
        if (is_new)
            for (int i = 0; i < PAIR_BYTES; i += 64) _mm_prefetch(b + AHEAD_BYTES + i, _MM_HINT_T0);
        _tile_loadd(4, x0, row_bytes);
        _tile_loadd(6, b, 64);
        _tile_loadd(7, b + PAIR_BYTES / 2, 64);
        if (has_second) _tile_loadd(5, x1, row_bytes);
        MULTIPLY(kind, 0, 4, 6);
        MULTIPLY(kind, 1, 4, 7);
        if (has_second) {
            MULTIPLY(kind, 2, 5, 6);
            MULTIPLY(kind, 3, 5, 7);
        }
    }
    _tile_stored(0, c0[0], sizeof *c0);
    _tile_stored(1, c0[0] + 16, sizeof *c0);
    if (has_second) {
        _tile_stored(2, c1[0], sizeof *c1);
        _tile_stored(3, c1[0] + 16, sizeof *c1);
    }
}

/* As add_rows_plain. */
INLINE void add_rows_tiles(const linear *w, const char *b, const product *p, count first,
                           count num_rows, count pair, count pairs, workspace *s, const int kind) {
    const count step = kind == INT8 ? 16 : 32, row_bytes = w->ins * (kind == INT8 ? 1 : 2);
    const char *x = (kind == INT8 ? p->digits : (const char *)p->x) + first * row_bytes + pair * 64;
    for (count m = 0; m < num_rows; m += step, x += step * row_bytes) {
        count rows = num_rows - m < 16 ? num_rows - m : 16;
        count more = kind == INT8 ? rows : num_rows - m < 32 ? num_rows - m - rows : 16;
        const char *x1 = x + (kind == INT8 ? p->rows : 16) * row_bytes;
        float(*c)[PANEL] = s->c + m, (*c1)[PANEL] = kind == INT8 ? s->low + m : c + 16;
        shape_tiles(s, rows, more);
        if (more)
            add_pairs_tiles(b, x, x1, row_bytes, pairs, c, c1, pair == 0, m == 0, 1, kind);
        else
            add_pairs_tiles(b, x, x, row_bytes, pairs, c, c, pair == 0, m == 0, 0, kind);
    }
}
#endif

/* Activations of int8 with AMX as two signed digits: x = step * (256 * high + low). */
static void split_row(const linear *w, const void *x, char *high, char *low, float *step) {
    f16 top = {}, odd = {};
    for (count i = 0; i < w->ins; i += LANES) {
        f16 value = load(x, i, 1);
        top = larger(larger(value, -value), top);
        odd += value * 0.0f; /* not a number where an element is not finite */
    }
    float peak = largest(top), shift = 12582912.0f; /* 1.5 * 2^23: rounds to a whole number */
    *step = peak / DIGIT_LIMIT + sum(odd);
    float scale = peak > 0.0f ? DIGIT_LIMIT / peak : 0.0f;
    for (count i = 0; i < w->ins; i += LANES) {
        f16 turned = load(x, i, 1) * scale + shift;
        i16 whole;
        memcpy(&whole, &turned, sizeof whole);
        whole -= 0x4b400000;
        i16 last = (i16)((u16)whole << 24) >> 24, first = (whole - last) >> 8;
        typedef int8_t b16 __attribute__((vector_size(16)));
        b16 digits = __builtin_convertvector(first, b16);
        memcpy(high + i, &digits, sizeof digits);
        digits = __builtin_convertvector(last, b16);
        memcpy(low + i, &digits, sizeof digits);
    }
}

/* ---- results ---- */

INLINE f16 silu(f16 x) {
    f16 bounded = pick(x < -80.0f, splat(-80.0f), x);
    return x / (1.0f + exp16(-bounded));
}

/* The sums of one row and panel become results. */
INLINE void finish_row(const linear *w, const product *p, count row, count panel, f16 *c,
                       int is_bf16) {
    for (int g = 0; g < 2; g++) {
        count at = panel * PANEL + g * 16;
        if (w->factors) c[g] *= load(w->factors, at, 0);
        if (w->bias) c[g] += load(w->bias, at, 0);
    }
    int groups = w->is_gated ? 1 : 2;
    if (w->is_gated) c[0] = silu(c[0]) * c[1];
    for (int g = 0; g < groups; g++) {
        count n = (panel * groups + g) * 16, at = row * w->outs + n, left = w->outs - n;
        if (left <= 0) break;
        if (p->residual) c[g] += load_row(p->residual, at, left, is_bf16);
        store_row(p->out, at, c[g], left, is_bf16);
    }
}

static void finish(const linear *w, const product *p, count first, count rows, count panel,
                   const workspace *s) {
    int is_digits = w->kind == INT8 && w->uses_tiles, is_bf16 = w->kind != FLOAT32 && !w->is_wide;
    for (count m = 0; m < rows; m++) {
        f16 value[2];
        for (int g = 0; g < 2; g++) {
            value[g] = load(s->c[m], g * 16, 0);
            if (is_digits) {
                i16 upper, lower;
                memcpy(&upper, s->c[m] + g * 16, sizeof upper);
                memcpy(&lower, s->low[m] + g * 16, sizeof lower);
                value[g] = __builtin_convertvector(upper, f16) * 256.0f;
                value[g] += __builtin_convertvector(lower, f16);
                value[g] *= p->steps[first + m];
            }
        }
        if (is_bf16)
            finish_row(w, p, first + m, panel, value, 1);
        else
            finish_row(w, p, first + m, panel, value, 0);
    }
}

static void add_rows(const linear *w, const char *b, const product *p, count first, count rows,
                     count pair, count pairs, workspace *s) {
#ifdef HAS_TILES
    if (w->uses_tiles && w->kind == BF16)
        return add_rows_tiles(w, b, p, first, rows, pair, pairs, s, BF16);
    if (w->uses_tiles && w->kind == INT8)
        return add_rows_tiles(w, b, p, first, rows, pair, pairs, s, INT8);
#endif
    if (w->kind == BF16)
        add_rows_plain(w, b, p, first, rows, pair, pairs, s->c, BF16);
    else if (w->kind == INT8)
        add_rows_plain(w, b, p, first, rows, pair, pairs, s->c, INT8);
    else
        add_rows_plain(w, b, p, first, rows, pair, pairs, s->c, FLOAT32);
}

/* Panels [from, to) for all rows, in passes of a few rows, each over the whole panels. */
static void run_panels(const linear *w, const product *p, count from, count to) {
    workspace s;
    s.first = s.second = 0;
    count pairs = pairs_of(w);
    for (count first = 0; first < p->rows; first += PASS) {
        count rows = p->rows - first < PASS ? p->rows - first : PASS;
        count chunk = rows <= 16 && w->uses_tiles ? pairs : CHUNK_PAIRS;
        for (count panel = from; panel < to; panel++) {
            const char *b = (const char *)w->weight + panel * pairs * PAIR_BYTES;
            for (count pair = 0; pair < pairs; pair += chunk) {
                count some = pairs - pair < chunk ? pairs - pair : chunk;
                add_rows(w, b + pair * PAIR_BYTES, p, first, rows, pair, some, &s);
            }
            finish(w, p, first, rows, panel, &s);
        }
    }
#ifdef HAS_TILES
    if (w->uses_tiles) _tile_release();
#endif
}

/* out = x W^T * factors + bias + residual; or silu(gate) * up of two halves of W.
 * digits [2, rows, ins] and steps [rows] are scratch, for int8 with AMX only. */
void dlite_linear(const linear *w, const void *x, count rows, const void *residual, void *out,
                  char *digits, float *steps, int threads) {
    product p = {x, residual, out, digits, steps, rows};
    count panels = (w->outs * (w->is_gated ? 2 : 1) + PANEL - 1) / PANEL;
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        int thread = omp_get_thread_num(), team = omp_get_num_threads();
        if (w->kind == INT8 && w->uses_tiles) {
#pragma omp for schedule(static)
            for (count m = 0; m < rows; m++)
                split_row(w, (const char *)x + m * w->ins * 2, digits + m * w->ins,
                          digits + (rows + m) * w->ins, steps + m);
        }
        run_panels(w, &p, panels * thread / team, panels * (thread + 1) / team);
    }
}
