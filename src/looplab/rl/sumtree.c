/* The two loops of sumtree.py: what they compute, and in which order, is described there, and has to be the same in
 * both files to the last bit. Levels lie one behind the other, leaves first; level k begins at start[k]. */
#include <stdint.h>

enum { WIDTH = 16, BITS = 4, TOGETHER = 32 /* targets followed at once: their waits for memory overlap */ };

#ifdef __GNUC__
#define PREFETCH(address) __builtin_prefetch(address)
#else
#define PREFETCH(address) ((void)0)
#endif

/* Set leaves, then make the sums above them anew, level by level. `places` is used up. */
void looplab_set(double *weights, double *running, const int64_t *start, int64_t levels, int64_t *places,
                 const double *given, int64_t n) {
    for (int64_t i = 0; i < n; i++) {
        weights[places[i]] = given[i];
        int64_t node = places[i] & ~(int64_t)(WIDTH - 1);
        PREFETCH(weights + node);
        PREFETCH(weights + node + 8);
        PREFETCH(running + node);
        PREFETCH(running + node + 8);
    }
    for (int64_t level = 1; level < levels; level++) {
        int64_t kept = 0, last = -1;
        for (int64_t i = 0; i < n; i++) {
            int64_t node = places[i] >> BITS;
            if (node == last) continue; /* neighbours share their parent */
            const double *child = weights + start[level - 1] + node * WIDTH;
            double *along = running + start[level - 1] + node * WIDTH;
            double sum = 0.0;
            for (int k = 0; k < WIDTH; k++) {
                along[k] = sum;
                sum += child[k];
            }
            weights[start[level] + node] = sum;
            places[kept++] = last = node;
        }
        n = kept;
    }
}

/* The leaf that each target falls on, and its weight. `last` is the last leaf in use. */
void looplab_find(const double *weights, const double *running, const int64_t *start, int64_t levels, int64_t last,
                  const double *targets, int64_t *places, double *found, int64_t n) {
    for (int64_t first = 0; first < n; first += TOGETHER) {
        int64_t count = n - first < TOGETHER ? n - first : TOGETHER;
        int64_t *node = places + first;
        double left[TOGETHER];
        for (int64_t i = 0; i < count; i++) {
            left[i] = targets[first + i];
            node[i] = 0;
        }
        for (int64_t level = levels - 2; level >= 0; level--) {
            int64_t most = last >> (BITS * level);
            for (int64_t i = 0; i < count; i++) {
                const double *along = running + start[level] + node[i] * WIDTH;
                int64_t child = 0; /* no branches: the processor would guess each wrong every other time */
                child += (int64_t)(left[i] >= along[8]) << 3;
                child += (int64_t)(left[i] >= along[child + 4]) << 2;
                child += (int64_t)(left[i] >= along[child + 2]) << 1;
                child += (int64_t)(left[i] >= along[child + 1]);
                int64_t end = most - node[i] * WIDTH; /* beyond it all weights are 0, but rounding may lead there */
                child = child > end ? end : child;
                left[i] -= along[child];
                node[i] = node[i] * WIDTH + child;
                if (level) {
                    along = running + start[level - 1] + node[i] * WIDTH;
                    PREFETCH(along);
                    PREFETCH(along + 8);
                } else {
                    PREFETCH(weights + node[i]);
                }
            }
        }
        for (int64_t i = 0; i < count; i++) found[first + i] = weights[node[i]];
    }
}
