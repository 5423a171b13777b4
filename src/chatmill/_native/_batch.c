/* Write the arrays of a batch in one pass over stored tokens and spans. */

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>
#include <stdint.h>
#include <string.h>

#include "_sha256.h"

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "stored numbers are little-endian; on big-endian machines, use the Python implementation"
#endif

enum { SPAN_BYTES = 15, WEIGHT_AT = 8, PART_AT = 13 };
enum { NUMBER, TOKENS, START, STOP, CUT, SPANS, FIRST_SPAN, LAST_SPAN, FIRST_BORDER, LAST_BORDER, COLUMNS };
enum { ROWS, FILLED, TRAINED, CUT_EPISODES, CUT_TOKENS, ANSWER_CUT, SEGMENTS, COUNTS };
enum { FITS = -1, OUTSIDE = -2 };
static const int64_t IGNORED = -100;
static const uint32_t ONE = 0x3F800000; /* 1.0 as bits */

/* The bytes that are hashed for one row, in the layout of docs/reference/files.md: numbers, one bit per label, and
   ids. The numbers are written when the row is complete; before that, `weights` collects the weights that the label
   bits do not imply. */
typedef struct {
    uint8_t *weights, *bits, *ids; /* NULL if the row is not hashed */
    int64_t num_weights;
} Message;

/* The state of the row being written. The weight of token i + 1 belongs to y[i]. */
typedef struct {
    int64_t *x, *y, *episodes;
    uint8_t *mask;
    float *weights;
    int32_t *positions, *segments;
    int64_t size;     /* length of x and y: one less than the number of tokens in a row */
    int64_t run;      /* the first token of the current run of tokens with the same weight */
    uint32_t weight;  /* the weight of the current run, as the bits of a float */
    int64_t segment;  /* the first token of the current segment */
    int64_t *counts;
    Message message;
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
    /* Use memcpy, because tokens in a cache may be unaligned. */
    if (width == 2)
        for (int64_t n = 0; n < count; n++) {
            uint16_t id;
            memcpy(&id, from + 2 * (at + n), 2);
            to[n] = id;
        }
    else
        for (int64_t n = 0; n < count; n++) to[n] = number_at(from + 4 * (at + n));
}

static inline void put_number(uint8_t *to, int64_t at, int64_t number) { memcpy(to + 8 * at, &number, 8); }

static void put_ids(uint8_t *restrict to, const uint8_t *from, int64_t count, int width) {
    if (width == 4)
        memcpy(to, from, 4 * count);
    else
        for (int64_t n = 0; n < count; n++) {
            uint16_t id;
            memcpy(&id, from + 2 * n, 2);
            uint32_t wide = id;
            memcpy(to + 4 * n, &wide, 4);
        }
}

/* Record the weight of positions [begin, stop) and, if `has_label`, set the label bit of each position. */
static void put_run(Message *message, int64_t begin, int64_t stop, uint32_t weight, int has_label) {
    for (int64_t n = begin; has_label && n < stop;)
        if (n % 8 || stop - n < 8)
            message->bits[n / 8] |= (uint8_t)(0x80 >> n % 8), n++;
        else
            memset(message->bits + n / 8, 0xFF, (stop - n) / 8), n += (stop - n) / 8 * 8;
    if (weight != (has_label ? ONE : 0))
        for (int64_t n = begin; n < stop; n++) {
            put_number(message->weights, message->num_weights++, n);
            put_number(message->weights, message->num_weights++, weight);
        }
}

/* Complete the message to hash, after all tokens of its row have been written. Return a pointer to the start of the
   message, and set `blocks` to the number of SHA-256 blocks. */
static uint8_t *end_message(const Row *row, int64_t step, int64_t place, int64_t *blocks) {
    const Message *message = &row->message;
    int64_t last = row->size - 1, labels = row->y[last] != IGNORED ? 2 : 0, episodes = 0, at = 6;
    for (int64_t n = 0; n < row->counts[SEGMENTS]; n++) episodes += row->episodes[n] >= 0;
    memmove(message->bits - 8 * message->num_weights, message->weights, 8 * message->num_weights);
    const int64_t counts[] = {row->size, episodes, labels, message->num_weights, step, place};
    uint8_t *begin = message->bits - 8 * (6 + episodes + labels + message->num_weights);
    memcpy(begin, counts, sizeof counts);
    for (int64_t n = 0; n < row->counts[SEGMENTS]; n++)
        if (row->episodes[n] >= 0) put_number(begin, at++, row->episodes[n]);
    /* Hash only the last label as a number, because every other label equals the next token of x. */
    if (labels) put_number(begin, at++, last), put_number(begin, at++, row->y[last]);
    *blocks = sha256_padded(begin, message->ids + 4 * row->size - begin);
    return begin;
}

