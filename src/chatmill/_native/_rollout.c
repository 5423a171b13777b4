/* Parse boxes in the standard form from generated answers, and find overlapping boxes, to build rollout targets. */

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>
#include <limits.h>
#include <stdint.h>
#include <string.h>

/* If coordinates are below this limit, sums of box areas are integers that a double represents exactly. */
#define MOST (1 << 24)

typedef struct {
    const uint8_t *at, *end;
} Reader;

/* Skip `text` and return 1 if the remaining input starts with `text`; otherwise return 0. */
static int passes(Reader *reader, const char *text, size_t size) {
    if ((size_t)(reader->end - reader->at) < size || memcmp(reader->at, text, size)) return 0;
    reader->at += size;
    return 1;
}
#define PASSES(reader, text) passes(reader, text, sizeof(text) - 1)

/* Parse at most `most` digits; return the number of digits and set `number` to the parsed value. */
static int digits(Reader *reader, int most, long *number) {
    int count = 0;
    for (*number = 0; count < most && reader->at < reader->end && *reader->at >= '0' && *reader->at <= '9'; count++)
        *number = 10 * *number + *reader->at++ - '0';
    return count;
}

/* Parse "<|coord_k|>", where k is a number from 0 to 999 without leading zeros. */
static int coordinate(Reader *reader, long *k) {
    if (!PASSES(reader, "\"<|coord_")) return 0;
    int is_zero = reader->at < reader->end && *reader->at == '0';
    return digits(reader, is_zero ? 1 : 3, k) && PASSES(reader, "|>\"");
}

/* Whether a byte is printable ASCII other than a quote or a backslash. */
static int is_plain(uint8_t byte) { return byte >= ' ' && byte <= '~' && byte != '"' && byte != '\\'; }

/* Parse the next entry and return it as a tuple. Return NULL without an exception if the entry is not a box in the
   standard form. On an error, return NULL with an exception. */
static PyObject *box(Reader *reader, const uint8_t *data) {
    Reader next = *reader;
    long number, k[4];
    Py_ssize_t from[4];
    if (!PASSES(&next, "\"object_") || !digits(&next, 9, &number)) return NULL;
    const uint8_t *key_end = next.at;
    if (!PASSES(&next, "\": ")) return NULL;
    const uint8_t *value = next.at;
    if (!PASSES(&next, "{\"desc\": \"")) return NULL;
    const uint8_t *desc = next.at;
    while (next.at < next.end && is_plain(*next.at)) next.at++;
    const uint8_t *desc_end = next.at;
    if (desc == desc_end || !PASSES(&next, "\", \"bbox_2d\": [")) return NULL;
    for (int n = 0; n < 4; n++) {
        if (n && !PASSES(&next, ", ")) return NULL;
        from[n] = next.at + 1 - data;
        if (!coordinate(&next, &k[n])) return NULL;
    }
    if (!PASSES(&next, "]}")) return NULL;
    const char *key = (const char *)reader->at + 1;
    Py_ssize_t start = reader->at - data;
    *reader = next;
    return Py_BuildValue("(NllnnnOO(N[llll][nnnn]))", PyUnicode_FromStringAndSize(key, (const char *)key_end - key), number,
                         number, start, (Py_ssize_t)(value - data), (Py_ssize_t)(next.at - data), Py_True, Py_True,
                         PyUnicode_FromStringAndSize((const char *)desc, desc_end - desc), k[0], k[1], k[2], k[3],
                         from[0], from[1], from[2], from[3]);
}

PyDoc_STRVAR(boxes_doc,
             "boxes(data, at)\n\n"
             "Parse consecutive boxes in the standard form, separated by a comma and a space, starting at offset `at`.\n"
             "Return each box as a tuple of the fields of `ParsedEntry`.");

static PyObject *boxes(PyObject *module, PyObject *args) {
    (void)module;
    Py_buffer data;
    Py_ssize_t at;
    if (!PyArg_ParseTuple(args, "y*n", &data, &at)) return NULL;
    PyObject *entries = at < 0 || at > data.len ? NULL : PyList_New(0);
    if (entries) {
        Reader reader = {(const uint8_t *)data.buf + at, (const uint8_t *)data.buf + data.len};
        do {
            PyObject *entry = box(&reader, data.buf);
            if (entry && PyList_Append(entries, entry)) Py_CLEAR(entries);
            Py_XDECREF(entry);
            if (!entry) break;
        } while (entries && PASSES(&reader, ", "));
        if (PyErr_Occurred()) Py_CLEAR(entries);
    } else if (!PyErr_Occurred()) {
        PyErr_SetString(PyExc_ValueError, "expected an offset within the data");
    }
    PyBuffer_Release(&data);
    return entries;
}

