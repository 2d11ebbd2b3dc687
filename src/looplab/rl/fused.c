/* Forward pass, PPO gradient and optimizers of two small tanh MLPs, an actor and a critic; see fused.py.
 *
 * Samples are processed in tiles that stay in the cache. Matrix products add in the order of k, one fused
 * multiply-add each, whatever the width of the machine's vectors, so the results do not depend on that width. */
#include <math.h>
#include <stdint.h>
#include <string.h>

#if !defined(__FMA__) && !defined(__aarch64__)
#error "needs fused multiply-add"
#endif

/* LANES: floats per vector. A block of ROWS times COLUMNS vectors of a product fills the registers. */
#if defined(__AVX512F__)
enum { LANES = 16, ROWS = 6, COLUMNS = 4 };
#elif defined(__AVX2__)
enum { LANES = 8, ROWS = 6, COLUMNS = 2 };
#else
enum { LANES = 4, ROWS = 6, COLUMNS = 4 };
#endif
enum { GROUP = 16, TILE = 64, MAX_LAYERS = 8, MAX_OUTPUTS = 64, NETS = 2 }; /* layers are whole GROUPs wide */

typedef float vec __attribute__((vector_size(4 * LANES)));
typedef float uvec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

#define INLINE static inline __attribute__((always_inline))
#define LOAD(address) ((vec) * (const uvec *)(address))
#define STORE(address, value) (*(uvec *)(address) = (value))

static int64_t padded(int64_t n) { return (n + GROUP - 1) / GROUP * GROUP; }

INLINE vec splat(float x) { return x - (vec){0}; }

/* -- matrix products: C[m][n] = init + sum over k of A[m][k] B[k][n]; n in whole vectors */

typedef struct {
    const float *at;
    int64_t row, column; /* strides, so that A may be a transposed view */
} Left;

INLINE void block(int rows, int columns, int64_t depth, Left a, const float *b, int64_t ldb, const float *init,
                  int64_t ldi, float *c, int64_t ldc) {
    vec sum[6][4];
#pragma GCC unroll 6
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 4
        for (int j = 0; j < columns; j++) sum[i][j] = init ? LOAD(init + i * ldi + j * LANES) : (vec){0};
    for (int64_t k = 0; k < depth; k++) {
        vec right[4];
#pragma GCC unroll 4
        for (int j = 0; j < columns; j++) right[j] = LOAD(b + k * ldb + j * LANES);
#pragma GCC unroll 6
        for (int i = 0; i < rows; i++) {
            vec left = splat(a.at[i * a.row + k * a.column]);
#pragma GCC unroll 4
            for (int j = 0; j < columns; j++) sum[i][j] += left * right[j];
        }
    }
#pragma GCC unroll 6
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 4
        for (int j = 0; j < columns; j++) STORE(c + i * ldc + j * LANES, sum[i][j]);
}

#define STRIP(columns)                                                                                           \
    for (int64_t m = 0; m < rows; m += ROWS) {                                                                   \
        Left part = {a.at + m * a.row, a.row, a.column};                                                         \
        const float *first = init ? init + m * ldi + n : 0;                                                      \
        float *to = c + m * ldc + n;                                                                             \
        switch (rows - m) {                                                                                      \
        case 1: block(1, columns, depth, part, b + n, ldb, first, ldi, to, ldc); break;                          \
        case 2: block(2, columns, depth, part, b + n, ldb, first, ldi, to, ldc); break;                          \
        case 3: block(3, columns, depth, part, b + n, ldb, first, ldi, to, ldc); break;                          \
        case 4: block(4, columns, depth, part, b + n, ldb, first, ldi, to, ldc); break;                          \
        case 5: block(5, columns, depth, part, b + n, ldb, first, ldi, to, ldc); break;        \
        default: block(ROWS, columns, depth, part, b + n, ldb, first, ldi, to, ldc);                             \
        }                                                                                                        \
    }

static void multiply(int64_t rows, int64_t width, int64_t depth, Left a, const float *b, int64_t ldb,
                     const float *init, int64_t ldi, float *c, int64_t ldc) {
    int64_t n = 0;
    for (; n + COLUMNS * LANES <= width; n += COLUMNS * LANES) STRIP(COLUMNS)
    for (; n < width; n += LANES) STRIP(1)
}

