/* The loops, for vectors of LANES values (4, 8 or 16). Included once for each. Nothing is left to the compiler's own
   vectorizing: it may treat the first rows of a loop, or its last ones, by other instructions. */
#include "kernels.h"

#include <math.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")
#define MOST_ROWS 64 /* rows that pass over a tile of a matrix before the next tile */
#define TILE_ROWS 4
#define SHARED_ROWS 8 /* tokens of a sequence that share a page's transposed keys */
#define TILE_HEADS (LANES == 16 ? 4 : LANES == 8 ? 2 : 1)

typedef float V __attribute__((vector_size(4 * LANES)));
typedef int32_t I __attribute__((vector_size(4 * LANES)));
typedef float Unaligned __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

/* Of two vectors, blocks of `width` lanes by turns: the even blocks of both, the odd blocks of both. */
#if LANES == 16
#define EVEN8 (I){0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23}
#define ODD8 (I){8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31}
#define EVEN4 (I){0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27}
#define ODD4 (I){4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31}
#define EVEN2 (I){0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29}
#define ODD2 (I){2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31}
#define EVEN1 (I){0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30}
#define ODD1 (I){1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31}
#elif LANES == 8
#define EVEN4 (I){0, 1, 2, 3, 8, 9, 10, 11}
#define ODD4 (I){4, 5, 6, 7, 12, 13, 14, 15}
#define EVEN2 (I){0, 1, 8, 9, 4, 5, 12, 13}
#define ODD2 (I){2, 3, 10, 11, 6, 7, 14, 15}
#define EVEN1 (I){0, 8, 2, 10, 4, 12, 6, 14}
#define ODD1 (I){1, 9, 3, 11, 5, 13, 7, 15}
#else
#define EVEN2 (I){0, 1, 4, 5}
#define ODD2 (I){2, 3, 6, 7}
#define EVEN1 (I){0, 4, 2, 6}
#define ODD1 (I){1, 5, 3, 7}
#endif

INLINE V load(const float *from) { return *(const Unaligned *)from; }
INLINE void store(float *into, V values) { *(Unaligned *)into = values; }
INLINE V spread(float value) { return value - (V){0}; }

/* The first `count` values; zeros after them. */
INLINE V load_some(const float *from, int64_t count) {
    if (count >= LANES) return load(from);
    V found = {0};
    memcpy(&found, from, (size_t)count * sizeof(float));
    return found;
}

INLINE void store_some(float *into, V values, int64_t count) {
    if (count >= LANES)
        store(into, values);
    else
        memcpy(into, &values, (size_t)count * sizeof(float));
}

