/* The two loops of sumtree.py, which describes the algorithm; the results of both files must agree to the bit.
 * Levels are stored one after the other, leaves first; level k starts at start[k]. */
#include <stdint.h>

enum { WIDTH = 16, BITS = 4, LANES = 32 /* targets searched at once, so that their cache misses overlap */ };

#ifdef __GNUC__
#define PREFETCH(address) __builtin_prefetch(address)
#else
#define PREFETCH(address) ((void)0)
#endif

/* Set leaves, then recompute the sums above them, level by level. Overwrites `indices`. */
void looplab_set(double *weights, double *prefix_sums, const int64_t *start, int64_t levels, int64_t *indices,
                 const double *new_weights, int64_t n) {
    for (int64_t i = 0; i < n; i++) {
        weights[indices[i]] = new_weights[i];
        int64_t node = indices[i] & ~(int64_t)(WIDTH - 1);
        PREFETCH(weights + node);
        PREFETCH(weights + node + 8);
        PREFETCH(prefix_sums + node);
        PREFETCH(prefix_sums + node + 8);
    }
    for (int64_t level = 1; level < levels; level++) {
        int64_t kept = 0, last = -1;
        for (int64_t i = 0; i < n; i++) {
            int64_t node = indices[i] >> BITS;
            if (node == last) continue; /* siblings share their parent */
            const double *child = weights + start[level - 1] + node * WIDTH;
            double *sums = prefix_sums + start[level - 1] + node * WIDTH;
            double sum = 0.0;
            for (int k = 0; k < WIDTH; k++) {
                sums[k] = sum;
                sum += child[k];
            }
            weights[start[level] + node] = sum;
            indices[kept++] = last = node;
        }
        n = kept;
    }
}

/* Find the leaf that covers each target, and its weight. `last` is the last leaf in use. */
void looplab_find(const double *weights, const double *prefix_sums, const int64_t *start, int64_t levels, int64_t last,
                  const double *targets, int64_t *indices, double *found, int64_t n) {
    for (int64_t first = 0; first < n; first += LANES) {
        int64_t count = n - first < LANES ? n - first : LANES;
        int64_t *node = indices + first;
        double remaining[LANES];
        for (int64_t i = 0; i < count; i++) {
            remaining[i] = targets[first + i];
            node[i] = 0;
        }
        for (int64_t level = levels - 2; level >= 0; level--) {
            int64_t max_node = last >> (BITS * level);
            for (int64_t i = 0; i < count; i++) {
                const double *sums = prefix_sums + start[level] + node[i] * WIDTH;
                int64_t child = 0; /* branch-free: half of the branches would be mispredicted */
                child += (int64_t)(remaining[i] >= sums[8]) << 3;
                child += (int64_t)(remaining[i] >= sums[child + 4]) << 2;
                child += (int64_t)(remaining[i] >= sums[child + 2]) << 1;
                child += (int64_t)(remaining[i] >= sums[child + 1]);
                int64_t end = max_node - node[i] * WIDTH; /* rounding may lead beyond it, where all weights are 0 */
                child = child > end ? end : child;
                remaining[i] -= sums[child];
                node[i] = node[i] * WIDTH + child;
                if (level) {
                    sums = prefix_sums + start[level - 1] + node[i] * WIDTH;
                    PREFETCH(sums);
                    PREFETCH(sums + 8);
                } else {
                    PREFETCH(weights + node[i]);
                }
            }
        }
        for (int64_t i = 0; i < count; i++) found[first + i] = weights[node[i]];
    }
}