static void transpose(int64_t rows, int64_t columns, const float *from, int64_t ldf, float *to, int64_t ldt) {
    for (int64_t r = 0; r < rows; r += 8)
        for (int64_t c = 0; c < columns; c++)
            for (int64_t i = r; i < rows && i < r + 8; i++) to[c * ldt + i] = from[i * ldf + c];
}

/* Sum of products over whole GROUPs, added in the same order for any number of lanes. */
INLINE float dot(const float *x, const float *y, int64_t n) {
    vec sum[GROUP / LANES] = {{0}};
    for (int64_t i = 0; i < n; i += GROUP)
        for (int k = 0; k < GROUP / LANES; k++) sum[k] += LOAD(x + i + k * LANES) * LOAD(y + i + k * LANES);
    float part[GROUP];
    memcpy(part, sum, sizeof part);
    for (int half = GROUP / 2; half; half /= 2)
        for (int i = 0; i < half; i++) part[i] += part[i + half];
    return part[0];
}

/* tanh, by a rational function of x whose relative error is about that of rounding. NaN stays NaN. */
static void apply_tanh(float *restrict at, int64_t n) {
    for (int64_t i = 0; i < n; i++) {
        float x = at[i];
        x = 9.0f < x ? 9.0f : x;
        x = -9.0f > x ? -9.0f : x;
        float y = x * x;
        float p = 1.33534117e-8f * y + 2.06081841e-5f, q = 7.77604669e-7f * y + 3.28554626e-4f;
        p = p * y + 3.49553442e-3f;
        q = q * y + 2.58767791e-2f;
        p = p * y + 1.33809805e-1f;
        q = q * y + 4.67142969e-1f;
        at[i] = (x * (p * y + 1.0f)) / (q * y + 1.0f);
    }
}

/* -- networks */

typedef struct {
    int64_t inputs, layers, outputs, gaussian, transposed, log_std;
    int64_t width[MAX_LAYERS + 1]; /* width[0] = inputs */
    int64_t weight[NETS][MAX_LAYERS + 1], bias[NETS][MAX_LAYERS + 1]; /* offsets; the last is the head's */
} Shape;

static Shape read_shape(const int64_t *at) {
    Shape s = {at[0], at[1], at[2], at[3], at[4], at[5], {at[0]}, {{0}}, {{0}}};
    at += 6;
    for (int64_t l = 1; l <= s.layers; l++) s.width[l] = *at++;
    for (int net = 0; net < NETS; net++)
        for (int64_t l = 0; l <= s.layers; l++) {
            s.weight[net][l] = *at++;
            s.bias[net][l] = *at++;
        }
    return s;
}

typedef struct {
    const float *forward[NETS][MAX_LAYERS];  /* [in][out] */
    const float *backward[NETS][MAX_LAYERS]; /* [out][in] */
    float *gradient[NETS][MAX_LAYERS];       /* [in][out] */
    float *activation[MAX_LAYERS + 1], *delta[2];
} Work;

/* Lay out the scratch memory; returns its size in floats. `memory` may be null. */
static int64_t arrange(const Shape *s, const float *params, float *memory, Work *w) {
    float *at = memory;
    int64_t widest = 0;
    for (int64_t l = 0; l <= s->layers; l++) {
        widest = s->width[l] > widest ? s->width[l] : widest;
        w->activation[l] = at;
        at += TILE * (padded(s->width[l]));
    }
    for (int i = 0; i < 2; i++) {
        w->delta[i] = at;
        at += TILE * widest;
    }
    for (int net = 0; net < NETS; net++)
        for (int64_t l = 0; l < s->layers; l++) {
            int64_t size = padded(s->width[l] * s->width[l + 1]);
            const float *own = params + s->weight[net][l];
            w->forward[net][l] = s->transposed ? at : own;
            w->backward[net][l] = s->transposed ? own : at;
            w->gradient[net][l] = at + size;
            at += 2 * size;
        }
    return at - memory;
}

int64_t looplab_scratch_size(const int64_t *shape) {
    Shape s = read_shape(shape);
    Work w;
    return arrange(&s, 0, 0, &w);
}

static void pack(const Shape *s, Work *w, const float *params, int backward) {
    for (int net = 0; net < NETS; net++)
        for (int64_t l = 0; l < s->layers; l++) {
            int64_t in = s->width[l], out = s->width[l + 1];
            const float *own = params + s->weight[net][l];
            if (s->transposed)
                transpose(out, in, own, in, (float *)w->forward[net][l], out);
            else if (backward && l)
                transpose(in, out, own, out, (float *)w->backward[net][l], in);
            if (backward) memset(w->gradient[net][l], 0, sizeof(float) * (size_t)(in * out));
        }
}

