/* Chains of n-grams: `drafters/ngram_table.py` says what they are, and follows them where there is no
 * compiler. */
#include "interface.h"

#define WALK 8 /* a rewound table has positions that are not ours; probes are walked past so often */

typedef struct {
    int32_t *last;     /* [sizes, buckets]: newest position, or -1 */
    int32_t *previous; /* [sizes, capacity]: the next older one, of position - start */
    const count *sizes;
    const uint64_t *multipliers;
    count num_sizes, capacity, start, shift;
} ngram_table;

static uint64_t hash_ngram(const int32_t *ids, count size, const uint64_t *multipliers) {
    uint64_t hashed = 0;
    for (count i = 0; i < size; i++) hashed += (uint64_t)(int64_t)ids[i] * multipliers[i];
    return hashed;
}

/* Enter the n-grams that end in [first, stop). */
void dlite_enter_ngrams(const ngram_table *t, const int32_t *ids, count first, count stop) {
    count buckets = (count)1 << (64 - t->shift);
    for (count row = 0; row < t->num_sizes; row++) {
        count size = t->sizes[row];
        int32_t *last = t->last + row * buckets, *previous = t->previous + row * t->capacity;
        for (count at = first > size - 1 ? first : size - 1; at < stop; at++) {
            uint64_t bucket = hash_ngram(ids + at - size + 1, size, t->multipliers) >> t->shift;
            previous[at - t->start] = last[bucket];
            last[bucket] = (int32_t)at;
        }
    }
}

static count matched(const int32_t *ids, count at, const int32_t *context, count length) {
    count same = 0;
    while (same < length && same <= at && ids[at - same] == context[length - 1 - same]) same++;
    return same;
}

/* Places before `before` that share the longest size of which there is one with the end of a
 * context, the newest first; of table i those before stops[i]. Returns how many. */
count dlite_find_ngrams(const ngram_table *const *tables, const count *stops, count num_tables,
                        const int32_t *ids, const int32_t *context, count length, count before,
                        count probes, count *lengths, count *positions) {
    for (count row = 0; row < tables[0]->num_sizes; row++) {
        count size = tables[0]->sizes[row], num_probed = 0, num_found = 0;
        if (length < size) continue;
        uint64_t hashed = hash_ngram(context + length - size, size, tables[0]->multipliers);
        for (count i = 0; i < num_tables; i++) {
            const ngram_table *t = tables[i];
            const int32_t *previous = t->previous + row * t->capacity;
            count end = stops[i] < before ? stops[i] : before;
            count at = t->last[(row << (64 - t->shift)) + (count)(hashed >> t->shift)];
            for (count walked = 0; at >= 0 && walked < WALK * probes && num_probed < probes; walked++) {
                if (at < end) {
                    count same = matched(ids, at, context, length);
                    num_probed++;
                    if (same >= size) lengths[num_found] = same, positions[num_found++] = at;
                }
                at = previous[at - t->start];
            }
        }
        if (num_found) return num_found;
    }
    return 0;
}
