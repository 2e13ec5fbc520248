/* What the kernels are called with; `row_kernels.py` and `row_linear.py` mirror the structs. */
#ifndef DLITE_INTERFACE_H
#define DLITE_INTERFACE_H
#include <stdint.h>

typedef int64_t count;

/* ---- row_kernels.c, attention_kernels.c, tile_attention.c ---- */

typedef struct {
    count num_heads, num_kv_heads, head_dim;
    count head_stride;  /* elements from one kv head of the pool to the next */
    const float *weight; /* [H + K, D]: of the norms, the attention's scale in it */
    const float *rotation; /* [rows, D]: cos, sin of each pair */
    const count *slots; /* [rows]: row of the pool */
    void *keys, *values; /* of a layer: [K, P, D] */
    float *queries; /* [rows, H, D] */
    float eps;
    int is_normed, is_bf16, threads;
} heads;

#define CHUNK 512    /* keys of one task of attention */
#define MAX_ROWS 128 /* query rows that share a kv head in one task */

typedef struct {
    count first_row, num_rows; /* of the queries */
    count num_keys;            /* cached rows, the queries' own included */
    count first_span, first_task;
} part;

typedef struct {
    count pool_row, num_keys;
} span;

typedef struct {
    count num_heads, num_kv_heads, head_dim, head_stride;
    const float *queries; /* [rows, H, D] */
    const void *keys, *values;
    void *out; /* [rows, H, D] */
    const part *parts;
    const span *spans;
    const count *tasks; /* [num_tasks, 2]: part, chunk */
    float *partial;     /* of each task: [K, rows of the part * G, D + 2] */
    const count *partial_at; /* [num_tasks]: where in `partial` a task's results start */
    count num_parts, num_tasks;
    int is_bf16, uses_tiles, threads;
} attention;

void dlite_norm(const void *x, const void *delta, const float *weight, void *total, void *out,
                count rows, count size, float eps, int is_bf16, int threads);
void dlite_swiglu(const void *gate_up, void *out, count rows, count size, int is_bf16, int threads);
void dlite_heads(const void *qkv, const heads *h, count rows);
void dlite_attend(const attention *a);
void dlite_attend_tiles(const attention *a, const part *p, count chunk, count kv_head,
                        float *partial);

/* ---- linear_kernels.c ---- */

enum { BF16, INT8, FLOAT32 };

typedef struct {
    const void *weight;
    const float *factors, *bias; /* of each output, in the order of panels; or null */
    count outs, ins;             /* ins: whole tile pairs */
    int kind, uses_tiles;
    int is_gated; /* a panel's groups are 16 gates and their 16 ups; one output each */
    int is_wide;  /* results are float32 */
} linear;

int dlite_tiles(void);
void dlite_pack(const linear *w, const void *weight, void *to, int threads);
int dlite_unpack_rows(const linear *w, const count *ids, count num_ids, void *out);
void dlite_linear(const linear *w, const void *x, count rows, const void *residual, void *out,
                  char *digits, float *steps, int threads);

/* ---- layer_kernels.c ---- */

typedef struct {
    const float *input_norm, *ffn_norm; /* [E] */
    linear qkv, out, gate_up, down;
    const float *head_weight; /* of the norms of queries and keys: see heads.weight */
    void *keys, *values;      /* of the layer: [K, P, D] */
    count head_stride;
    float norm_eps, head_eps;
    int is_normed;
} layer;

typedef struct {
    void *x;         /* [rows, E], changed in place */
    void *normed;    /* [rows, E] */
    void *qkv;       /* [rows, (H + 2K) D] */
    void *mixed;     /* [rows, H D] */
    void *activated; /* [rows, F] */
    char *digits;    /* scratch of int8: [2, rows, the largest number of inputs] */
    float *steps;    /* [rows] */
    const heads *heads;
    const attention *attention;
    count rows;
    int is_bf16, threads;
} forward;

void dlite_attention_half(const layer *l, const forward *f);
void dlite_ffn_half(const layer *l, const forward *f);
void dlite_layers(const layer *layers, count n, const forward *f);

/* ---- draft_kernels.c ---- */

#define MAX_RANK 256

typedef struct {
    const float *factor;      /* [r, V] */
    const float *token_rows;  /* [V, 2r], gates halved, as all rows of 2r */
    const float *state_proj;  /* [r, 2r] */
    const float *copy_rows;   /* [V, 2r]; null: hints are not looked for */
    const float *length_rows; /* [9, 2r] */
    const float *copy_gain;   /* [r] */
    const float *copy_bias;   /* [9] */
    count vocabulary, rank;   /* V is a whole number of 16 */
} draft_head;

#endif
