/* One step of the simulation in drones.py, with the same results to the bit: the same operations in the same order.
 *
 * Used only while drones.py has the hash below. After a change of drones.py, make the same change here and set the hash;
 * until then numpy is used.
 * sha256 of drones.py: 5e9e90f7cbb35943e7fe9adfa38998b75aac057613c4859c4ea6f9a58171545d */
#include <math.h>
#include <stdint.h>
#include <string.h>

enum { HOLD = 12, MAX_EPISODE_STEPS = 250, CANDIDATES = 8, OBS_DIM = 24, NUMBERS = 3 * CANDIDATES + 7 };

static const float GRAVITY = 9.81f, DT = 0.04f, HALF_DT = 0.02f, DRAG = 0.1f, LOADED = 1.2f;
static const float CEILING = 4.0f, TOUCH = 0.3f, NEAR = 0.3f, SLOW = 0.5f, FAR = 1e6f;
static const double CELL = 1.2, JITTER = 0.3;

typedef struct {
    int64_t worlds, drones, carries, side, seed, first_world, clock;
    float half_width, rate_gain;
    int64_t *episode, *hold_steps, *steps;
    float *position, *velocity, *attitude, *rates, *box, *target, *returns;
    uint8_t *carrying;
    float *scratch; /* 16 floats per drone */
} World;

typedef struct {
    float *obs, *rewards;
    uint8_t *dones;
    float *returns; /* of the episodes that ended, like the next three */
    int64_t *lengths;
    uint8_t *success, *collision;
} Result;

/* exp(-x) for x >= 0 */
static inline float fade(float x) {
    x = x < 87.0f ? x : 87.0f;
    float n = (x * -1.44269504f + 12582912.0f) - 12582912.0f;
    float r = (-x - n * 0.693359375f) - n * -2.12194440e-4f;
    float p = (float)(1.0 / 5040) * r + (float)(1.0 / 720);
    p = ((p * r + (float)(1.0 / 120)) * r + (float)(1.0 / 24)) * r + (float)(1.0 / 6);
    p = (p * r + 0.5f) * (r * r);
    int32_t bits = ((int32_t)n + 127) << 23;
    float power;
    memcpy(&power, &bits, sizeof power);
    return ((p + r) + 1.0f) * power;
}

/* Distances to the nearest other drone of the world, and which one that is. */
static void find_nearest(int64_t drones, const float *restrict x, const float *restrict y, const float *restrict z,
                         float *restrict distance, int32_t *restrict nearest) {
    for (int64_t i = 0; i < drones; i++) {
        distance[i] = INFINITY;
        nearest[i] = 0;
    }
    for (int64_t j = 0; j < drones; j++) {
        float xj = x[j], yj = y[j], zj = z[j];
        for (int64_t i = 0; i < drones; i++) {
            float dx = xj - x[i], dy = yj - y[i], dz = zj - z[i];
            float d = sqrtf((dx * dx + dy * dy) + dz * dz) + (i == j ? FAR : 0.0f);
            int closer = d < distance[i];
            distance[i] = closer ? d : distance[i];
            nearest[i] = closer ? (int32_t)j : nearest[i];
        }
    }
}

static inline uint64_t splitmix64(uint64_t x) {
    x = (x ^ (x >> 30)) * UINT64_C(0xBF58476D1CE4E5B9);
    x = (x ^ (x >> 27)) * UINT64_C(0x94D049BB133111EB);
    return x ^ (x >> 31);
}

static double uniform(const World *w, int64_t index, int64_t episode, uint64_t number) {
    const uint64_t key = UINT64_C(0xD1342543DE82EF95);
    uint64_t x = splitmix64((number + 1) * UINT64_C(0x9E3779B97F4A7C15) + (uint64_t)w->seed * key);
    x = splitmix64(x + (uint64_t)index * key);
    x = splitmix64(x + (uint64_t)episode * key);
    return (double)(x >> 11) * 0x1p-53;
}

/* A position in a cell, from three uniform numbers. */
static void place(const World *w, int64_t cell, double u, double v, double h, double low, double high, float *to) {
    double centre = (double)(w->side - 1) / 2;
    to[0] = (float)(((double)(cell % w->side) - centre) * CELL + (2 * u - 1) * JITTER);
    to[1] = (float)(((double)(cell / w->side) - centre) * CELL + (2 * v - 1) * JITTER);
    to[2] = (float)(low + (high - low) * h);
}

