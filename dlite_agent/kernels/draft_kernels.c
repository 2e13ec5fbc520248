/* The sequential head of a block over a small vocabulary, slot by slot: `drafters/block_head.py`
 * says what is computed, and computes it where there is no compiler. */
#include <math.h>

#include "vectors.h"

#define MAX_MATCH 8
#define NEVER (-1.0f / 0.0f)

/* The newest of the longest matches of the last ids, up to eight tokens; returns how many agree. */
static count find_hint(const int32_t *ids, count length, int32_t *hint) {
    count best = 0, last = length - 1;
    for (count p = last - 1; p >= 0 && best < MAX_MATCH; p--) {
        if (ids[p] != ids[last]) continue;
        count same = 1;
        while (same < MAX_MATCH && same <= p && ids[p - same] == ids[last - same]) same++;
        if (same > best) best = same, *hint = ids[p + 1];
    }
    return best;
}

/* g' = z g + (1 - z) c; the gate's half of all rows comes halved, so that one tanh serves both. */
static void step_cell(const draft_head *h, const float *of_hidden, const float *previous_row,
                      const float *of_hint, const float *of_length, float *state, int is_first) {
    count rank = h->rank;
    float total[2 * MAX_RANK];
    for (count i = 0; i < 2 * rank; i++) total[i] = of_hidden[i] + previous_row[i];
    if (of_length)
        for (count i = 0; i < 2 * rank; i++) total[i] += of_length[i];
    if (of_hint)
        for (count i = 0; i < 2 * rank; i++) total[i] += of_hint[i];
    if (!is_first)
        for (count j = 0; j < rank; j++)
            for (count i = 0; i < 2 * rank; i++) total[i] += state[j] * h->state_proj[j * 2 * rank + i];
    for (count i = 0; i < rank; i++) {
        float keep = 0.5f + 0.5f * tanhf(total[i]), candidate = tanhf(total[rank + i]);
        state[i] = candidate + keep * ((is_first ? 0.0f : state[i]) - candidate);
    }
}

/* Drafts a block behind ids [0, length), whose last is the anchor; returns its tokens, and puts them
 * behind the ids and their shares into `shares`. There is room for `slots` more ids. */
count dlite_draft(const draft_head *h, const float *base, const float *of_hidden, count slots,
                  int32_t *ids, count length, float min_chance, float *scores, float *shares) {
    float state[MAX_RANK], chance = 1.0f;
    count rank = h->rank, size = h->vocabulary;
    for (count slot = 0; slot < slots; slot++) {
        int32_t hint = 0;
        count matched = h->copy_rows ? find_hint(ids, length + slot, &hint) : 0;
        step_cell(h, of_hidden + slot * 2 * rank, h->token_rows + ids[length + slot - 1] * 2 * rank,
                  matched ? h->copy_rows + hint * 2 * rank : 0,
                  h->copy_rows ? h->length_rows + matched * 2 * rank : 0, state, slot == 0);
        memcpy(scores, base + slot * size, size * sizeof(float));
        for (count j = 0; j < rank; j++) {
            const float *row = h->factor + j * size;
            for (count i = 0; i < size; i++) scores[i] += state[j] * row[i];
        }
        if (matched) {
            float raised = h->copy_bias[matched];
            for (count j = 0; j < rank; j++) raised += h->copy_gain[j] * state[j];
            scores[hint] += raised > 30.0f ? raised : log1pf(expf(raised));
        }
        count best = 0;
        float top = NEVER;
        for (count i = 0; i < size; i++)
            if (scores[i] > top) top = scores[i], best = i;
        f16 total = {0};
        for (count i = 0; i < size; i += LANES)
            total += exp16(load(scores, i, 0) - top);
        shares[slot] = 1.0f / sum(total);
        chance *= shares[slot];
        if (chance < min_chance) return slot;
        ids[length + slot] = (int32_t)best;
    }
    return slots;
}
