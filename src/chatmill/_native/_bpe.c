/* Encode many texts with byte-level BPE in one call.

   A text is split into words by the tokenizer's split pattern, and each word is looked up in a table of words that have
   been merged before. The table contains nearly all words of a typical text. The encoder skips a text if it contains a
   word longer than LONGEST, a character of unknown class, a character that must be normalized, or an added token. A
   skipped text gets no ids, and its index is returned in a list, so that the caller can encode it. */

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include "_starts.h"
#include "_table.h"

typedef struct {
    PyObject_HEAD
    Cutter cutter;
    Table table;
    Heap classes, text, out, offsets;
    Heap added; /* added tokens to search for before splitting, each stored as one length byte followed by its bytes */
    int ready;
} Encoder;

/* Read an integer from a buffer that may be unaligned. */
static inline int64_t number_at(const Py_buffer *buffer, Py_ssize_t n) {
    int64_t number;
    memcpy(&number, (const uint8_t *)buffer->buf + 8 * n, 8);
    return number;
}

static inline uint32_t id_at(const Py_buffer *buffer, size_t n) {
    uint32_t id;
    memcpy(&id, (const uint8_t *)buffer->buf + 4 * n, 4);
    return id;
}

static int is_ready(const Encoder *self) {
    if (!self->ready) PyErr_SetString(PyExc_RuntimeError, "the encoder is not initialized; call Encoder(...) first");
    return self->ready;
}

static int has_added(const Encoder *self, const uint8_t *text, size_t size) {
    const uint8_t *end = text + size;
    for (size_t n = 0; n < self->added.size; n += 1 + self->added.data[n]) {
        const uint8_t *at = text, *token = self->added.data + n;
        while ((at = memchr(at, token[1], end - at)) && end - at >= *token) {
            if (!memcmp(at, token + 1, *token)) return 1;
            at++;
        }
    }
    return 0;
}

/* Append the token ids of `self->text`, or set `odd` if the caller must encode the text. Return 0 if out of memory. */
static int encode_text(Encoder *self, size_t size) {
    size_t room = self->out.size + (size + FEW) * sizeof(uint32_t);
    if (!reserve(&self->out, room)) return 0;
    Cutter *cutter = &self->cutter;
    uint32_t *out = (uint32_t *)(self->out.data + self->out.size);
    const uint8_t *at = self->text.data, *end = at + size;
    memset(self->text.data + size, 0, BEYOND);
    self->text.data[size] = STOP;
    cutter->odd = has_added(self, at, size);
    if (cutter->odd) return 1;
    while (at < end) {
        uint64_t starts = starts_after(cutter, at, end - at);
        if (starts) {
            out = write_words(&self->table, at, starts, out);
            at += 63 - __builtin_clzll(starts);
        } else {
            const uint8_t *stop = *at == STOP ? NULL : word_at(cutter, at);
            if (cutter->odd || !stop || stop - at > LONGEST) {
                cutter->odd = 1;
                return 1;
            }
            Key key = key_of(at, stop - at);
            out = write_ids(&self->table, key, hash_of(key), at, stop - at, out);
            at = stop;
        }
        if (!out) return 0;
    }
    self->out.size = (uint8_t *)out - self->out.data;
    return 1;
}

static int note_offset(Encoder *self) {
    int64_t offset = self->out.size / sizeof(uint32_t);
    return append(&self->offsets, &offset, sizeof offset);
}

static int note_odd(PyObject *odd, Py_ssize_t number) {
    PyObject *object = PyLong_FromSsize_t(number);
    int failed = !object || PyList_Append(odd, object);
    Py_XDECREF(object);
    return !failed;
}

static PyObject *answer(Encoder *self, PyObject *odd) {
    const char *ids = self->out.data ? (char *)self->out.data : "";
    /* Avoid the format "y#": a module built with Python 3.13 headers would fail on older Python versions, despite the
       limited API. */
    return Py_BuildValue("(NNN)", PyBytes_FromStringAndSize(ids, (Py_ssize_t)self->out.size),
                         PyBytes_FromStringAndSize((char *)self->offsets.data, (Py_ssize_t)self->offsets.size), odd);
}

PyDoc_STRVAR(encode_doc,
             "encode(texts: list[str], normal: bool) -> (ids, offsets, odd)\n\n"
             "Return ids as uint32, len(texts) + 1 offsets as int64, and the indices of the texts that the\n"
             "caller must encode.");

static PyObject *encode(PyObject *object, PyObject *args) {
    Encoder *self = (Encoder *)object;
    PyObject *texts;
    if (!is_ready(self)) return NULL;
    if (!PyArg_ParseTuple(args, "O!p", &PyList_Type, &texts, &self->cutter.normal)) return NULL;
    PyObject *odd = PyList_New(0);
    self->out.size = self->offsets.size = 0;
    if (!odd || !note_offset(self) || !own_words(&self->table)) goto no_memory;
    for (Py_ssize_t n = 0; n < PyList_Size(texts); n++) {
        Py_ssize_t size;
        const char *text = PyUnicode_AsUTF8AndSize(PyList_GetItem(texts, n), &size);
        if (!text) goto failed;
        if (!reserve(&self->text, size + BEYOND)) goto no_memory;
        memcpy(self->text.data, text, size);
        if (!encode_text(self, size) || !note_offset(self)) goto no_memory;
        if (self->cutter.odd && !note_odd(odd, n)) goto failed;
    }
    return answer(self, odd);
no_memory:
    PyErr_NoMemory();
failed:
    Py_XDECREF(odd);
    return NULL;
}