/* cos and sin of half a turn times u, for u in 0 ... 1 */
static void half_turn(double u, float *cosine, float *sine) {
    double t = (u - 0.5) * 3.141592653589793, q = t * t, c = 1.0, s = 1.0;
    for (int k = 18; k > 0; k -= 2) {
        c = 1.0 - q / (k * (k - 1)) * c;
        s = 1.0 - q / (k * (k + 1)) * s;
    }
    *cosine = (float)(-t * s);
    *sine = (float)c;
}

/* Start the next episode of these drones of one world; their starts depend on where all drones were before. */
static void reset(const World *w, int64_t world, const uint8_t *dones, float *starts) {
    int64_t drones = w->drones, n = w->worlds * drones, base = world * drones, cells = w->side * w->side;
    float *p = w->position + base;
    int64_t shift = (int64_t)(uniform(w, w->first_world + world, -1 - w->clock, 0) * (double)cells);
    for (int64_t d = 0; d < drones; d++) {
        if (!dones[base + d]) continue;
        int64_t index = w->first_world * drones + base + d, episode = ++w->episode[base + d];
        double numbers[NUMBERS];
        for (int k = 0; k < NUMBERS; k++) numbers[k] = uniform(w, index, episode, (uint64_t)k);
        float best = -1, at[3];
        for (int k = 0; k < CANDIDATES; k++) {
            const double *u = numbers + 7 + k;
            place(w, (d + shift) % cells, u[0], u[CANDIDATES], u[2 * CANDIDATES], 0.6, 2.6, at);
            float least = INFINITY;
            for (int64_t j = 0; j < drones; j++) {
                float x = at[0] - p[j], y = at[1] - p[n + j], z = at[2] - p[2 * n + j];
                float distance = (x * x + y * y) + z * z;
                if (j != d && distance < least) least = distance;
            }
            if (least > best || k == 0) {
                best = least;
                memcpy(starts + 3 * d, at, sizeof at);
            }
        }
        int64_t i = base + d;
        half_turn(numbers[0], w->attitude + i, w->attitude + 3 * n + i);
        w->attitude[n + i] = w->attitude[2 * n + i] = 0;
        float target[3], box[3];
        if (w->carries) {
            place(w, d, numbers[1], numbers[2], numbers[3], 0.3, 0.3, box);
            place(w, drones + d, numbers[4], numbers[5], numbers[6], 0.3, 0.3, target);
        } else {
            place(w, d, numbers[1], numbers[2], numbers[3], 0.8, 2.4, target);
        }
        for (int k = 0; k < 3; k++) {
            w->velocity[k * n + i] = w->rates[k * n + i] = 0;
            w->target[k * n + i] = target[k];
            if (w->carries) w->box[k * n + i] = box[k];
        }
        w->carrying[i] = 0;
        w->hold_steps[i] = w->steps[i] = 0;
        w->returns[i] = 0;
    }
    for (int64_t d = 0; d < drones; d++)
        for (int k = 0; k < 3 && dones[base + d]; k++) p[k * n + d] = starts[3 * d + k];
}

static inline float goal(const World *w, int64_t i, int64_t k) {
    int64_t n = w->worlds * w->drones;
    return !w->carries || w->carrying[i] ? w->target[k * n + i] : w->box[k * n + i];
}