#define HALVE(width)                                                                                                   \
    UNROLL for (int at = 0; at < width; at++) it[at] = __builtin_shuffle(it[at], it[at + width], EVEN##width) +        \
                                                       __builtin_shuffle(it[at], it[at + width], ODD##width);

/* The sum of each of LANES vectors. */
INLINE V sums(V *it) {
#if LANES == 16
    HALVE(8)
#endif
#if LANES >= 8
    HALVE(4)
#endif
    HALVE(2)
    HALVE(1)
    return it[0];
}

/* All pairs of vectors that are `width` apart exchange blocks. */
#define EXCHANGE(width)                                                                                                \
    UNROLL for (int at = 0; at < LANES; at++) if (!(at & width)) {                                                     \
        V even = __builtin_shuffle(it[at], it[at + width], EVEN##width);                                               \
        it[at + width] = __builtin_shuffle(it[at], it[at + width], ODD##width);                                        \
        it[at] = even;                                                                                                 \
    }

INLINE void transpose(V *it) {
#if LANES == 16
    EXCHANGE(8)
#endif
#if LANES >= 8
    EXCHANGE(4)
#endif
    EXCHANGE(2)
    EXCHANGE(1)
}

INLINE float sum(V values) {
    float total = values[0];
    for (int at = 1; at < LANES; at++) total += values[at];
    return total;
}

INLINE V greater(V one, V other) {
    I first = one > other;
    return (V)(((I)one & first) | ((I)other & ~first));
}

/* e to the power of each value; 0 below -87, where numbers end. Cephes' polynomial: an error of 2 in the last place. */
INLINE V exponential(V x) {
    const V least = spread(-87.0f), shift = spread(12582912.0f); /* 1.5 * 2^23: adding it rounds to integers */
    I normal = x >= least;
    x = -greater(-greater(x, least), spread(-88.0f));
    V rounded = x * 1.44269504088896341f + shift, whole = rounded - shift;
    V rest = x - whole * 0.693359375f;
    rest = rest - whole * -2.12194440e-4f;
    V found = spread(1.9875691500e-4f);
    found = found * rest + 1.3981999507e-3f;
    found = found * rest + 8.3334519073e-3f;
    found = found * rest + 4.1665795894e-2f;
    found = found * rest + 1.6666665459e-1f;
    found = found * rest + 5.0000001201e-1f;
    found = found * (rest * rest) + rest + 1.0f;
    I power = ((I)rounded - (I)shift + 127) << 23;
    return (V)((I)(found * (V)power) & normal);
}

/* Products of `tall` rows with `wide` outputs of `inputs` values each, summed over lanes: one vector each. */
INLINE void dots(const int tall, const int wide, const float *const *rows, const float *const *matrix, int64_t inputs,
                 V *found) {
    V partial[LANES] = {0};
    int64_t at = 0;
    for (; at + LANES <= inputs; at += LANES) {
        UNROLL for (int o = 0; o < wide; o++) {
            V factor = load(matrix[o] + at);
            UNROLL for (int r = 0; r < tall; r++) partial[r * wide + o] += load(rows[r] + at) * factor;
        }
    }
    if (at < inputs) {
        UNROLL for (int o = 0; o < wide; o++) {
            V factor = load_some(matrix[o] + at, inputs - at);
            UNROLL for (int r = 0; r < tall; r++) partial[r * wide + o] += load_some(rows[r] + at, inputs - at) * factor;
        }
    }
    UNROLL for (int one = 0; one < tall * wide; one++) found[one] = partial[one];
}

/* LANES / tall outputs of `tall` rows. Rows and outputs beyond the last repeat it. */
INLINE void dot_tile(const int tall, const Product *it, int64_t row, int64_t output) {
    const int wide = LANES / tall, step = wide < 4 ? wide : 4;
    const float *rows[TILE_ROWS], *matrix[LANES];
    int64_t last_row = it->rows - 1, last = it->outputs - 1;
    UNROLL for (int r = 0; r < tall; r++)
        rows[r] = it->in.data + (row + r < last_row ? row + r : last_row) * it->in.stride;
    UNROLL for (int o = 0; o < wide; o++)
        matrix[o] = it->matrix.data + (output + o < last ? output + o : last) * it->matrix.stride;
    V parts[LANES];
    UNROLL for (int o = 0; o < wide; o += step) {
        V some[LANES];
        dots(tall, step, rows, matrix + o, it->inputs, some);
        UNROLL for (int r = 0; r < tall; r++)
            UNROLL for (int s = 0; s < step; s++) parts[r * wide + o + s] = some[r * step + s];
    }
    V found = sums(parts);
    int64_t count = it->outputs - output < wide ? it->outputs - output : wide;
    UNROLL for (int r = 0; r < tall; r++) {
        if (row + r > last_row) break;
        float *out = it->out.data + (row + r) * it->out.stride + output;
        for (int64_t o = 0; o < count; o++) out[o] = found[r * wide + o] + (it->bias ? it->bias[output + o] : 0.0f);
    }
}

/* `wide` vectors of outputs of `tall` rows, of a matrix by input; the last vector may be short. */
INLINE void sum_tile(const int tall, const int wide, const Product *it, int64_t row, int64_t output, int64_t count) {
    const float *rows[TILE_ROWS], *matrix = it->matrix.data + output;
    int64_t last_row = it->rows - 1;
    UNROLL for (int r = 0; r < tall; r++)
        rows[r] = it->in.data + (row + r < last_row ? row + r : last_row) * it->in.stride;
    V total[TILE_ROWS * 4] = {0};
    for (int64_t at = 0; at < it->inputs; at++, matrix += it->matrix.stride)
        UNROLL for (int o = 0; o < wide; o++) {
            V factors = load_some(matrix + o * LANES, count);
            UNROLL for (int r = 0; r < tall; r++) total[r * wide + o] += rows[r][at] * factors;
        }
    UNROLL for (int r = 0; r < tall; r++) {
        if (row + r > last_row) break;
        float *out = it->out.data + (row + r) * it->out.stride + output;
        UNROLL for (int o = 0; o < wide; o++) {
            V found = total[r * wide + o];
            if (it->bias) found += load_some(it->bias + output + o * LANES, count);
            store_some(out + o * LANES, found, count);
        }
    }
}

INLINE void sum_tiles(const int tall, const Product *it, int64_t row, int64_t output) {
    const int wide = LANES == 16 ? 4 : 2;
    if (it->outputs - output >= wide * LANES)
        sum_tile(tall, wide, it, row, output, LANES);
    else
        for (; output < it->outputs; output += LANES) sum_tile(tall, 1, it, row, output, it->outputs - output);
}

/* Rows from `row` to `end`, at most `tall` of them at a time. */
INLINE void product_of(const int tall, const Product *it, int64_t row, int64_t end) {
    const int wide = it->by_input ? LANES * (LANES == 16 ? 4 : 2) : LANES / tall;
    for (int64_t output = 0; output < it->outputs; output += wide)
        for (int64_t at = row; at < end; at += tall) {
            if (it->by_input)
                sum_tiles(tall, it, at, output);
            else
                dot_tile(tall, it, at, output);
        }
}

static void product(const Product *it) {
    int64_t whole = it->rows - it->rows % TILE_ROWS, left = it->rows - whole;
    for (int64_t row = 0; row < whole; row += MOST_ROWS)
        product_of(TILE_ROWS, it, row, row + MOST_ROWS < whole ? row + MOST_ROWS : whole);
    if (left == 1) product_of(1, it, whole, it->rows);
    if (left == 2) product_of(2, it, whole, it->rows);
    if (left == 3) product_of(TILE_ROWS, it, whole, it->rows);
}

/* out = in, scaled to a mean square of 1, times weight. in and out: of `width` values, or longer. */
INLINE void norm_row(const float *in, const float *weight, float *out, int64_t width, float epsilon) {
    V squares = {0};
    for (int64_t at = 0; at < width; at += LANES) {
        V one = load_some(in + at, width - at);
        squares += one * one;
    }
    float scale = 1.0f / sqrtf(sum(squares) / (float)width + epsilon);
    for (int64_t at = 0; at < width; at += LANES) {
        V scaled = load_some(in + at, width - at) * scale;
        store_some(out + at, scaled * load_some(weight + at, width - at), width - at);
    }
}

static void norm(const float *in, const float *weight, float *out, int64_t rows, int64_t width, float epsilon) {
    for (int64_t row = 0; row < rows; row++) norm_row(in + row * width, weight, out + row * width, width, epsilon);
}

static void gated(const float *in, float *out, int64_t rows, int64_t width) {
    for (int64_t row = 0; row < rows; row++)
        for (int64_t at = 0; at < width; at += LANES) {
            const float *gates = in + row * 2 * width + at;
            V gate = load_some(gates, width - at), up = load_some(gates + width, width - at);
            store_some(out + row * width + at, gate / (1.0f + exponential(-gate)) * up, width - at);
        }
}

/* Replace scores by e^(score - highest), and return their sum. They are followed by memory up to a whole vector, which
   is overwritten. */
INLINE float exponentials(float *scores, int64_t count) {
    for (int64_t at = count; at % LANES; at++) scores[at] = -INFINITY;
    V highest = load(scores), total = {0};
    for (int64_t at = LANES; at < count; at += LANES) highest = greater(highest, load(scores + at));
    float most = highest[0];
    for (int at = 1; at < LANES; at++) most = highest[at] > most ? highest[at] : most;
    for (int64_t at = 0; at < count; at += LANES) {
        V found = exponential(load(scores + at) - most);
        store(scores + at, found);
        total += found;
    }
    return sum(total);
}

static void route(const float *logits, int64_t *chosen, float *weights, int64_t rows, int64_t experts, int64_t k,
                  bool normalise, float *scratch) {
    for (int64_t row = 0; row < rows; row++, logits += experts, chosen += k, weights += k) {
        memcpy(scratch, logits, (size_t)experts * sizeof(float));
        float total = exponentials(scratch, experts), taken = 0.0f;
        for (int64_t nth = 0; nth < k; nth++) {
            int64_t best = 0;
            for (int64_t at = 1; at < experts; at++) best = scratch[at] > scratch[best] ? at : best;
            chosen[nth] = best;
            weights[nth] = scratch[best] / total;
            taken += weights[nth];
            scratch[best] = -1.0f;
        }
        for (int64_t nth = 0; normalise && nth < k; nth++) weights[nth] /= taken;
    }
}

/* Products and sums are rounded apart, so the result has the same bits as torch's. */
__attribute__((optimize("fp-contract=off"))) static void weighted(const float *in, const int64_t *row_of_pair,
                                                                  const float *weights, float *out, int64_t rows,
                                                                  int64_t k, int64_t width) {
    for (int64_t row = 0; row < rows; row++, row_of_pair += k, weights += k, out += width)
        for (int64_t at = 0; at < width; at += LANES) {
            V total = load_some(in + row_of_pair[0] * width + at, width - at) * weights[0];
            for (int64_t nth = 1; nth < k; nth++)
                total += load_some(in + row_of_pair[nth] * width + at, width - at) * weights[nth];
            store_some(out + at, total, width - at);
        }
}

INLINE int64_t whole_vectors(int64_t count) { return (count + LANES - 1) / LANES * LANES; }

/* scratch: two heads, each up to whole vectors */
INLINE void rotate_head(float *head, const float *weight, const float *cos, const float *sin, int64_t size,
                        float epsilon, float *scratch) {
    float *rolled = scratch + whole_vectors(size);
    int64_t half = size / 2;
    norm_row(head, weight, scratch, size, epsilon);
    memcpy(rolled, scratch + half, (size_t)half * sizeof(float));
    memcpy(rolled + half, scratch, (size_t)half * sizeof(float));
    for (int64_t at = 0; at < size; at += LANES) {
        V own = load_some(scratch + at, size - at) * load_some(cos + at, size - at);
        store_some(head + at, load_some(rolled + at, size - at) * load_some(sin + at, size - at) + own, size - at);
    }
}

INLINE void rotate(const Heads *it, float *scratch) {
    int64_t size = it->size, rotated = it->heads + it->kv_heads;
    size_t bytes = (size_t)size * sizeof(float);
    for (int64_t row = 0; row < it->rows; row++) {
        float *qkv = it->qkv.data + row * it->qkv.stride;
        int64_t position = it->positions[row];
        for (int64_t head = 0; head < rotated; head++)
            rotate_head(qkv + head * size, it->norm + head * size, it->cos + position * size,
                        it->sin + position * size, size, it->epsilon, scratch);
        const int64_t *page = it->page_rows + (it->first_page[row] + position / PAGE) * 2 * it->kv_heads;
        for (int64_t head = 0; head < 2 * it->kv_heads; head++)
            memcpy(it->kv + (page[head] * PAGE + position % PAGE) * size, qkv + (it->heads + head) * size, bytes);
    }
}

/* into [size up to whole vectors, PAGE] = keys [PAGE, size], transposed */
INLINE void transpose_page(const float *keys, float *into, int64_t size) {
    for (int64_t token = 0; token < PAGE; token += LANES)
        for (int64_t at = 0; at < size; at += LANES) {
            V block[LANES];
            UNROLL for (int row = 0; row < LANES; row++)
                block[row] = load_some(keys + (token + row) * size + at, size - at);
            transpose(block);
            UNROLL for (int row = 0; row < LANES; row++) store(into + (at + row) * PAGE + token, block[row]);
        }
}

/* Scores of `count` heads for the tokens of a page: queries [count, size] times transposed keys. Head h's begin at
   out + h * apart. Even and odd dimensions are summed apart, so that additions need not wait for each other. */
INLINE void score(const int count, const float *queries, const float *keys, int64_t size, float scale, float *out,
                  int64_t apart) {
    const int vectors = PAGE / LANES;
    V even[TILE_HEADS * PAGE / LANES] = {0}, odd[TILE_HEADS * PAGE / LANES] = {0};
    int64_t at = 0;
    for (; at + 1 < size; at += 2)
        UNROLL for (int v = 0; v < vectors; v++) {
            V first = load(keys + at * PAGE + v * LANES), second = load(keys + (at + 1) * PAGE + v * LANES);
            UNROLL for (int h = 0; h < count; h++) {
                even[h * vectors + v] += queries[h * size + at] * first;
                odd[h * vectors + v] += queries[h * size + at + 1] * second;
            }
        }
    UNROLL for (int h = 0; h < count; h++)
        UNROLL for (int v = 0; v < vectors; v++)
            store(out + h * apart + v * LANES, (even[h * vectors + v] + odd[h * vectors + v]) * scale);
}

/* Values of a head's pages from dimension `at`, weighted: `wide` vectors (the last of `left` values) of `count` heads,
   whose weights begin at weights + h * apart, and whose results at out + h * size. */
INLINE void mix_values(const int count, const int wide, const Heads *it, const int64_t *pages, int64_t tokens,
                       const float *weights, int64_t apart, const float *scale, float *out, int64_t at, int64_t left) {
    V total[TILE_HEADS * 2] = {0};
    for (int64_t token = 0; token < tokens; token++) {
        const float *values = it->kv + (pages[token / PAGE * 2 * it->kv_heads] * PAGE + token % PAGE) * it->size + at;
        UNROLL for (int v = 0; v < wide; v++) {
            V some = load_some(values + v * LANES, left);
            UNROLL for (int h = 0; h < count; h++) total[h * wide + v] += weights[h * apart + token] * some;
        }
    }
    UNROLL for (int h = 0; h < count; h++)
        UNROLL for (int v = 0; v < wide; v++)
            store_some(out + h * it->size + at + v * LANES, total[h * wide + v] * scale[h], left);
}

INLINE void mix_heads(const int count, const Heads *it, const int64_t *pages, int64_t tokens, float *scores,
                      int64_t apart, float *out) {
    float scale[TILE_HEADS];
    for (int h = 0; h < count; h++) scale[h] = 1.0f / exponentials(scores + h * apart, tokens);
    int64_t at = 0;
    for (; at + 2 * LANES <= it->size; at += 2 * LANES)
        mix_values(count, 2, it, pages, tokens, scores, apart, scale, out, at, LANES);
    for (; at < it->size; at += LANES)
        mix_values(count, 1, it, pages, tokens, scores, apart, scale, out, at, it->size - at);
}

/* Tokens `row` to `end` of one sequence, with one KV head. */
static void mix_sequence(const Heads *it, int64_t row, int64_t end, int64_t kv_head, float *keys, float *scores) {
    int64_t share = it->heads / it->kv_heads, first_head = kv_head * share, size = it->size;
    const int64_t *pages = it->page_rows + it->first_page[row] * 2 * it->kv_heads + kv_head;
    int64_t most = 0;
    for (int64_t at = row; at < end; at++) most = it->positions[at] > most ? it->positions[at] : most;
    int64_t apart = (most / PAGE + 1) * PAGE;
    float scale = 1.0f / sqrtf((float)size);
    for (int64_t page = 0; page * PAGE <= most; page++) {
        transpose_page(it->kv + pages[page * 2 * it->kv_heads] * PAGE * size, keys, size);
        for (int64_t at = row; at < end; at++) {
            if (page * PAGE > it->positions[at]) continue;
            const float *queries = it->qkv.data + at * it->qkv.stride + first_head * size;
            float *into = scores + (at - row) * share * apart + page * PAGE;
            int64_t head = 0;
            for (; head + TILE_HEADS <= share; head += TILE_HEADS)
                score(TILE_HEADS, queries + head * size, keys, size, scale, into + head * apart, apart);
            for (; head < share; head++) score(1, queries + head * size, keys, size, scale, into + head * apart, apart);
        }
    }
    for (int64_t at = row; at < end; at++) {
        float *from = scores + (at - row) * share * apart, *out = it->out + (at * it->heads + first_head) * size;
        int64_t head = 0, tokens = it->positions[at] + 1;
        for (; head + TILE_HEADS <= share; head += TILE_HEADS)
            mix_heads(TILE_HEADS, it, pages + it->kv_heads, tokens, from + head * apart, apart, out + head * size);
        for (; head < share; head++)
            mix_heads(1, it, pages + it->kv_heads, tokens, from + head * apart, apart, out + head * size);
    }
}

static int64_t attend_scratch(const Heads *it) {
    int64_t scores = SHARED_ROWS * it->heads / it->kv_heads * ((it->longest + PAGE - 1) / PAGE * PAGE);
    return whole_vectors(it->size) * PAGE + scores;
}

static void attend(const Heads *it, float *scratch) {
    rotate(it, scratch);
    float *scores = scratch + whole_vectors(it->size) * PAGE;
    for (int64_t row = 0, end; row < it->rows; row = end) {
        for (end = row + 1; end < it->rows && end < row + SHARED_ROWS; end++)
            if (it->first_page[end] != it->first_page[row]) break;
        for (int64_t head = 0; head < it->kv_heads; head++) mix_sequence(it, row, end, head, scratch, scores);
    }
}

#ifdef PROCESSOR
static bool serves(void) { return __builtin_cpu_supports(PROCESSOR); }
#else
static bool serves(void) { return true; }
#endif

const Loops LOOPS = {serves, NAME, product, norm, gated, route, weighted, attend_scratch, attend};