/* Hidden layers of one network; the inputs are in activation[0]. */
static void hidden_layers(const Shape *s, const Work *w, const float *params, int net, int64_t n) {
    for (int64_t l = 0; l < s->layers; l++) {
        int64_t in = s->width[l], out = s->width[l + 1];
        Left a = {w->activation[l], in, 1};
        float *c = w->activation[l + 1];
        multiply(n, out, in, a, w->forward[net][l], out, params + s->bias[net][l], 0, c, out);
        apply_tanh(c, n * out);
    }
}

static void head_forward(const Shape *s, const Work *w, const float *params, int net, int64_t n, float *outputs) {
    int64_t width = s->width[s->layers], count = net ? 1 : s->outputs;
    const float *weight = params + s->weight[net][s->layers], *bias = params + s->bias[net][s->layers];
    for (int64_t b = 0; b < n; b++)
        for (int64_t o = 0; o < count; o++)
            outputs[b * count + o] = dot(w->activation[s->layers] + b * width, weight + o * width, width) + bias[o];
}

/* Outputs of the actor [n][outputs] and values [n] of observations [n][inputs]. */
void looplab_forward(const int64_t *shape, const float *params, float *scratch, const float *obs, int64_t n,
                     float *outputs, float *values) {
    Shape s = read_shape(shape);
    Work w;
    arrange(&s, params, scratch, &w);
    pack(&s, &w, params, 0);
    for (int64_t first = 0; first < n; first += TILE) {
        int64_t count = n - first < TILE ? n - first : TILE;
        w.activation[0] = (float *)obs + first * s.inputs;
        for (int net = 0; net < NETS; net++) {
            hidden_layers(&s, &w, params, net, count);
            head_forward(&s, &w, params, net, count, net ? values + first : outputs + first * s.outputs);
        }
    }
}

/* -- PPO */

typedef struct {
    double clip, value_clip, value_coef, value_scale, entropy_coef, min_log_std, max_log_std;
    int64_t normalise; /* 0: no; 1: by the sample standard deviation; 2: by the population standard deviation */
} Loss;

typedef struct {
    const float *obs, *actions, *log_probs, *advantages, *returns, *old_values;
    const int64_t *choices;  /* discrete actions */
    const uint8_t *scripted; /* may be null */
} Columns;

enum { POLICY_LOSS, VALUE_LOSS, ENTROPY, KL, CLIPPED, NORM, STATS };

typedef struct {
    double advantage_mean, advantage_scale, sums[STATS];
    int64_t count, chosen;
    float log_std[MAX_OUTPUTS], inverse_std[MAX_OUTPUTS];
    double log_std_gradient[MAX_OUTPUTS];
    int inside[MAX_OUTPUTS]; /* whether log_std is within its limits, and so has a gradient */
} Batch;

/* Gradient of the loss with respect to the value of one sample. */
static float value_slope(const Loss *loss, const Columns *c, Batch *batch, int64_t row, float value) {
    double error = (double)value - c->returns[row], worst = error * error, slope = 2 * error;
    if (c->old_values) {
        double old = c->old_values[row], moved = value - old, limit = loss->value_clip;
        double limited = moved > limit ? limit : moved < -limit ? -limit : moved;
        double clipped = old + limited - c->returns[row];
        if (limited != moved && clipped * clipped > worst) {
            worst = clipped * clipped;
            slope = 0;
        }
    }
    batch->sums[VALUE_LOSS] += loss->value_scale * worst;
    return (float)(loss->value_coef * loss->value_scale * slope / batch->count);
}