/* Observations of `count` drones from `first` on, one row each. */
static void observe(const World *w, int64_t first, int64_t count, const float *restrict distances,
                    const int32_t *restrict nearest, float *restrict obs) {
    enum { BLOCK = 16 };
    int64_t n = w->worlds * w->drones;
    for (int64_t begin = first; begin < first + count; begin += BLOCK) {
        int64_t size = first + count - begin < BLOCK ? first + count - begin : BLOCK;
        float q[4][BLOCK], at[3][BLOCK], v[3][BLOCK], to[3][BLOCK], last[3][BLOCK], near[3][BLOCK], moving[3][BLOCK];
        float away[BLOCK], rate[3][BLOCK], f[OBS_DIM][BLOCK];
        memset(q, 0, sizeof q);
        for (int64_t l = 0; l < BLOCK; l++) {
            int64_t i = begin + (l < size ? l : 0), j = i / w->drones * w->drones + nearest[i];
            away[l] = distances[i];
            for (int64_t k = 0; k < 4; k++) q[k][l] = w->attitude[k * n + i];
            for (int64_t k = 0; k < 3; k++) {
                at[k][l] = w->position[k * n + i];
                v[k][l] = w->velocity[k * n + i];
                rate[k][l] = w->rates[k * n + i];
                to[k][l] = goal(w, i, k);
                last[k][l] = w->target[k * n + i];
                near[k][l] = w->position[k * n + j] - at[k][l];
                moving[k][l] = w->velocity[k * n + j] - v[k][l];
            }
            f[22][l] = (float)((double)w->hold_steps[i] / HOLD * 1.0);
            f[23][l] = (float)((double)w->steps[i] / MAX_EPISODE_STEPS - 0.5);
        }
        for (int l = 0; l < BLOCK; l++) {
            float a = q[0][l], x = q[1][l], y = q[2][l], z = q[3][l], shown = fade(away[l]);
            float limited = away[l] > 1e-6f ? away[l] : 1e-6f;
            float r[3][3] = {
                {1 - 2 * (y * y + z * z), 2 * (x * y - a * z), 2 * (x * z + a * y)},
                {2 * (x * y + a * z), 1 - 2 * (x * x + z * z), 2 * (y * z - a * x)},
                {2 * (x * z - a * y), 2 * (y * z + a * x), 1 - 2 * (x * x + y * y)},
            };
            float d0 = near[0][l] / limited, d1 = near[1][l] / limited, d2 = near[2][l] / limited;
            float g0 = to[0][l] - at[0][l], g1 = to[1][l] - at[1][l], g2 = to[2][l] - at[2][l];
            float e0 = last[0][l] - at[0][l], e1 = last[1][l] - at[1][l], e2 = last[2][l] - at[2][l];
#define BODY(k, one, two, three) ((r[0][k] * (one) + r[1][k] * (two)) + r[2][k] * (three))
#pragma GCC unroll 3
            for (int k = 0; k < 3; k++) {
                f[k][l] = BODY(k, g0, g1, g2) * 0.5f;
                f[3 + k][l] = BODY(k, e0, e1, e2) * 0.5f;
                f[6 + k][l] = BODY(k, v[0][l], v[1][l], v[2][l]) * 0.5f;
                f[9 + k][l] = r[2][k];
                f[12 + k][l] = rate[k][l] * 0.25f;
                f[15 + k][l] = BODY(k, d0, d1, d2) * shown;
                f[18 + k][l] = BODY(k, moving[0][l], moving[1][l], moving[2][l]) * shown * 0.5f;
            }
            f[21][l] = at[2][l] * 0.5f;
        }
        for (int64_t l = 0; l < size; l++)
            for (int k = 0; k < OBS_DIM; k++) obs[(begin + l) * OBS_DIM + k] = f[k][l];
    }
}

/* Semi-implicit Euler: rates, attitude, velocity, position. */
static void integrate(const World *w, const float *restrict actions) {
    int64_t n = w->worlds * w->drones;
    float *restrict p = w->position, *restrict v = w->velocity, *restrict q = w->attitude, *restrict rates = w->rates;
    const uint8_t *restrict carrying = w->carrying;
    const float gain = w->rate_gain, limits[3] = {4.0f, 4.0f, 2.0f};
#define CLIP(x) ((x) < -1.0f ? -1.0f : (x) > 1.0f ? 1.0f : (x))
    for (int k = 0; k < 3; k++)
        for (int64_t i = 0; i < n; i++) {
            float command = CLIP(actions[4 * i + 1 + k]);
            rates[k * n + i] += (command * limits[k] - rates[k * n + i]) * gain;
        }
    for (int64_t i = 0; i < n; i++) {
        float a = q[i], b = q[n + i], c = q[2 * n + i], d = q[3 * n + i];
        float x = rates[i] * HALF_DT, y = rates[n + i] * HALF_DT, z = rates[2 * n + i] * HALF_DT;
        float a1 = ((a - b * x) - c * y) - d * z, b1 = ((b + a * x) + c * z) - d * y;
        float c1 = ((c + a * y) + d * x) - b * z, d1 = ((d + a * z) + b * y) - c * x;
        float norm = sqrtf(((a1 * a1 + b1 * b1) + c1 * c1) + d1 * d1);
        q[i] = a = a1 / norm;
        q[n + i] = b = b1 / norm;
        q[2 * n + i] = c = c1 / norm;
        q[3 * n + i] = d = d1 / norm;
        float thrust = GRAVITY * (1.0f + CLIP(actions[4 * i])) / (carrying[i] ? LOADED : 1.0f);
        float ax = 2 * (b * d + a * c) * thrust - DRAG * v[i];
        float ay = 2 * (c * d - a * b) * thrust - DRAG * v[n + i];
        float az = ((1 - 2 * (b * b + c * c)) * thrust - DRAG * v[2 * n + i]) - GRAVITY;
        v[i] += ax * DT;
        v[n + i] += ay * DT;
        v[2 * n + i] += az * DT;
        p[i] += v[i] * DT;
        p[n + i] += v[n + i] * DT;
        p[2 * n + i] += v[2 * n + i] * DT;
    }
}