/* Return an array with four coordinates per box. Return NULL if a box is not a list of four small integers, or if
   memory runs out. */
static double *coordinates(PyObject *boxes, Py_ssize_t count) {
    double *all = PyMem_Malloc((count ? count : 1) * 4 * sizeof(double));
    if (!all) PyErr_NoMemory();
    for (Py_ssize_t n = 0; all && n < count; n++) {
        PyObject *box = PyList_GetItem(boxes, n);
        int fits = box && PyList_CheckExact(box) && PyList_Size(box) == 4;
        for (int at = 0; fits && at < 4; at++) {
            PyObject *item = PyList_GetItem(box, at);
            int overflow = 0;
            long long k = item && PyLong_CheckExact(item) ? PyLong_AsLongLongAndOverflow(item, &overflow) : LLONG_MAX;
            fits = !overflow && k > -MOST && k < MOST;
            all[4 * n + at] = (double)k;
        }
        if (!fits) PyMem_Free(all), all = NULL;
    }
    return all;
}

/* Return whether two boxes intersect, and set `ratio` to the intersection over union of intersecting boxes. */
static int overlap(const double *one, const double *other, double *ratio) {
    double x1 = one[0] > other[0] ? one[0] : other[0], y1 = one[1] > other[1] ? one[1] : other[1];
    double width = (one[2] < other[2] ? one[2] : other[2]) - x1, height = (one[3] < other[3] ? one[3] : other[3]) - y1;
    if (width < 0 || height < 0) return 0;
    double shared = width * height;
    double both = (one[2] - one[0]) * (one[3] - one[1]) + (other[2] - other[0]) * (other[3] - other[1]) - shared;
    /* If both boxes have zero area, the ratio is 1 for equal boxes and 0 otherwise. */
    *ratio = both > 0 ? shared / both : !memcmp(one, other, 4 * sizeof(double));
    return 1;
}

PyDoc_STRVAR(overlaps_doc,
             "overlaps(boxes, others)\n\n"
             "Return the pairs of boxes [x1, y1, x2, y2] that intersect, as three arrays: the index in `boxes`\n"
             "(int64), the index in `others` (int64) and the intersection over union (float64). Return None if a box\n"
             "is not a list of four integers that are small enough for exact areas.");

static PyObject *overlaps(PyObject *module, PyObject *args) {
    (void)module;
    PyObject *lists[2], *columns[3] = {NULL, NULL, NULL}, *result = NULL;
    if (!PyArg_ParseTuple(args, "O!O!", &PyList_Type, &lists[0], &PyList_Type, &lists[1])) return NULL;
    Py_ssize_t count[2] = {PyList_Size(lists[0]), PyList_Size(lists[1])}, pairs = 0;
    double *boxes = coordinates(lists[0], count[0]), *others = boxes ? coordinates(lists[1], count[1]) : NULL, ratio;
    if (!others) {
        if (!PyErr_Occurred()) result = Py_NewRef(Py_None);
        goto done;
    }
    for (Py_ssize_t n = 0; n < count[0]; n++)
        for (Py_ssize_t m = 0; m < count[1]; m++) pairs += overlap(boxes + 4 * n, others + 4 * m, &ratio);
    uint8_t *to[3];
    for (int n = 0; n < 3; n++) {
        if (!(columns[n] = PyByteArray_FromStringAndSize(NULL, 8 * pairs))) goto done;
        to[n] = (uint8_t *)PyByteArray_AsString(columns[n]);
    }
    Py_ssize_t at = 0;
    for (int64_t n = 0; n < count[0]; n++)
        for (int64_t m = 0; m < count[1]; m++)
            if (overlap(boxes + 4 * n, others + 4 * m, &ratio)) {
                memcpy(to[0] + at, &n, 8), memcpy(to[1] + at, &m, 8), memcpy(to[2] + at, &ratio, 8);
                at += 8;
            }
    result = PyTuple_Pack(3, columns[0], columns[1], columns[2]);
done:
    for (int n = 0; n < 3; n++) Py_XDECREF(columns[n]);
    PyMem_Free(boxes), PyMem_Free(others);
    return result;
}

static PyMethodDef methods[] = {
    {"boxes", boxes, METH_VARARGS, boxes_doc},
    {"overlaps", overlaps, METH_VARARGS, overlaps_doc},
    {NULL, NULL, 0, NULL},
};
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_rollout", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__rollout(void) { return PyModule_Create(&definition); }
