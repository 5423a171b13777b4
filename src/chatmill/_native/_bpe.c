/* Encode many texts with byte-level BPE in one call.

   The tokenizer's split pattern splits a text into words. A table maps known words to their token ids. The table
   contains nearly all words of a typical text. The encoder skips texts with a word longer than LONGEST, a character
   of unknown class, a character to normalize, or an added token. The encoder returns the indices of the skipped
   texts, and the caller must encode these texts.

   Calls release the GIL, so several threads can encode at once. Each call has its own workspace. Data that calls
   share is not modified after the encoder is created. */

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include "_encode.h"

#define MOST_IDLE 64     /* maximum number of workspaces to keep for later calls */
#define SMALL (1u << 14) /* below this many bytes, releasing the GIL takes more time than it saves */

typedef struct {
    PyObject_HEAD
    Model model;
    Workspace *idle; /* accessed only with the GIL held */
    int num_idle;
    int ready;
} Encoder;

/* Read an integer from a buffer that may be unaligned. */
static inline uint32_t id_at(const Py_buffer *buffer, size_t n) {
    uint32_t id;
    memcpy(&id, (const uint8_t *)buffer->buf + 4 * n, 4);
    return id;
}

static int is_ready(const Encoder *self) {
    if (!self->ready) PyErr_SetString(PyExc_RuntimeError, "the encoder is not initialized; call Encoder(...) first");
    return self->ready;
}

static PyObject *odd_numbers(const Workspace *work) {
    const int64_t *numbers = (const int64_t *)work->odd.data;
    Py_ssize_t count = work->odd.size / sizeof *numbers;
    PyObject *odd = PyList_New(count);
    for (Py_ssize_t n = 0; odd && n < count; n++)
        if (PyList_SetItem(odd, n, PyLong_FromLongLong(numbers[n])) || PyErr_Occurred()) Py_CLEAR(odd);
    return odd;
}

static PyObject *answer(const Workspace *work) {
    PyObject *odd = odd_numbers(work);
    if (!odd) return NULL;
    const char *ids = work->out.data ? (char *)work->out.data : "";
    /* Avoid the format "y#": a module built with Python 3.13 headers would fail on older Python versions, despite the
       limited API. */
    return Py_BuildValue("(NNN)", PyBytes_FromStringAndSize(ids, (Py_ssize_t)work->out.size),
                         PyBytes_FromStringAndSize((char *)work->offsets.data, (Py_ssize_t)work->offsets.size), odd);
}

/* Encode the texts of a call in a workspace and return the result. Release the GIL if `size`, the number of bytes, is
   at least SMALL. */
static PyObject *run_call(Encoder *self, const Call *call, int normal, size_t size) {
    Workspace *work = self->idle;
    if (work) self->idle = work->next, self->num_idle--;
    PyThreadState *state = size >= SMALL ? PyEval_SaveThread() : NULL;
    if (!work) work = new_workspace(&self->model);
    Result result = work ? encode_call(&self->model, work, call, normal) : NO_MEMORY;
    if (state) PyEval_RestoreThread(state);
    if (result == OUTSIDE) PyErr_SetString(PyExc_ValueError, "expected text ranges within the data");
    if (result == NO_KIND) PyErr_SetString(PyExc_IndexError, "expected a text before and after each kind");
    if (result == NO_MEMORY) PyErr_NoMemory();
    PyObject *found = result == DONE ? answer(work) : NULL;
    if (result != NO_MEMORY && self->num_idle < MOST_IDLE) {
        work->next = self->idle;
        self->idle = work;
        self->num_idle++;
    } else if (work) {
        free_workspace(work); /* if memory ran out, the table of the workspace may be incomplete */
    }
    return found;
}

PyDoc_STRVAR(encode_doc,
             "encode(texts: list[str], normal: bool) -> (ids, offsets, odd)\n\n"
             "Return ids as uint32, len(texts) + 1 offsets as int64, and the indices of the texts that the\n"
             "caller must encode.");

static PyObject *encode(PyObject *object, PyObject *args) {
    Encoder *self = (Encoder *)object;
    PyObject *list, *found = NULL;
    int normal;
    if (!is_ready(self)) return NULL;
    if (!PyArg_ParseTuple(args, "O!p", &PyList_Type, &list, &normal)) return NULL;
    // Another thread may change the list while the GIL is released; the tuple keeps the texts alive.
    PyObject *held = PyList_AsTuple(list);
    if (!held) return NULL;
    Py_ssize_t count = PyTuple_Size(held);
    Text *texts = malloc((count + 1) * sizeof *texts);
    if (!texts) PyErr_NoMemory();
    size_t size = 0;
    for (Py_ssize_t n = 0; texts && n < count; size += texts[n].size, n++) {
        texts[n].data = PyUnicode_AsUTF8AndSize(PyTuple_GetItem(held, n), &texts[n].size);
        if (!texts[n].data) goto done;
    }
    Call call = {.count = count, .texts = texts};
    if (texts) found = run_call(self, &call, normal, size);
done:
    free(texts);
    Py_DECREF(held);
    return found;
}