static void goal_distances(const World *w, float *restrict to) {
    int64_t n = w->worlds * w->drones;
    const float *restrict p = w->position;
    for (int64_t i = 0; i < n; i++) {
        float x = goal(w, i, 0) - p[i], y = goal(w, i, 1) - p[n + i], z = goal(w, i, 2) - p[2 * n + i];
        to[i] = sqrtf((x * x + y * y) + z * z);
    }
}

/* Step all worlds; returns the number of episodes that ended. `w->clock` is that after the step. */
int64_t drones_step(const World *w, const float *actions, const Result *result) {
    int64_t drones = w->drones, n = w->worlds * drones, finished = 0;
    float *before = w->scratch, *after = before + n, *distances = after + n, *starts = distances + n;
    int32_t *nearest = (int32_t *)(starts + 3 * n);
    const float *p = w->position, *v = w->velocity, *r = w->rates;
    goal_distances(w, before);
    integrate(w, actions);
    goal_distances(w, after);
    for (int64_t world = 0; world < w->worlds; world++) {
        int64_t base = world * drones;
        find_nearest(drones, p + base, p + n + base, p + 2 * n + base, distances + base, nearest + base);
        int any = 0;
        for (int64_t i = base; i < base + drones; i++) {
            float speed = sqrtf((v[i] * v[i] + v[n + i] * v[n + i]) + v[2 * n + i] * v[2 * n + i]);
            int64_t held_before = w->hold_steps[i], steps = ++w->steps[i];
            int64_t hold = after[i] < NEAR && speed < SLOW ? held_before + 1 : 0;
            int held = hold >= HOLD, success = held && (w->carrying[i] || !w->carries), picked = held && !success;
            int ground = p[2 * n + i] <= 0, colliding = distances[i] < TOUCH;
            int outside = fabsf(p[i]) > w->half_width || fabsf(p[n + i]) > w->half_width || p[2 * n + i] > CEILING;
            int crashed = ground || colliding || outside;
            success = success && !crashed;
            picked = picked && !crashed;
            int done = crashed || success || steps >= MAX_EPISODE_STEPS;
            double reward = (double)(0.1f * (before[i] - after[i])) + 0.2 / HOLD * (double)(hold - held_before);
            reward += (double)(-0.0004f * ((r[i] * r[i] + r[n + i] * r[n + i]) + r[2 * n + i] * r[2 * n + i]));
            reward += (1.0 * success + -1.0 * crashed) + 0.5 * picked;
            result->rewards[i] = (float)reward;
            result->dones[i] = (uint8_t)done;
            w->returns[i] += (float)reward;
            w->hold_steps[i] = picked ? 0 : hold;
            w->carrying[i] |= (uint8_t)picked;
            if (!done) continue;
            any = 1;
            result->returns[finished] = w->returns[i];
            result->lengths[finished] = steps;
            result->success[finished] = (uint8_t)success;
            result->collision[finished++] = (uint8_t)(ground || colliding);
        }
        if (any) {
            reset(w, world, result->dones, starts);
            find_nearest(drones, p + base, p + n + base, p + 2 * n + base, distances + base, nearest + base);
        }
    }
    observe(w, 0, n, distances, nearest, result->obs);
    return finished;
}