/* End the run of equal weights before token `stop`; token n of the row is from[at + n]. */
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
        if (row->message.ids) put_run(&row->message, begin, begin + count, row->weight, weight > 0);
    }
    row->run = stop;
}

/* Write the position and the segment index of each token in the segment that ends before token `stop`. Skip the last
   token of a row, because x does not contain it. */
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
    if (in_x > count) in_x = count;
    widen(row->x + filled, tokens, episode[START], in_x, source->width);
    if (row->message.ids && in_x > 0)
        put_ids(row->message.ids + 4 * filled, tokens + source->width * episode[START], in_x, source->width);
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
            /* Count a truncated answer if the first kept span is trained on and earlier tokens of its answer were
               removed. */
            row->counts[ANSWER_CUT] += is_trained && (cut || (was_trained && !at_border));
            length -= cut, cut = 0, begins = 1;
        }
        if (length > stop - at) return 0;
        if (!source->use_loss_mask) weight = span[PART_AT] == source->pad_part ? 0 : ONE;
        if (begins) {
            if (row->counts[SEGMENTS] >= source->most_segments) return 0;
            if (at) end_segment(row, at, (int32_t)row->counts[SEGMENTS] - 1);
            row->episodes[row->counts[SEGMENTS]++] = episode[NUMBER];
            /* The first token of a segment is never a label, because it must not be predicted from the previous
               segment. */
            if (row->weight) end_run(row, at, tokens, from, source->width), row->weight = 0;
        }
        if (weight != row->weight) {
            end_run(row, at + begins, tokens, from, source->width);
            row->weight = weight;
        }
        row->counts[TRAINED] += as_float(weight) > 0 ? length - begins : 0;
        at += length, begins = 0;
    }
    /* End the run here, because the next episode may read from another token array. */
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
    uint32_t id = (uint32_t)pad;
    for (int64_t n = filled; row->message.ids && n < row->size; n++) memcpy(row->message.ids + 4 * n, &id, 4);
    row->counts[ROWS] = filled > 0, row->counts[FILLED] = filled;
}

/* Check that the ranges of an episode are within the bounds of its arrays. */
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

/* An empty buffer is never read, so it may have any address. */
static int is_aligned(const Py_buffer *buffer, Py_ssize_t width) {
    return !buffer->len || (uintptr_t)buffer->buf % width == 0;
}

/* Return the buffers of the items in a list. If an item does not support the buffer protocol, set an exception and
   return NULL. */
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

/* The memory for messages is kept for the next call, because the system clears the pages of new memory. Both functions
   need the GIL. */

#if defined(__SANITIZE_ADDRESS__)
enum { KEPT_MEMORY = 0 }; /* The sanitizer finds accesses after the end of memory only if each call allocates its own. */
#else
enum { KEPT_MEMORY = 1 << 22 };
#endif
static void *kept_memory;

/* Return at least `size` bytes of memory, or NULL if there is not enough. */
static void *take_memory(Py_ssize_t size) {
    Py_ssize_t *memory = size <= KEPT_MEMORY ? kept_memory : NULL;
    if (memory != NULL && *memory >= size) {
        kept_memory = NULL;
        return memory + 8;
    }
    memory = PyMem_Malloc(size + 8 * sizeof *memory);
    if (memory == NULL) return NULL;
    *memory = size;
    return memory + 8;
}

static void give_memory(void *taken) {
    if (taken == NULL) return;
    Py_ssize_t *memory = (Py_ssize_t *)taken - 8, *kept = kept_memory;
    if (*memory <= KEPT_MEMORY && (kept == NULL || *kept < *memory)) kept_memory = memory, memory = kept;
    PyMem_Free(memory);
}

PyDoc_STRVAR(rows_doc,
             "rows(x, y, loss_mask, weights, positions, segments, episode_ids, counts, tokens, spans, episodes, first,\n"
             "     borders, size, most_segments, width, pad, use_loss_mask, pad_part[, digests, steps, first_row])\n\n"
             "Write the rows of a batch. Row r contains episodes[first[r]:first[r + 1]]. Return -1, or the index of\n"
             "the first episode whose spans do not cover its tokens exactly.\n\n"
             "With `digests`, also write 16 bytes of the hash of each row. All `steps` have the same number of rows, and\n"
             "`first_row` is the index of the first row of each step in the global batch.");

