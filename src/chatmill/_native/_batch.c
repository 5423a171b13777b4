/* The arrays of batches, written once from stored tokens and spans. */

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>
#include <stdint.h>
#include <string.h>

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "stored numbers are little-endian; Python does the same on other machines"
#endif

enum { SPAN_BYTES = 15, WEIGHT_AT = 8, PART_AT = 13 };
enum { NUMBER, TOKENS, START, STOP, CUT, SPANS, FIRST_SPAN, LAST_SPAN, FIRST_BORDER, LAST_BORDER, COLUMNS };
enum { ROWS, FILLED, TRAINED, CUT_EPISODES, CUT_TOKENS, ANSWER_CUT, SEGMENTS, COUNTS };
enum { FITS = -1, OUTSIDE = -2 };
static const int64_t IGNORED = -100;

/* One row while it is written. The weight of token i + 1 belongs to y[i]. */
typedef struct {
    int64_t *x, *y, *episodes;
    uint8_t *mask;
    float *weights;
    int32_t *positions, *segments;
    int64_t size;     /* of x and y: one less than the tokens of a row */
    int64_t run;      /* the first token of the run of equal weight, and its weight as bits */
    uint32_t weight;
    int64_t segment;  /* the first token of the segment */
    int64_t *counts;
} Row;

typedef struct {
    Py_buffer *tokens, *spans;
    Py_ssize_t num_tokens, num_spans;
    const int64_t *borders;
    Py_ssize_t num_borders;
    int64_t pad, most_segments;
    int width, use_loss_mask, pad_part;
} Source;