PyDoc_STRVAR(encode_columns_doc,
             "encode_columns(data, start, stop, kind, before: list[bytes], after: list[bytes]) -> (ids, offsets, odd)\n\n"
             "Like `encode`, for the UTF-8 texts before[kind] + data[start:stop] + after[kind].");

/* Set `texts` to the data of the first `count` items of a tuple; return 0 if an item is not a bytes object. */
static int bytes_of(PyObject *held, Py_ssize_t count, Text *texts) {
    for (Py_ssize_t n = 0; n < count; n++) {
        char *data;
        if (PyBytes_AsStringAndSize(PyTuple_GetItem(held, n), &data, &texts[n].size)) return 0;
        texts[n].data = data;
    }
    return 1;
}

static PyObject *encode_columns(PyObject *object, PyObject *args) {
    enum { KINDS = 256 };
    Encoder *self = (Encoder *)object;
    Py_buffer data, start, stop, kind;
    PyObject *lists[2], *held[2] = {NULL, NULL}, *found = NULL;
    Text around[2][KINDS];
    if (!is_ready(self)) return NULL;
    if (!PyArg_ParseTuple(args, "y*y*y*y*OO", &data, &start, &stop, &kind, &lists[0], &lists[1])) return NULL;
    Py_ssize_t count = kind.len;
    if (start.len != count * 8 || stop.len != count * 8 || !PyList_Check(lists[0]) || !PyList_Check(lists[1])) {
        PyErr_SetString(PyExc_ValueError, "expected columns of equal length and two lists");
        goto done;
    }
    if (!(held[0] = PyList_AsTuple(lists[0])) || !(held[1] = PyList_AsTuple(lists[1]))) goto done;
    Py_ssize_t kinds = KINDS;
    for (int side = 0; side < 2; side++)
        if (PyTuple_Size(held[side]) < kinds) kinds = PyTuple_Size(held[side]);
    if (!bytes_of(held[0], kinds, around[0]) || !bytes_of(held[1], kinds, around[1])) goto done;
    Call call = {.count = count, .data = data.buf, .start = start.buf, .stop = stop.buf, .kind = kind.buf,
                 .size = data.len, .before = around[0], .after = around[1], .kinds = kinds};
    found = run_call(self, &call, 0, data.len);
done:
    Py_XDECREF(held[0]), Py_XDECREF(held[1]);
    PyBuffer_Release(&data), PyBuffer_Release(&start), PyBuffer_Release(&stop), PyBuffer_Release(&kind);
    return found;
}

/* Check that the offsets are within the vocabulary and in ascending order. */
static int are_in_order(const Py_buffer *places, size_t words, int64_t size) {
    if (number_at(places->buf, 0) < 0 || number_at(places->buf, words) != size) return 0;
    for (size_t n = 0; n < words; n++)
        if (number_at(places->buf, n) > number_at(places->buf, n + 1)) return 0;
    return 1;
}

/* Check that all values are character classes and that ASCII characters have the expected classes. */
static int are_classes(const Py_buffer *classes, int pattern) {
    const uint8_t *class = classes->buf;
    if (classes->len < 128) return 0;
    for (Py_ssize_t n = 0; n < classes->len; n++)
        if (n < 128 ? class[n] != ascii_class(pattern, (int)n) : (class[n] & ~DOUBT) > UNKNOWN) return 0;
    return 1;
}

/* Check that each token is preceded by its length and that no token is empty. */
static int are_tokens(const Py_buffer *added) {
    const uint8_t *token = added->buf, *end = token + added->len;
    while (token < end && *token && end - token > *token) token += 1 + *token;
    return token == end;
}