static PyObject *rows(PyObject *module, PyObject *args) {
    (void)module;
    Py_buffer out[9], in[4];
    PyObject *token_list, *span_list;
    Py_ssize_t size, most, pad, first_row = 0;
    Source source;
    memset(&out[8], 0, sizeof out[8]), memset(&in[3], 0, sizeof in[3]);
    if (!PyArg_ParseTuple(args, "w*w*w*w*w*w*w*w*O!O!y*y*y*nninpi|w*y*n", &out[0], &out[1], &out[2], &out[3], &out[4],
                          &out[5], &out[6], &out[7], &PyList_Type, &token_list, &PyList_Type, &span_list, &in[0], &in[1],
                          &in[2], &size, &most, &source.width, &pad, &source.use_loss_mask, &source.pad_part, &out[8],
                          &in[3], &first_row))
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
               (source.width == 2 || source.width == 4) && (!num_rows || num_rows < PY_SSIZE_T_MAX / 32 / (size + most + 32));
    for (int n = 0; fits && n < 8; n++)
        fits = out[n].len == num_rows * columns[n] * widths[n] && is_aligned(&out[n], widths[n]);
    for (int n = 0; fits && n < 4; n++) fits = is_aligned(&in[n], 8);
    const int64_t *steps = in[3].buf;
    Py_ssize_t num_steps = in[3].len / 8, rows_a_step = num_steps ? num_rows / num_steps : 0;
    fits = fits && out[8].len == (num_steps ? 16 * num_rows : 0) && (!num_steps || num_rows == rows_a_step * num_steps);
    Py_ssize_t bits_at = 0, ids_at = 0, message_size = 0;
    uint8_t *messages = NULL;
    const uint8_t *begins[SHA256_AVX512];
    int64_t blocks[SHA256_AVX512];
    int way = sha256_way(), lanes = sha256_lanes(way);
    if (fits && rows_a_step) {
        /* Allocate a message for each row that is hashed at the same time. A message is large enough for the numbers,
           bits and ids of any row and for 72 bytes of padding. */
        bits_at = 8 * (8 + most + 2 * size), ids_at = bits_at + (size + 7) / 8, message_size = ids_at + 4 * size + 72;
        messages = take_memory((lanes < num_rows ? lanes : num_rows) * message_size);
        if (messages == NULL) PyErr_NoMemory(), fits = 0;
    }
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
                   (int64_t *)out[7].buf + r * COUNTS,
                   {NULL, NULL, NULL, 0}};
        int lane = (int)(r % lanes);
        uint8_t *message = messages == NULL ? NULL : messages + lane * message_size;
        if (message) {
            row.message = (Message){message, message + bits_at, message + ids_at, 0};
            memset(row.message.bits, 0, ids_at - bits_at);
        }
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
        if (result != FITS) break;
        end_row(&row, filled, source.pad);
        if (message == NULL) continue;
        int64_t place = (int64_t)((uint64_t)first_row + r % rows_a_step);
        begins[lane] = end_message(&row, steps[r / rows_a_step], place, &blocks[lane]);
        if (lane == lanes - 1 || r == num_rows - 1) {
            uint8_t hashes[SHA256_AVX512][32];
            sha256(begins, blocks, lane + 1, way, hashes);
            for (int n = 0; n <= lane; n++) memcpy((uint8_t *)out[8].buf + 16 * (r - lane + n), hashes[n], 16);
        }
    }
    Py_END_ALLOW_THREADS
    give_memory(messages);
    release(source.spans, source.num_spans), PyMem_Free(source.spans);
end:
    if (source.tokens != NULL) release(source.tokens, source.num_tokens), PyMem_Free(source.tokens);
    release(out, 9), release(in, 4);
    if (PyErr_Occurred()) return NULL;
    if (result != OUTSIDE) return PyLong_FromSsize_t(result);
    PyErr_SetString(PyExc_ValueError, "expected episodes within the bounds of their arrays, and rows large enough for them");
    return NULL;
}

static PyMethodDef methods[] = {
    {"rows", rows, METH_VARARGS, rows_doc},
    {NULL, NULL, 0, NULL},
};
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_batch", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__batch(void) { return PyModule_Create(&definition); }