static inline float as_float(uint32_t bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

static inline uint32_t number_at(const uint8_t *from) {
    uint32_t number;
    memcpy(&number, from, 4);
    return number;
}

static inline void widen(int64_t *restrict to, const uint8_t *from, int64_t at, int64_t count, int width) {
    /* Tokens of a cache may begin at any byte. */
    if (width == 2)
        for (int64_t n = 0; n < count; n++) {
            uint16_t id;
            memcpy(&id, from + 2 * (at + n), 2);
            to[n] = id;
        }
    else
        for (int64_t n = 0; n < count; n++) to[n] = number_at(from + 4 * (at + n));
}

/* End the run of equal weight before token `stop`, whose tokens are from[at:] as seen from token 0 of the row. */
static void end_run(Row *row, int64_t stop, const uint8_t *from, int64_t at, int width) {
    int64_t begin = row->run ? row->run - 1 : 0, count = stop - 1 - begin;
    float weight = as_float(row->weight);
    if (count > 0) {
        int64_t *restrict y = row->y + begin;
        float *restrict weights = row->weights + begin;
        if (weight > 0)
            widen(y, from, at + begin + 1, count, width);
        else
            for (int64_t n = 0; n < count; n++) y[n] = IGNORED;
        for (int64_t n = 0; n < count; n++) weights[n] = weight;
        memset(row->mask + begin, weight > 0, count);
    }
    row->run = stop;
}

/* Number the positions of the segment that ends before token `stop`; x lacks the last token of a row. */
static void end_segment(Row *row, int64_t stop, int32_t number) {
    int64_t begin = row->segment, count = (stop < row->size ? stop : row->size) - begin;
    if (count > 0) {
        int32_t *restrict positions = row->positions + begin, *restrict segments = row->segments + begin;
        for (int32_t n = 0; n < count; n++) positions[n] = n;
        for (int32_t n = 0; n < count; n++) segments[n] = number;
    }
    row->segment = stop;
}

/* Append an episode to a row that has `filled` tokens. */
static int append(Row *row, int64_t filled, const int64_t *episode, const Source *source) {
    int64_t count = episode[STOP] - episode[START], stop = filled + count, at = filled, cut = episode[CUT];
    const uint8_t *tokens = source->tokens[episode[TOKENS]].buf;
    const uint8_t *span = (const uint8_t *)source->spans[episode[SPANS]].buf + SPAN_BYTES * episode[FIRST_SPAN];
    int64_t from = episode[START] - filled, border = episode[FIRST_BORDER], in_x = row->size - filled;
    int begins = 1, at_border = 0, was_trained = 0;
    widen(row->x + filled, tokens, episode[START], count < in_x ? count : in_x, source->width);
    for (int64_t n = episode[FIRST_SPAN]; n < episode[LAST_SPAN]; n++, span += SPAN_BYTES) {
        for (; border < episode[LAST_BORDER] && source->borders[border] <= n; border++) begins = at_border = 1;
        int64_t length = number_at(span);
        uint32_t weight = number_at(span + WEIGHT_AT);
        int is_trained = as_float(weight) > 0;
        if (!length) continue;
        if (cut >= length) {
            cut -= length, was_trained = is_trained, at_border = 0;
            continue;
        }
        if (at == filled && episode[CUT]) {
            /* The first span that is kept: an answer is cut if it has tokens on both sides. */
            row->counts[ANSWER_CUT] += is_trained && (cut || (was_trained && !at_border));
            length -= cut, cut = 0, begins = 1;
        }
        if (length > stop - at) return 0;
        if (!source->use_loss_mask) weight = span[PART_AT] == source->pad_part ? 0 : 0x3F800000;
        if (begins) {
            if (row->counts[SEGMENTS] >= source->most_segments) return 0;
            if (at) end_segment(row, at, (int32_t)row->counts[SEGMENTS] - 1);
            row->episodes[row->counts[SEGMENTS]++] = episode[NUMBER];
            /* Nothing predicts the first token of a segment. */
            if (row->weight) end_run(row, at, tokens, from, source->width), row->weight = 0;
        }
        if (weight != row->weight) {
            end_run(row, at + begins, tokens, from, source->width);
            row->weight = weight;
        }
        row->counts[TRAINED] += as_float(weight) > 0 ? length - begins : 0;
        at += length, begins = 0;
    }
    /* The next episode has other tokens. */
    if (row->weight) end_run(row, at, tokens, from, source->width), row->weight = 0;
    row->counts[CUT_EPISODES] += episode[CUT] > 0;
    row->counts[CUT_TOKENS] += episode[CUT];
    return at == stop && !cut;
}

static void end_row(Row *row, int64_t filled, int64_t pad) {
    int64_t last = row->counts[SEGMENTS];
    if (filled) end_segment(row, filled, (int32_t)last - 1);
    end_segment(row, row->size, (int32_t)last);
    end_run(row, row->size + 1, NULL, 0, 4);
    for (int64_t n = filled; n < row->size; n++) row->x[n] = pad;
    row->counts[ROWS] = filled > 0, row->counts[FILLED] = filled;
}

/* Whether the entry of an episode lies within the arrays it names. */
static int is_inside(const int64_t *episode, const Source *source) {
    if (episode[TOKENS] < 0 || episode[TOKENS] >= source->num_tokens) return 0;
    if (episode[SPANS] < 0 || episode[SPANS] >= source->num_spans) return 0;
    int64_t tokens = source->tokens[episode[TOKENS]].len / source->width;
    int64_t spans = source->spans[episode[SPANS]].len / SPAN_BYTES;
    return 0 <= episode[START] && episode[START] <= episode[STOP] && episode[STOP] <= tokens && episode[CUT] >= 0 &&
           0 <= episode[FIRST_SPAN] && episode[FIRST_SPAN] <= episode[LAST_SPAN] && episode[LAST_SPAN] <= spans &&
           0 <= episode[FIRST_BORDER] && episode[FIRST_BORDER] <= episode[LAST_BORDER] &&
           episode[LAST_BORDER] <= source->num_borders;
}

/* The buffers of a list; NULL with an exception if one has none. */
static Py_buffer *all_buffers(PyObject *list, Py_ssize_t *count) {
    Py_ssize_t size = PyList_Size(list);
    Py_buffer *buffers = PyMem_Calloc(size ? size : 1, sizeof(Py_buffer));
    if (buffers == NULL) return (Py_buffer *)PyErr_NoMemory();
    for (*count = 0; *count < size; ++*count)
        if (PyObject_GetBuffer(PyList_GetItem(list, *count), &buffers[*count], PyBUF_SIMPLE)) {
            while (*count) PyBuffer_Release(&buffers[--*count]);
            PyMem_Free(buffers);
            return NULL;
        }
    return buffers;
}

static void release(Py_buffer *buffers, Py_ssize_t count) {
    for (Py_ssize_t n = 0; n < count; n++) PyBuffer_Release(&buffers[n]);
}

PyDoc_STRVAR(rows_doc,
             "rows(x, y, loss_mask, weights, positions, segments, episode_ids, counts, tokens, spans, episodes, first,\n"
             "     borders, size, most_segments, width, pad, use_loss_mask, pad_part)\n\n"
             "Write the rows of a batch. Row r holds episodes[first[r]:first[r + 1]]. Returns -1, or the number of the\n"
             "first episode whose spans do not tile its tokens.");

static PyObject *rows(PyObject *module, PyObject *args) {
    (void)module;
    Py_buffer out[8], in[3];
    PyObject *token_list, *span_list;
    Py_ssize_t size, most, pad;
    Source source;
    if (!PyArg_ParseTuple(args, "w*w*w*w*w*w*w*w*O!O!y*y*y*nninpi", &out[0], &out[1], &out[2], &out[3], &out[4], &out[5],
                          &out[6], &out[7], &PyList_Type, &token_list, &PyList_Type, &span_list, &in[0], &in[1], &in[2],
                          &size, &most, &source.width, &pad, &source.use_loss_mask, &source.pad_part))
        return NULL;
    const int64_t *episodes = in[0].buf, *first = in[1].buf;
    Py_ssize_t num_episodes = in[0].len / (8 * COLUMNS), num_rows = in[1].len / 8 - 1, result = OUTSIDE;
    source.borders = in[2].buf, source.num_borders = in[2].len / 8;
    source.pad = pad, source.most_segments = most;
    source.tokens = all_buffers(token_list, &source.num_tokens);
    source.spans = source.tokens == NULL ? NULL : all_buffers(span_list, &source.num_spans);
    if (source.spans == NULL) goto end;
    const Py_ssize_t widths[] = {8, 8, 1, 4, 4, 4, 8, 8}, columns[] = {size, size, size, size, size, size, most, COUNTS};
    int fits = num_rows >= 0 && 0 < size && size < INT32_MAX && 0 <= most && most < INT32_MAX &&
               (source.width == 2 || source.width == 4) && (!num_rows || num_rows < PY_SSIZE_T_MAX / 8 / (size + most));
    for (int n = 0; fits && n < 8; n++)
        fits = out[n].len == num_rows * columns[n] * widths[n] && (uintptr_t)out[n].buf % widths[n] == 0;
    for (int n = 0; fits && n < 3; n++) fits = (uintptr_t)in[n].buf % 8 == 0;
    Py_BEGIN_ALLOW_THREADS
    if (fits) result = FITS;
    for (Py_ssize_t r = 0; result == FITS && r < num_rows; r++) {
        Row row = {(int64_t *)out[0].buf + r * size,
                   (int64_t *)out[1].buf + r * size,
                   (int64_t *)out[6].buf + r * most,
                   (uint8_t *)out[2].buf + r * size,
                   (float *)out[3].buf + r * size,
                   (int32_t *)out[4].buf + r * size,
                   (int32_t *)out[5].buf + r * size,
                   size,
                   0,
                   0,
                   0,
                   (int64_t *)out[7].buf + r * COUNTS};
        int64_t filled = 0;
        memset(row.counts, 0, 8 * COUNTS);
        for (Py_ssize_t n = 0; n < most; n++) row.episodes[n] = -1;
        if (first[r] < 0 || first[r] > first[r + 1] || first[r + 1] > num_episodes) result = OUTSIDE;
        for (int64_t n = first[r]; result == FITS && n < first[r + 1]; n++) {
            const int64_t *episode = episodes + n * COLUMNS;
            if (!is_inside(episode, &source) || episode[STOP] - episode[START] > size + 1 - filled)
                result = OUTSIDE;
            else if (!append(&row, filled, episode, &source))
                result = n;
            else
                filled += episode[STOP] - episode[START];
        }
        if (result == FITS) end_row(&row, filled, source.pad);
    }
    Py_END_ALLOW_THREADS
    release(source.spans, source.num_spans), PyMem_Free(source.spans);
end:
    if (source.tokens != NULL) release(source.tokens, source.num_tokens), PyMem_Free(source.tokens);
    release(out, 8), release(in, 3);
    if (PyErr_Occurred()) return NULL;
    if (result != OUTSIDE) return PyLong_FromSsize_t(result);
    PyErr_SetString(PyExc_ValueError, "expected episodes within their tokens and spans, and rows that hold them");
    return NULL;
}

static PyMethodDef methods[] = {
    {"rows", rows, METH_VARARGS, rows_doc},
    {NULL, NULL, 0, NULL},
};
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_batch", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__batch(void) { return PyModule_Create(&definition); }
