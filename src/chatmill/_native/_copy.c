/* Copy many array ranges in one call, because a Python call for each range would cost more than the copy. */

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>
#include <stdint.h>
#include <string.h>

/* An empty range is always in bounds. */
static int outside(int64_t at, int64_t count, Py_ssize_t size) {
    return count && (at < 0 || count < 0 || at > size - count);
}

/* Read an integer from a buffer that may be unaligned. */
static inline int64_t number_at(const Py_buffer *buffer, Py_ssize_t n) {
    int64_t number;
    memcpy(&number, (const uint8_t *)buffer->buf + 8 * n, 8);
    return number;
}

/* Most copies are small: two or three steps of eight bytes are faster than a call to memmove. */
static inline void copy(uint8_t *to, const uint8_t *from, size_t size) {
    uint64_t eight;
    if (size > 64) {
        memmove(to, from, size);
        return;
    }
    while (size >= 8) memcpy(&eight, from, 8), memcpy(to, &eight, 8), to += 8, from += 8, size -= 8;
    while (size) *to++ = *from++, size--;
}

PyDoc_STRVAR(ranges_doc,
             "ranges(target, to, source, start, stop, width)\n\n"
             "Copy source[start:stop] to target[to:] for each entry of the int64 arrays `to`, `start` and `stop`.\n"
             "Offsets count items of `width` bytes.");

static PyObject *ranges(PyObject *module, PyObject *args) {
    (void)module;
    Py_buffer target, to, source, start, stop;
    Py_ssize_t width;
    if (!PyArg_ParseTuple(args, "w*y*y*y*y*n", &target, &to, &source, &start, &stop, &width)) return NULL;
    Py_ssize_t count = to.len / 8;
    int fits = width > 0 && to.len % 8 == 0 && start.len == to.len && stop.len == to.len;
    Py_BEGIN_ALLOW_THREADS
    for (Py_ssize_t n = 0; fits && n < count; n++) {
        int64_t from = number_at(&start, n), at = number_at(&to, n), items;
        fits = !__builtin_sub_overflow(number_at(&stop, n), from, &items) &&
               !outside(from, items, source.len / width) && !outside(at, items, target.len / width);
        if (fits && items)
            copy((uint8_t *)target.buf + at * width, (const uint8_t *)source.buf + from * width, items * width);
    }
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&target), PyBuffer_Release(&to), PyBuffer_Release(&source);
    PyBuffer_Release(&start), PyBuffer_Release(&stop);
    if (fits) return Py_NewRef(Py_None);
    PyErr_SetString(PyExc_ValueError, "expected ranges within the source and the target");
    return NULL;
}

PyDoc_STRVAR(pieces_doc,
             "pieces(target, first, second, start, length)\n\n"
             "Fill the uint32 array `target` with consecutive ranges of the concatenation of `first` and `second`. A\n"
             "range must not cross from `first` to `second`.");

static PyObject *pieces(PyObject *module, PyObject *args) {
    (void)module;
    Py_buffer target, first, second, start, length;
    if (!PyArg_ParseTuple(args, "w*y*y*y*y*", &target, &first, &second, &start, &length)) return NULL;
    Py_ssize_t count = start.len / 8, border = first.len / 4, at = 0;
    int fits = start.len % 8 == 0 && length.len == start.len;
    for (Py_ssize_t n = 0; fits && n < count; n++) {
        int64_t from = number_at(&start, n), items = number_at(&length, n);
        const Py_buffer *source = from < border ? &first : &second;
        if (from >= border) from -= border;
        fits = !outside(from, items, source->len / 4) && !outside(at, items, target.len / 4);
        if (!fits || !items) continue;
        copy((uint8_t *)target.buf + at * 4, (const uint8_t *)source->buf + from * 4, items * 4);
        at += items;
    }
    fits = fits && at == target.len / 4;
    PyBuffer_Release(&target), PyBuffer_Release(&first), PyBuffer_Release(&second);
    PyBuffer_Release(&start), PyBuffer_Release(&length);
    if (fits) return Py_NewRef(Py_None);
    PyErr_SetString(PyExc_ValueError, "expected ranges that fill the target");
    return NULL;
}

static PyMethodDef methods[] = {
    {"ranges", ranges, METH_VARARGS, ranges_doc},
    {"pieces", pieces, METH_VARARGS, pieces_doc},
    {NULL, NULL, 0, NULL},
};
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_copy", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__copy(void) { return PyModule_Create(&definition); }