/* Gradients of the loss with respect to the actor's outputs for one sample. */
static void policy_slopes(const Shape *s, const Loss *loss, const Columns *c, Batch *batch, int64_t row,
                          const float *out, float *slopes) {
    int64_t outputs = s->outputs, choice = s->gaussian ? -1 : c->choices[row];
    if (c->scripted && c->scripted[row]) {
        memset(slopes, 0, sizeof(float) * (size_t)outputs);
        return;
    }
    float log_prob = 0, entropy = 0, p[MAX_OUTPUTS], log_p[MAX_OUTPUTS];
    if (s->gaussian) {
        for (int64_t o = 0; o < outputs; o++) {
            p[o] = (c->actions[row * outputs + o] - out[o]) * batch->inverse_std[o]; /* standard scores */
            log_prob += -0.5f * p[o] * p[o] - batch->log_std[o] - 0.918938533f;
            entropy += batch->log_std[o] + 1.418938533f;
        }
    } else {
        float most = out[0], total = 0;
        for (int64_t o = 1; o < outputs; o++) most = out[o] > most ? out[o] : most;
        for (int64_t o = 0; o < outputs; o++) total += p[o] = expf(out[o] - most);
        float log_total = logf(total);
        for (int64_t o = 0; o < outputs; o++) {
            p[o] /= total;
            log_p[o] = out[o] - most - log_total;
            entropy -= p[o] * log_p[o];
        }
        log_prob = log_p[choice];
    }
    float advantage = (float)((c->advantages[row] - batch->advantage_mean) * batch->advantage_scale);
    float log_ratio = log_prob - c->log_probs[row], ratio = expf(log_ratio);
    float low = (float)(1 - loss->clip), high = (float)(1 + loss->clip);
    float limited = ratio < low ? low : ratio > high ? high : ratio;
    float plain = advantage * ratio, clipped = advantage * limited;
    int active = !(plain > clipped); /* also if it is NaN, which must not disappear */
    batch->sums[POLICY_LOSS] -= active ? plain : clipped;
    batch->sums[ENTROPY] += entropy;
    batch->sums[KL] += ratio - 1 - log_ratio;
    batch->sums[CLIPPED] += fabsf(ratio - 1) > (float)loss->clip;
    float by_log_prob = active ? -plain / (float)batch->chosen : 0; /* the ratio is its own derivative */
    float by_entropy = (float)(-loss->entropy_coef / (double)batch->chosen);
    for (int64_t o = 0; o < outputs; o++) {
        if (s->gaussian) {
            slopes[o] = by_log_prob * p[o] * batch->inverse_std[o];
            batch->log_std_gradient[o] += by_log_prob * (p[o] * p[o] - 1) + by_entropy;
        } else {
            slopes[o] = by_log_prob * ((o == choice) - p[o]) - by_entropy * p[o] * (log_p[o] + entropy);
        }
    }
}

/* Backpropagation through one network; the gradients of its outputs are in `slopes` [n][count]. */
static void backward(const Shape *s, const Work *w, const float *params, float *grad, int net, int64_t n,
                     const float *slopes) {
    int64_t layers = s->layers, width = s->width[layers], count = net ? 1 : s->outputs;
    const float *weight = params + s->weight[net][layers];
    float *delta = w->delta[0], *next = w->delta[1];
    for (int64_t i = 0; i < width; i += LANES) {
        const float *h = w->activation[layers] + i;
        for (int64_t b = 0; b < n; b++) {
            vec sum = {0}, x = LOAD(h + b * width);
            for (int64_t o = 0; o < count; o++) sum += slopes[b * count + o] * LOAD(weight + o * width + i);
            STORE(delta + b * width + i, sum * (1.0f - x * x));
        }
        for (int64_t o = 0; o < count; o++) {
            float *to = grad + s->weight[net][layers] + o * width + i;
            vec sum = LOAD(to);
            for (int64_t b = 0; b < n; b++) sum += slopes[b * count + o] * LOAD(h + b * width);
            STORE(to, sum);
        }
    }
    for (int64_t b = 0; b < n; b++)
        for (int64_t o = 0; o < count; o++) grad[s->bias[net][layers] + o] += slopes[b * count + o];
    for (int64_t l = layers - 1; l >= 0; l--) {
        int64_t in = s->width[l], out = s->width[l + 1];
        Left inputs = {w->activation[l], 1, in}, outputs = {delta, out, 1};
        float *to = w->gradient[net][l], *bias = grad + s->bias[net][l];
        multiply(in, out, n, inputs, delta, out, to, out, to, out);
        for (int64_t i = 0; i < out; i += LANES) {
            vec sum = LOAD(bias + i);
            for (int64_t b = 0; b < n; b++) sum += LOAD(delta + b * out + i);
            STORE(bias + i, sum);
        }
        if (!l) break;
        multiply(n, in, out, outputs, w->backward[net][l], in, 0, 0, next, in);
        const float *h = w->activation[l];
        for (int64_t i = 0; i < n * in; i += LANES) {
            vec x = LOAD(h + i);
            STORE(next + i, LOAD(next + i) * (1.0f - x * x));
        }
        float *swap = delta;
        delta = next;
        next = swap;
    }
}

