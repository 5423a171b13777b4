/* Find positions: of byte offsets among the tokens of encoded texts, of pairs of bytes, and of ids in a range. */

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "_vector.h"

enum { START, STOP, SIZE, OFFSET, COLUMNS };

/* Read an integer from a buffer that may be unaligned. */
static inline int64_t number_at(const Py_buffer *buffer, int64_t n) {
    int64_t number;
    memcpy(&number, (const uint8_t *)buffer->buf + 8 * n, 8);
    return number;
}

typedef struct {
    const uint8_t *ids, *sizes;
    int64_t num_ids, vocab_size;
} Tokens;

/* Return the size of a token in bytes, or -1 if the size is not known. */
static inline int64_t size_of(const Tokens *tokens, int64_t at) {
    uint32_t id;
    int32_t size;
    memcpy(&id, tokens->ids + 4 * at, 4);
    if (id >= tokens->vocab_size) return -1;
    memcpy(&size, tokens->sizes + 4 * (size_t)id, 4);
    return size;
}

PyDoc_STRVAR(positions_doc,
             "positions(ids, byte_lengths, start, stop, size, offset, position, inside, exact)\n\n"
             "Compute `token_positions` for the uint32 array `ids`; `byte_lengths` contains the int32 size of every token\n"
             "in the vocabulary. Write the int64 array `position` and the arrays `inside` and `exact` of one byte each.\n"
             "Return false if the size of a token is not known.");

static PyObject *positions(PyObject *module, PyObject *args) {
    (void)module;
    Py_buffer ids, sizes, in[COLUMNS], out[3];
    if (!PyArg_ParseTuple(args, "y*y*y*y*y*y*w*w*w*", &ids, &sizes, &in[START], &in[STOP], &in[SIZE], &in[OFFSET], &out[0],
                          &out[1], &out[2]))
        return NULL;
    Py_ssize_t count = in[START].len / 8;
    const Tokens tokens = {ids.buf, sizes.buf, ids.len / 4, sizes.len / 4};
    int fits = out[0].len == 8 * count && out[1].len == count && out[2].len == count, known = 1;
    for (int n = 0; n < COLUMNS; n++) fits = fits && in[n].len == 8 * count;
    Py_BEGIN_ALLOW_THREADS
    for (Py_ssize_t n = 0; fits && known && n < count; n++) {
        int64_t start = number_at(&in[START], n), stop = number_at(&in[STOP], n), total = 0, begin = 0, added, target;
        if (start < 0 || start > stop || stop > tokens.num_ids) {
            fits = 0;
            break;
        }
        /* Without a branch for each token, the processor loads several sizes at the same time. */
        for (int64_t at = start, size; at < stop; at++) {
            size = size_of(&tokens, at);
            total += size, known &= size >= 0;
        }
        if (!known) break;
        if (__builtin_sub_overflow(total, number_at(&in[SIZE], n), &added) ||
            __builtin_add_overflow(number_at(&in[OFFSET], n), added, &target)) {
            fits = 0;
            break;
        }
        int64_t position = start;
        while (begin < target && position < stop) begin += size_of(&tokens, position++);
        memcpy((uint8_t *)out[0].buf + 8 * n, &position, 8);
        ((uint8_t *)out[1].buf)[n] = begin != target;
        ((uint8_t *)out[2].buf)[n] = added == 0 || added == 1;
    }
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&ids), PyBuffer_Release(&sizes);
    for (int n = 0; n < COLUMNS; n++) PyBuffer_Release(&in[n]);
    for (int n = 0; n < 3; n++) PyBuffer_Release(&out[n]);
    if (fits) return PyBool_FromLong(known);
    PyErr_SetString(PyExc_ValueError, "expected texts within the ids, and arrays of equal length");
    return NULL;
}

/* Positions found so far. */
typedef struct {
    int64_t *data;
    size_t count, room;
} Found;

static int add(Found *found, int64_t position) {
    if (found->count == found->room) {
        size_t room = found->room ? 2 * found->room : 1024;
        int64_t *data = realloc(found->data, room * sizeof *data);
        if (!data) return 0;
        found->data = data, found->room = room;
    }
    found->data[found->count++] = position;
    return 1;
}

/* Return the positions as bytes, or raise MemoryError unless `complete`; free the positions. */
static PyObject *answer(Found *found, int complete) {
    const char *data = found->data ? (char *)found->data : "";
    PyObject *bytes = complete ? PyBytes_FromStringAndSize(data, found->count * sizeof *found->data) : PyErr_NoMemory();
    free(found->data);
    return bytes;
}

PyDoc_STRVAR(byte_pairs_doc,
             "byte_pairs(data, first: int, is_second) -> bytes\n\n"
             "Return the positions, as int64, of the bytes `first` that are followed by a byte b with a nonzero\n"
             "is_second[b], or by the end of the data. `is_second` has 256 bytes.");

static PyObject *byte_pairs(PyObject *module, PyObject *args) {
    (void)module;
    Py_buffer data, is_second;
    unsigned char first;
    if (!PyArg_ParseTuple(args, "y*by*", &data, &first, &is_second)) return NULL;
    const uint8_t *begin = data.buf, *end = begin + data.len, *seconds = is_second.buf;
    Found found = {NULL, 0, 0};
    int fits = is_second.len == 256, complete = 1;
    Py_BEGIN_ALLOW_THREADS
    for (const uint8_t *at = begin; fits && complete && at < end; at++) {
        if (!(at = memchr(at, first, end - at))) break;
        if (at + 1 == end || seconds[at[1]]) complete = add(&found, at - begin);
    }
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&data), PyBuffer_Release(&is_second);
    if (fits) return answer(&found, complete);
    PyErr_SetString(PyExc_ValueError, "expected 256 bytes that select the second byte");
    return NULL;
}

PyDoc_STRVAR(ids_in_range_doc,
             "ids_in_range(ids, first: int, last: int) -> bytes\n\n"
             "Return the positions, as int64, of the ids in a uint32 array with first <= id <= last.");

static PyObject *ids_in_range(PyObject *module, PyObject *args) {
    (void)module;
    Py_buffer ids;
    unsigned int first, last;
    if (!PyArg_ParseTuple(args, "y*II", &ids, &first, &last)) return NULL;
    int64_t count = ids.len / 4;
    Found found = {NULL, 0, 0};
    int complete = 1;
    Py_BEGIN_ALLOW_THREADS
    const uint8_t *data = ids.buf;
    int64_t at = 0;
#if HAS_VECTORS
    for (; first <= last && complete && at + 64 <= count; at += 64)
        for (uint64_t bits = integers_between(data + 4 * at, first, last); bits && complete; bits &= bits - 1)
            complete = add(&found, at + __builtin_ctzll(bits));
#endif
    for (; complete && at < count; at++) {
        uint32_t id;
        memcpy(&id, data + 4 * at, 4);
        if (first <= id && id <= last) complete = add(&found, at);
    }
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&ids);
    return answer(&found, complete);
}

static PyMethodDef methods[] = {
    {"positions", positions, METH_VARARGS, positions_doc},
    {"byte_pairs", byte_pairs, METH_VARARGS, byte_pairs_doc},
    {"ids_in_range", ids_in_range, METH_VARARGS, ids_in_range_doc},
    {NULL, NULL, 0, NULL},
};
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_positions", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__positions(void) { return PyModule_Create(&definition); }
