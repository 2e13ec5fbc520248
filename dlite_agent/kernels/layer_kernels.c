/* Decoder layers as one call, so that a step does no Python work a layer. */
#include "interface.h"

#define FEW_ELEMENTS 65536 /* up to here one thread is faster */

static int team(const forward *f, count elements) {
    return elements > FEW_ELEMENTS ? f->threads : 1;
}

static void multiply(const forward *f, const linear *w, const void *x, const void *residual,
                     void *out) {
    dlite_linear(w, x, f->rows, residual, out, f->digits, f->steps, team(f, w->outs * w->ins));
}

/* Norm, projections, rotation, keys and values to the pool; attention of the sessions that `f`
 * names goes to f->mixed. */
void dlite_attention_half(const layer *l, const forward *f) {
    dlite_norm(f->x, 0, l->input_norm, f->x, f->normed, f->rows, l->qkv.ins, l->norm_eps,
               f->is_bf16, team(f, f->rows * l->qkv.ins));
    multiply(f, &l->qkv, f->normed, 0, f->qkv);
    heads h = *f->heads;
    h.weight = l->head_weight, h.eps = l->head_eps, h.is_normed = l->is_normed;
    h.keys = l->keys, h.values = l->values, h.head_stride = l->head_stride;
    h.is_bf16 = f->is_bf16;
    dlite_heads(f->qkv, &h, f->rows);
    attention a = *f->attention;
    a.keys = l->keys, a.values = l->values, a.head_stride = l->head_stride;
    a.out = f->mixed, a.is_bf16 = f->is_bf16;
    dlite_attend(&a);
}

/* x += out(mixed); x += down(silu(gate) * up) of its norm. */
void dlite_ffn_half(const layer *l, const forward *f) {
    multiply(f, &l->out, f->mixed, f->x, f->x);
    dlite_norm(f->x, 0, l->ffn_norm, f->x, f->normed, f->rows, l->out.outs, l->norm_eps,
               f->is_bf16, team(f, f->rows * l->out.outs));
    multiply(f, &l->gate_up, f->normed, 0, f->activated);
    multiply(f, &l->down, f->activated, f->x, f->x);
}

/* Layers [0, n), where no session needs an attention of its own. */
void dlite_layers(const layer *layers, count n, const forward *f) {
    for (count i = 0; i < n; i++) {
        dlite_attention_half(layers + i, f);
        dlite_ffn_half(layers + i, f);
    }
}