/* Gradient of the PPO loss over the samples `rows`; replaces `grad`. Adds the means of the statistics to `stats`. */
static void minibatch_gradient(const Shape *s, const Loss *loss, const Columns *c, const float *params, int64_t size,
                               float *grad, float *scratch, const int64_t *rows, int64_t n, double *stats) {
    Work w;
    arrange(s, params, scratch, &w);
    pack(s, &w, params, 1);
    memset(grad, 0, sizeof(float) * (size_t)size);
    Batch batch = {.advantage_scale = 1, .count = n};
    double total = 0, squares = 0;
    for (int64_t i = 0; i < n; i++)
        if (!c->scripted || !c->scripted[rows[i]]) {
            batch.chosen++;
            total += c->advantages[rows[i]];
        }
    int64_t freedom = batch.chosen - (loss->normalise == 1);
    if (loss->normalise && freedom > 0) {
        batch.advantage_mean = total / batch.chosen;
        for (int64_t i = 0; i < n; i++)
            if (!c->scripted || !c->scripted[rows[i]]) {
                double x = c->advantages[rows[i]] - batch.advantage_mean;
                squares += x * x;
            }
        batch.advantage_scale = 1 / (sqrt(squares / freedom) + 1e-8);
    }
    for (int64_t o = 0; s->gaussian && o < s->outputs; o++) {
        float x = params[s->log_std + o];
        batch.inside[o] = !(x < loss->min_log_std || x > loss->max_log_std);
        x = x < loss->min_log_std ? (float)loss->min_log_std : x > loss->max_log_std ? (float)loss->max_log_std : x;
        batch.log_std[o] = x;
        batch.inverse_std[o] = expf(-x);
    }
    float outputs[TILE * MAX_OUTPUTS], slopes[TILE * MAX_OUTPUTS];
    for (int64_t first = 0; first < n; first += TILE) {
        const int64_t *row = rows + first;
        int64_t count = n - first < TILE ? n - first : TILE;
        for (int64_t i = 0; i < count; i++)
            memcpy(w.activation[0] + i * s->inputs, c->obs + row[i] * s->inputs, sizeof(float) * (size_t)s->inputs);
        for (int net = 0; net < NETS; net++) {
            hidden_layers(s, &w, params, net, count);
            head_forward(s, &w, params, net, count, outputs);
            for (int64_t i = 0; i < count; i++)
                if (net)
                    slopes[i] = value_slope(loss, c, &batch, row[i], outputs[i]);
                else
                    policy_slopes(s, loss, c, &batch, row[i], outputs + i * s->outputs, slopes + i * s->outputs);
            backward(s, &w, params, grad, net, count, slopes);
        }
    }
    for (int net = 0; net < NETS; net++)
        for (int64_t l = 0; l < s->layers; l++) {
            int64_t in = s->width[l], out = s->width[l + 1];
            float *to = grad + s->weight[net][l];
            if (s->transposed)
                transpose(in, out, w.gradient[net][l], out, to, in);
            else
                memcpy(to, w.gradient[net][l], sizeof(float) * (size_t)(in * out));
        }
    for (int64_t o = 0; s->gaussian && o < s->outputs; o++)
        if (batch.inside[o]) grad[s->log_std + o] = (float)batch.log_std_gradient[o];
    for (int i = 0; i < NORM; i++) {
        int64_t samples = i == VALUE_LOSS ? n : batch.chosen;
        stats[i] = samples ? batch.sums[i] / (double)samples : 0;
    }
    double norm = 0;
    for (int64_t i = 0; i < size; i++) norm += (double)grad[i] * grad[i];
    stats[NORM] = sqrt(norm);
}

/* Scale the gradient down to a norm of `most`. */
static void clip_norm(float *grad, int64_t size, double norm, double most) {
    double scale = most / (norm + 1e-6);
    if (scale > 1) return;
    for (int64_t i = 0; i < size; i++) grad[i] *= (float)scale;
}

/* Gradient of the PPO loss over the samples `rows`, clipped to `max_norm`; also its statistics, STATS numbers. */
void looplab_gradient(const int64_t *shape, const Loss *loss, const Columns *columns, const float *params, int64_t size,
                      float *grad, float *scratch, const int64_t *rows, int64_t n, double max_norm, double *stats) {
    Shape s = read_shape(shape);
    minibatch_gradient(&s, loss, columns, params, size, grad, scratch, rows, n, stats);
    clip_norm(grad, size, stats[NORM], max_norm);
}

