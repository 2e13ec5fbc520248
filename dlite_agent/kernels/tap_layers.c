/* Layers in one call, with copies of what some of them give: a drafter's taps. */
#include <string.h>

#include "interface.h"

/* As `dlite_layers`; x [rows, E] behind each layer with is_tapped goes to `taps`, one after
 * another, of `tap_bytes` each. */
void dlite_tapped_layers(const layer *layers, count n, const forward *f, const char *is_tapped,
                         char *taps, count tap_bytes) {
    count first = 0;
    for (count i = 0; i < n; i++) {
        if (!is_tapped[i] && i + 1 < n) continue;
        dlite_layers(layers + first, i + 1 - first, f);
        first = i + 1;
        if (!is_tapped[i]) continue;
        memcpy(taps, f->x, tap_bytes);
        taps += tap_bytes;
    }
}