PyDoc_STRVAR(encode_columns_doc,
             "encode_columns(data, start, stop, kind, before: list[bytes], after: list[bytes]) -> (ids, offsets, odd)\n\n"
             "Like `encode`, for the UTF-8 texts before[kind] + data[start:stop] + after[kind].");

static PyObject *encode_columns(PyObject *object, PyObject *args) {
    Encoder *self = (Encoder *)object;
    Py_buffer data, start, stop, kind;
    PyObject *before, *after, *odd = NULL, *found = NULL;
    if (!is_ready(self)) return NULL;
    if (!PyArg_ParseTuple(args, "y*y*y*y*OO", &data, &start, &stop, &kind, &before, &after)) return NULL;
    Py_ssize_t count = kind.len;
    if (start.len != count * 8 || stop.len != count * 8 || !PyList_Check(before) || !PyList_Check(after)) {
        PyErr_SetString(PyExc_ValueError, "expected columns of equal length and two lists");
        goto done;
    }
    self->cutter.normal = 0;
    self->out.size = self->offsets.size = 0;
    if (!(odd = PyList_New(0)) || !note_offset(self) || !own_words(&self->table)) goto no_memory;
    for (Py_ssize_t n = 0; n < count; n++) {
        int64_t from = number_at(&start, n), to = number_at(&stop, n);
        uint8_t which = ((const uint8_t *)kind.buf)[n];
        if (from < 0 || to < from || to > data.len) {
            PyErr_SetString(PyExc_ValueError, "expected text ranges within the data");
            goto done;
        }
        PyObject *first = PyList_GetItem(before, which), *last = first ? PyList_GetItem(after, which) : NULL;
        char *head, *tail;
        Py_ssize_t head_size, tail_size;
        if (!last || PyBytes_AsStringAndSize(first, &head, &head_size) ||
            PyBytes_AsStringAndSize(last, &tail, &tail_size))
            goto done;
        size_t size = head_size + (to - from) + tail_size;
        if (!reserve(&self->text, size + BEYOND)) goto no_memory;
        memcpy(self->text.data, head, head_size);
        memcpy(self->text.data + head_size, (const uint8_t *)data.buf + from, to - from);
        memcpy(self->text.data + head_size + (to - from), tail, tail_size);
        if (!encode_text(self, size) || !note_offset(self)) goto no_memory;
        if (self->cutter.odd && !note_odd(odd, n)) goto done;
    }
    found = answer(self, odd);
    odd = NULL;
    goto done;
no_memory:
    PyErr_NoMemory();
done:
    Py_XDECREF(odd);
    PyBuffer_Release(&data), PyBuffer_Release(&start), PyBuffer_Release(&stop), PyBuffer_Release(&kind);
    return found;
}

/* Check that the offsets are within the vocabulary and in ascending order. */
static int are_in_order(const Py_buffer *places, size_t words, int64_t size) {
    if (number_at(places, 0) < 0 || number_at(places, words) != size) return 0;
    for (size_t n = 0; n < words; n++)
        if (number_at(places, n) > number_at(places, n + 1)) return 0;
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

static int take_in(Encoder *self, const Py_buffer *given) {
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
    self->table.process = getpid();
    if (!self->table.words || !self->table.merges || !append(&self->classes, classes->buf, classes->len) ||
        !append(&self->added, added->buf, added->len) ||
        !append(&self->table.vocabulary, vocabulary->buf, vocabulary->len) ||
        !reserve(&self->table.vocabulary, vocabulary->len + BEYOND) ||
        !append(&self->table.places, places->buf, places->len) || !append(&self->table.numbers, numbers->buf, numbers->len))
        goto no_memory;
    self->cutter.classes = self->classes.data;
    self->cutter.known = self->classes.size;
    for (size_t at = 0; at < room; at++) self->table.merges[at] = (Merge){UINT64_MAX, UINT32_MAX, 0};
    for (uint32_t n = 0; n < merges; n++) {
        uint32_t left = id_at(pairs, 2 * n), right = id_at(pairs, 2 * n + 1);
        *merge_of(&self->table, left, right) = (Merge){(uint64_t)left << 32 | right, n, id_at(into, n)};
    }
    if ((self->ready = begin(&self->table, 1))) return 0;
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
    if (self->table.words) {
        PyErr_SetString(PyExc_RuntimeError, "the encoder is already initialized; create a new Encoder");
        return -1;
    }
    if (!PyArg_ParseTupleAndKeywords(args, names, "ipy*y*y*y*y*y*y*y*", keys, &self->cutter.pattern, &self->table.whole,
                                     &given[0], &given[1], &given[2], &given[3], &given[4], &given[5], &given[6], &given[7]))
        return -1;
    int failed = take_in(self, given);
    for (int n = 0; n < 8; n++) PyBuffer_Release(&given[n]);
    return failed;
}

static void dealloc(PyObject *object) {
    Encoder *self = (Encoder *)object;
    Heap *heaps[] = {&self->classes, &self->added, &self->table.vocabulary, &self->table.places, &self->table.numbers, &self->table.bytes,
                     &self->table.ids,     &self->text,       &self->out,    &self->offsets};
    for (size_t n = 0; n < sizeof heaps / sizeof *heaps; n++) free(heaps[n]->data);
    free_large(self->table.words, sizeof *self->table.words << self->table.word_bits);
    free_large(self->table.merges, sizeof *self->table.merges << self->table.merge_bits);
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