/* -- optimizers */

typedef struct {
    double lr, beta1, beta2, eps, decay;
} Adam;

/* One step of AdamW, number `step` from 1; Adam if decay is 0. */
void looplab_adam(float *params, const float *grad, float *first, float *second, int64_t size, int64_t step,
                  const Adam *adam) {
    float beta1 = (float)adam->beta1, beta2 = (float)adam->beta2, eps = (float)adam->eps;
    float rest1 = (float)(1 - adam->beta1), rest2 = (float)(1 - adam->beta2);
    float rate = (float)(adam->lr / (1 - pow(adam->beta1, (double)step))), keep = (float)(1 - adam->lr * adam->decay);
    float scale = (float)(1 / sqrt(1 - pow(adam->beta2, (double)step)));
    for (int64_t i = 0; i < size; i++) {
        first[i] = beta1 * first[i] + rest1 * grad[i];
        second[i] = beta2 * second[i] + rest2 * grad[i] * grad[i];
        params[i] = keep * params[i] - rate * first[i] / (sqrtf(second[i]) * scale + eps);
    }
}

/* PPO on minibatches with Adam: minibatch m has the samples rows[bounds[m]] to rows[bounds[m + 1]]. */
void looplab_epoch(const int64_t *shape, const Loss *loss, const Columns *columns, float *params, int64_t size,
                   float *grad, float *scratch, const int64_t *rows, const int64_t *bounds, int64_t minibatches,
                   double max_norm, float *first, float *second, int64_t step, const Adam *adam, double *stats) {
    Shape s = read_shape(shape);
    for (int64_t m = 0; m < minibatches; m++, stats += STATS) {
        minibatch_gradient(&s, loss, columns, params, size, grad, scratch, rows + bounds[m], bounds[m + 1] - bounds[m],
                           stats);
        clip_norm(grad, size, stats[NORM], max_norm);
        looplab_adam(params, grad, first, second, size, step + m + 1, adam);
    }
}

int64_t looplab_muon_size(int64_t rows, int64_t columns) {
    int64_t low = padded(rows < columns ? rows : columns), high = padded(rows < columns ? columns : rows);
    return 3 * low * high + 2 * low * low;
}

/* One step of Muon for a matrix: momentum, orthogonalized by five Newton-Schulz iterations; see Muon in ppo.py. */
void looplab_muon(float *params, const float *grad, float *momentum, int64_t rows, int64_t columns, double beta,
                  double rate, double keep, float *scratch) {
    int64_t wide = rows <= columns, low = padded(wide ? rows : columns), high = padded(wide ? columns : rows);
    float *x = scratch, *flipped = x + low * high, *next = flipped + low * high;
    float *square = next + low * high, *mixed = square + low * low;
    float rest = (float)(1 - beta), share = (float)beta;
    double norm = 0;
    memset(scratch, 0, sizeof(float) * (size_t)(3 * low * high + 2 * low * low));
    for (int64_t r = 0; r < rows; r++)
        for (int64_t c = 0; c < columns; c++) {
            int64_t i = r * columns + c;
            momentum[i] += rest * (grad[i] - momentum[i]);
            float nesterov = grad[i] + share * (momentum[i] - grad[i]);
            x[wide ? r * high + c : c * high + r] = nesterov;
            norm += (double)nesterov * nesterov;
        }
    float scale = (float)(1 / (sqrt(norm) + 1e-7));
    for (int64_t i = 0; i < low * high; i++) x[i] *= scale;
    for (int iteration = 0; iteration < 5; iteration++) {
        transpose(low, high, x, high, flipped, low);
        Left a = {x, high, 1}, b = {square, low, 1}, c = {mixed, low, 1};
        multiply(low, low, high, a, flipped, low, 0, 0, square, low);
        multiply(low, low, low, b, square, low, 0, 0, mixed, low);
        for (int64_t i = 0; i < low * low; i++) mixed[i] = -4.7750f * square[i] + 2.0315f * mixed[i];
        multiply(low, high, low, c, x, high, 0, 0, next, high);
        for (int64_t i = 0; i < low * high; i++) x[i] = 3.4445f * x[i] + next[i];
    }
    for (int64_t r = 0; r < rows; r++)
        for (int64_t c = 0; c < columns; c++) {
            float *p = params + r * columns + c;
            *p = (float)keep * *p - (float)rate * x[wide ? r * high + c : c * high + r];
        }
}