static int take_in(Encoder *encoder, const Py_buffer *given) {
    Model *self = &encoder->model;
    const Py_buffer *classes = &given[0], *byte_ids = &given[1], *pairs = &given[2], *into = &given[3];
    const Py_buffer *vocabulary = &given[4], *places = &given[5], *numbers = &given[6], *added = &given[7];
    size_t merges = into->len / 4, words = numbers->len / 4;
    if (self->cutter.pattern < 0 || self->cutter.pattern >= PATTERNS || !are_classes(classes, self->cutter.pattern) ||
        !are_tokens(added) || byte_ids->len != sizeof self->table.byte_ids || into->len % 4 || pairs->len != into->len * 2 || merges >= MERGES ||
        numbers->len % 4 || places->len != (Py_ssize_t)(words + 1) * 8 || !are_in_order(places, words, vocabulary->len)) {
        PyErr_SetString(PyExc_ValueError, "the arrays do not match; expected sizes as in Encoder.__doc__");
        return -1;
    }
    memset(self->cutter.lead, WIDE, sizeof self->cutter.lead);
    memcpy(self->cutter.lead, classes->buf, 128);
    self->cutter.lead[STOP] = END;
    memcpy(self->table.byte_ids, byte_ids->buf, sizeof self->table.byte_ids);
    for (self->table.merge_bits = 4; (size_t)1 << self->table.merge_bits < 2 * merges; self->table.merge_bits++) continue;
    size_t room = (size_t)1 << self->table.merge_bits;
    self->table.word_bits = 12;
    self->table.words = large(sizeof *self->table.words << self->table.word_bits);
    self->table.merges = large(room * sizeof *self->table.merges);
    self->table.merge_tags = large(room);
    self->table.byte_pairs = large(BYTE_PAIRS * sizeof *self->table.byte_pairs);
    self->table.process = getpid();
    if (!self->table.words || !self->table.merges || !self->table.merge_tags || !self->table.byte_pairs ||
        !append(&self->classes, classes->buf, classes->len) ||
        !append(&self->added, added->buf, added->len) ||
        !append(&self->table.vocabulary, vocabulary->buf, vocabulary->len) ||
        !reserve(&self->table.vocabulary, vocabulary->len + BEYOND) ||
        !append(&self->table.places, places->buf, places->len) || !append(&self->table.numbers, numbers->buf, numbers->len))
        goto no_memory;
    self->cutter.classes = self->classes.data;
    self->cutter.known = self->classes.size;
    for (uint32_t n = 0; n < merges; n++)
        add_merge(&self->table, id_at(pairs, 2 * n), id_at(pairs, 2 * n + 1), n, id_at(into, n));
    fill_byte_pairs(&self->table);
    if ((encoder->ready = begin(&self->table, 1))) return 0;
no_memory:
    PyErr_NoMemory();
    return -1;
}

PyDoc_STRVAR(encoder_doc,
             "Encoder(pattern, whole, classes, byte_ids, pairs, into, vocabulary, places, numbers, added)\n\n"
             "pattern: the split pattern, a value of `Pattern` in split_pattern.py.\n"
             "whole: whether every word of the vocabulary is a single token that needs no merging.\n"
             "classes: one byte for each character. byte_ids: 256 token ids.\n"
             "pairs, into: for each merge, in order, the ids of its two tokens and the id of the result.\n"
             "vocabulary, places, numbers: the bytes of all words, their offsets, and their token ids.\n"
             "added: added tokens, each preceded by one length byte. The caller must encode texts that contain one.");

static int init(PyObject *object, PyObject *args, PyObject *names) {
    static char *keys[] = {"pattern",    "whole",  "classes", "byte_ids", "pairs", "into",
                           "vocabulary", "places", "numbers", "added",    NULL};
    Encoder *self = (Encoder *)object;
    Py_buffer given[8];
    if (self->model.table.words) {
        PyErr_SetString(PyExc_RuntimeError, "the encoder is already initialized; create a new Encoder");
        return -1;
    }
    if (!PyArg_ParseTupleAndKeywords(args, names, "ipy*y*y*y*y*y*y*y*", keys, &self->model.cutter.pattern,
                                     &self->model.table.whole, &given[0], &given[1], &given[2], &given[3], &given[4],
                                     &given[5], &given[6], &given[7]))
        return -1;
    int failed = take_in(self, given);
    for (int n = 0; n < 8; n++) PyBuffer_Release(&given[n]);
    return failed;
}

static void dealloc(PyObject *object) {
    Encoder *self = (Encoder *)object;
    Model *model = &self->model;
    for (Workspace *work = self->idle, *next; work; work = next) next = work->next, free_workspace(work);
    Heap *heaps[] = {&model->classes,       &model->added,         &model->table.vocabulary, &model->table.places,
                     &model->table.numbers, &model->table.bytes, &model->table.ids};
    for (size_t n = 0; n < sizeof heaps / sizeof *heaps; n++) free(heaps[n]->data);
    free_large(model->table.words, sizeof *model->table.words << model->table.word_bits);
    free_large(model->table.merges, sizeof *model->table.merges << model->table.merge_bits);
    free_large(model->table.merge_tags, (size_t)1 << model->table.merge_bits);
    free_large(model->table.byte_pairs, BYTE_PAIRS * sizeof *model->table.byte_pairs);
    PyTypeObject *type = Py_TYPE(object);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(object);
    Py_DECREF(type);
}

static PyMethodDef methods[] = {
    {"encode", encode, METH_VARARGS, encode_doc},
    {"encode_columns", encode_columns, METH_VARARGS, encode_columns_doc},
    {NULL, NULL, 0, NULL},
};
static PyType_Slot slots[] = {
    {Py_tp_doc, (void *)encoder_doc}, {Py_tp_init, init}, {Py_tp_dealloc, dealloc}, {Py_tp_methods, methods}, {0, NULL},
};
static PyType_Spec spec = {"chatmill._native._bpe.Encoder", sizeof(Encoder), 0, Py_TPFLAGS_DEFAULT, slots};
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_bpe", NULL, -1, NULL, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__bpe(void) {
    PyObject *module = PyModule_Create(&definition), *type = PyType_FromSpec(&spec);
    if (!module || !type || PyModule_AddObjectRef(module, "Encoder", type)) {
        Py_CLEAR(module);
    }
    Py_XDECREF(type);
    return module;
}
