/* Loops of a decoder layer over rows of fp32 values, compiled once for each kind of vector registers.

   Every row is computed alone, and its sums are added in an order that depends on the lengths of rows alone: a
   row's bits depend neither on how many rows there are nor on where they are. They do depend on the length of the
   vectors, so the ranks of an engine must have processors of one kind. */
#ifndef ROOST_EMBEDDED_KERNELS_H
#define ROOST_EMBEDDED_KERNELS_H

#include <stdbool.h>
#include <stdint.h>

#define PAGE 16 /* tokens of a KV page */

/* Rows in memory: row r begins at data + r * stride. */
typedef struct {
    float *data;
    int64_t stride;
} Rows;

/* out [rows, outputs] = in [rows, inputs] times a matrix: `matrix` row o has the inputs of output o, or, if
   `by_input`, row i has the outputs of input i. bias [outputs]: NULL for none. */
typedef struct {
    Rows in, matrix, out;
    const float *bias;
    int64_t rows, inputs, outputs;
    bool by_input;
} Product;

/* Attention of `rows` tokens, each with queries, keys and values [(heads + 2 kv_heads) * size]. Queries and keys are
   normalised and rotated in place, and keys and values are copied into their pages, before any row attends. */
typedef struct {
    Rows qkv;
    float *kv;  /* KV rows of a layer, each [PAGE, size] */
    float *out; /* [rows, heads * size] */
    const float *norm; /* [heads + kv_heads, size] */
    const float *cos, *sin; /* [positions, size]; the first half of the sine negated */
    const int64_t *positions; /* of the rows */
    const int64_t *first_page; /* of each row's sequence, in page_rows */
    const int64_t *page_rows; /* [pages of all sequences, 2 kv_heads]: KV rows, keys before values */
    int64_t rows, heads, kv_heads, size;
    int64_t longest; /* positions of the longest sequence */
    float epsilon;
} Heads;

typedef struct {
    bool (*serves)(void); /* whether this processor has the registers */
    const char *name;
    void (*product)(const Product *it);
    void (*norm)(const float *in, const float *weight, float *out, int64_t rows, int64_t width, float epsilon);
    /* in [rows, 2 width], gates before the values that they scale; out [rows, width] */
    void (*gated)(const float *in, float *out, int64_t rows, int64_t width);
    /* The k highest of softmax(logits), the highest first, of equal ones the first; scratch: [experts], and a vector. */
    void (*route)(const float *logits, int64_t *chosen, float *weights, int64_t rows, int64_t experts, int64_t k,
                  bool normalise, float *scratch);
    /* out [rows, width]: sums of weights [rows, k] times in[row_of_pair [rows, k]] */
    void (*weighted)(const float *in, const int64_t *row_of_pair, const float *weights, float *out, int64_t rows,
                     int64_t k, int64_t width);
    /* Floats of scratch that `attend` needs. */
    int64_t (*attend_scratch)(const Heads *it);
    void (*attend)(const Heads *it, float *scratch);
} Loops;

extern const Loops loops_avx512, loops_avx2, loops_any;

#endif
