/* Byte-level BPE for many texts at a time.

   A text is cut into words as the pattern of its tokenizer would cut it, and each word is looked up among those that
   have been merged before; nearly all have. A text with a word over LONGEST, with a character whose class is not known,
   or with one that has to be normalized, is left to the caller: it comes back without ids, and its number in a list. */

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include "_words.h"
#ifdef __linux__
#include <sys/mman.h>
#endif

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "words are looked up by their bytes as a little-endian number"
#endif

#define LONGEST 512        /* a power of two */
#define SHORT 15
#define FEW 3
#define MOST (1u << 18)       /* words that are kept besides those of the vocabulary */
#define MOST_BYTES (1u << 25) /* and what those of them take that are ELSEWHERE */
#define ELSEWHERE (1u << 31)

typedef struct {
    uint64_t low, high; /* the bytes of a short word, its length on top; of a long one a hash, and its length below 0xFF */
} Key;

typedef struct {
    Key key;
    uint32_t ids[FEW]; /* or, ELSEWHERE, where the bytes and the ids lie */
    uint32_t count;
} Word;

typedef struct {
    uint64_t pair;
    uint32_t rank, id;
} Merge;

typedef struct {
    uint8_t *data;
    size_t size, room;
} Heap;

typedef struct {
    PyObject_HEAD
    Cutter cutter;
    int whole;
    Heap classes, vocabulary, places, numbers;
    uint32_t byte_ids[256];
    Merge *merges;
    int merge_bits;
    Word *words;
    uint32_t num_words, most_words;
    size_t most_bytes;
    int word_bits;
    pid_t process;
    Heap bytes, ids; /* of words that are ELSEWHERE */
    Heap text, out, offsets;
} Encoder;

static int reserve(Heap *heap, size_t room) {
    if (room <= heap->room) return 1;
    if (room < 2 * heap->room) room = 2 * heap->room;
    uint8_t *data = realloc(heap->data, room);
    if (!data) return 0;
    heap->data = data;
    heap->room = room;
    return 1;
}

static int append(Heap *heap, const void *data, size_t size) {
    if (!reserve(heap, heap->size + size)) return 0;
    if (size) memcpy(heap->data + heap->size, data, size);
    heap->size += size;
    return 1;
}

/* Memory that is read all over: in large pages, where the system has them. */
static void *large(size_t size) {
    size_t page = (size_t)1 << 21;
    void *data = NULL;
    if (posix_memalign(&data, page, (size + page - 1) / page * page)) return NULL;
#ifdef MADV_HUGEPAGE
    madvise(data, (size + page - 1) / page * page, MADV_HUGEPAGE);
#endif
    return data;
}

/* The ids of a word. */

static inline uint64_t mixed(uint64_t low, uint64_t high) {
    unsigned __int128 product = (unsigned __int128)(low ^ 0x9E3779B97F4A7C15u) * (high ^ 0xD6E8FEB86659FD93u);
    return (uint64_t)product ^ (uint64_t)(product >> 64);
}

static inline Merge *merge_of(const Encoder *self, uint32_t left, uint32_t right) {
    uint64_t pair = (uint64_t)left << 32 | right;
    size_t mask = ((size_t)1 << self->merge_bits) - 1;
    for (size_t at = (pair * 0x9E3779B97F4A7C15u) >> (64 - self->merge_bits);; at = (at + 1) & mask) {
        Merge *merge = &self->merges[at];
        if (merge->pair == pair || merge->rank == UINT32_MAX) return merge;
    }
}

/* What is merged next is the least of these: the rank of a pair, and below it the place of its first half. */
static inline uint32_t pair_at(const Encoder *self, const uint32_t *ids, uint32_t at, uint32_t next, uint32_t *into) {
    const Merge *merge = merge_of(self, ids[at], ids[next]);
    *into = merge->id;
    return merge->rank == UINT32_MAX ? UINT32_MAX : merge->rank * LONGEST | at;
}

/* The first of the pairs with the lowest rank is merged until no pair has one. */
static uint32_t merged(const Encoder *self, const uint8_t *word, uint32_t size, uint32_t *ids) {
    uint32_t pair[LONGEST], into[LONGEST], count = 0;
    uint16_t next[LONGEST + 1], before[LONGEST + 1];
    for (uint32_t at = 0; at < size; at++) {
        ids[at] = self->byte_ids[word[at]];
        next[at] = (uint16_t)(at + 1), before[at + 1] = (uint16_t)at;
    }
    pair[size - 1] = UINT32_MAX;
    for (uint32_t at = 0; at + 1 < size; at++) pair[at] = pair_at(self, ids, at, at + 1, &into[at]);
    for (;;) {
        uint32_t least = UINT32_MAX;
        for (uint32_t at = 0; at < size; at++) least = pair[at] < least ? pair[at] : least;
        if (least == UINT32_MAX) break;
        uint32_t at = least % LONGEST, gone = next[at], after = next[gone];
        ids[at] = into[at];
        pair[gone] = UINT32_MAX;
        next[at] = (uint16_t)after, before[after] = (uint16_t)at;
        pair[at] = after < size ? pair_at(self, ids, at, after, &into[at]) : UINT32_MAX;
        if (at) pair[before[at]] = pair_at(self, ids, before[at], at, &into[before[at]]);
    }
    for (uint32_t at = 0; at < size; at = next[at]) ids[count++] = ids[at];
    return count;
}

/* What a word is looked up by. */
static inline Key key_of(const uint8_t *word, size_t size) {
    static const uint8_t KEPT[31] = {255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255};
    Key key = {0, (uint64_t)0xFF << 56 | size};
    if (size <= SHORT) {
        uint64_t low, high;
        memcpy(&low, KEPT + SHORT - size, 8);
        memcpy(&high, KEPT + SHORT - size + 8, 8);
        memcpy(&key.low, word, 8);
        memcpy(&key.high, word + 8, 8);
        key.low &= low;
        key.high = (key.high & high) | (uint64_t)size << 56;
        return key;
    }
    for (size_t at = 0; at < size; at += 8) {
        uint64_t part = 0;
        memcpy(&part, word + at, size - at < 8 ? size - at : 8);
        key.low = mixed(key.low + at, part);
    }
    return key;
}

static inline uint64_t hash_of(Key key) { return mixed(key.low, key.high); }

static void place(Word *words, int bits, const Word *word) {
    size_t mask = ((size_t)1 << bits) - 1;
    size_t at = hash_of(word->key) & mask;
    while (words[at].key.high) at = (at + 1) & mask;
    words[at] = *word;
}

static int enlarge(Encoder *self) {
    size_t size = sizeof *self->words << (self->word_bits + 1);
    Word *words = large(size);
    if (!words) return 0;
    memset(words, 0, size);
    for (size_t at = 0; at < (size_t)1 << self->word_bits; at++)
        if (self->words[at].key.high) place(words, self->word_bits + 1, &self->words[at]);
    free(self->words);
    self->words = words;
    self->word_bits++;
    return 1;
}

static int keep(Encoder *self, Word *word, const uint8_t *bytes, size_t size, const uint32_t *ids, uint32_t count) {
    if (2 * self->num_words >= 1u << self->word_bits && !enlarge(self)) return 0;
    word->key = key_of(bytes, size);
    word->count = count;
    if (size <= SHORT && count <= FEW) {
        memcpy(word->ids, ids, count * sizeof *ids);
    } else {
        word->count |= ELSEWHERE;
        word->ids[0] = (uint32_t)self->bytes.size;
        word->ids[1] = (uint32_t)self->ids.size;
        if (!append(&self->bytes, bytes, size) || !append(&self->ids, ids, count * sizeof *ids)) return 0;
    }
    place(self->words, self->word_bits, word);
    self->num_words++;
    return 1;
}

/* Begin with the words of the vocabulary alone. */
static int begin(Encoder *self) {
    memset(self->words, 0, sizeof(Word) << self->word_bits);
    self->num_words = 0;
    self->bytes.size = self->ids.size = 0;
    const int64_t *at = (const int64_t *)self->places.data;
    size_t count = self->numbers.size / sizeof(uint32_t);
    for (size_t n = 0; n < count; n++) {
        const uint8_t *word = self->vocabulary.data + at[n];
        size_t size = at[n + 1] - at[n];
        uint32_t ids[LONGEST] = {((uint32_t *)self->numbers.data)[n]};
        if (!size || size > LONGEST) continue;
        Word fresh = {{0, 0}, {0}, 0};
        if (!keep(self, &fresh, word, size, ids, self->whole ? 1 : merged(self, word, size, ids))) return 0;
    }
    self->most_words = self->num_words + MOST;
    self->most_bytes = self->bytes.size + self->ids.size + MOST_BYTES;
    return 1;
}

static int learn(Encoder *self, Word *fresh, const uint8_t *bytes, size_t size) {
    uint32_t ids[LONGEST];
    /* When there are too many they are all forgotten: memory stays flat, and the common ones are soon back. */
    int full = self->num_words >= self->most_words || self->bytes.size + self->ids.size >= self->most_bytes;
    if (full && !begin(self)) return 0;
    return keep(self, fresh, bytes, size, ids, merged(self, bytes, (uint32_t)size, ids));
}

/* Write the ids of a word, and return where those of the next go; NULL without memory. */
static inline uint32_t *write_ids(Encoder *self, Key key, uint64_t hash, const uint8_t *bytes, size_t size,
                                  uint32_t *out) {
    Word fresh = {{0, 0}, {0}, 0};
    const Word *word;
    size_t mask = ((size_t)1 << self->word_bits) - 1;
    for (size_t at = hash & mask;; at = (at + 1) & mask) {
        word = &self->words[at];
        if (word->key.low == key.low && word->key.high == key.high &&
            (size <= SHORT || !memcmp(self->bytes.data + word->ids[0], bytes, size)))
            break;
        if (!word->key.high) {
            if (!learn(self, &fresh, bytes, size)) return NULL;
            word = &fresh;
            break;
        }
    }
    if (word->count <= FEW) {
        memcpy(out, word->ids, sizeof word->ids);
        return out + word->count;
    }
    uint32_t count = word->count & ~ELSEWHERE;
    memcpy(out, self->ids.data + word->ids[1], count * sizeof *out);
    return out + count;
}

/* The same for the words that begin at `at` and at the bits, the last of which ends them. They are all asked for before
   the first is used, since what takes time is the way to the memory. */
static inline uint32_t *write_words(Encoder *self, const uint8_t *at, uint64_t starts, uint32_t *out) {
    Key keys[64];
    uint64_t hashes[64];
    size_t mask = ((size_t)1 << self->word_bits) - 1, begin = 0;
    int count = 0;
    for (uint64_t left = starts; left; left &= left - 1) {
        size_t end = __builtin_ctzll(left);
        keys[count] = key_of(at + begin, end - begin);
        hashes[count] = hash_of(keys[count]);
        __builtin_prefetch(&self->words[hashes[count++] & mask]);
        begin = end;
    }
    begin = 0;
    for (int n = 0; n < count && out; n++, starts &= starts - 1) {
        size_t end = __builtin_ctzll(starts);
        out = write_ids(self, keys[n], hashes[n], at + begin, end - begin, out);
        begin = end;
    }
    return out;
}

/* A forked process begins with words of its own: to write to those it shares would cost it the large pages. */
static int own_words(Encoder *self) {
    if (self->process == getpid()) return 1;
    size_t size = sizeof *self->words << self->word_bits;
    Word *words = large(size);
    if (!words) return 0;
    memcpy(words, self->words, size);
    free(self->words);
    self->words = words;
    self->process = getpid();
    return 1;
}

/* Append the ids of `self->text`; none, and `odd` set, if it has to be left to the caller. 0 without memory. */
static int encode_text(Encoder *self, size_t size) {
    size_t room = self->out.size + (size + FEW) * sizeof(uint32_t);
    if (!reserve(&self->out, room)) return 0;
    Cutter *cutter = &self->cutter;
    uint32_t *out = (uint32_t *)(self->out.data + self->out.size);
    const uint8_t *at = self->text.data, *end = at + size;
    memset(self->text.data + size, 0, BEYOND);
    self->text.data[size] = STOP;
    cutter->odd = 0;
    while (at < end) {
        uint64_t starts = starts_after(cutter, at, end - at);
        if (starts) {
            out = write_words(self, at, starts, out);
            at += 63 - __builtin_clzll(starts);
        } else {
            const uint8_t *stop = *at == STOP ? NULL : word_at(cutter, at);
            if (cutter->odd || !stop || stop - at > LONGEST) {
                cutter->odd = 1;
                return 1;
            }
            Key key = key_of(at, stop - at);
            out = write_ids(self, key, hash_of(key), at, stop - at, out);
            at = stop;
        }
        if (!out) return 0;
    }
    self->out.size = (uint8_t *)out - self->out.data;
    return 1;
}

/* What Python sees. */

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
    return Py_BuildValue("(y#y#N)", ids, (Py_ssize_t)self->out.size, (char *)self->offsets.data,
                         (Py_ssize_t)self->offsets.size, odd);
}

PyDoc_STRVAR(encode_doc,
             "encode(texts: list[str], normal: bool) -> (ids, offsets, odd)\n\n"
             "Ids as uint32, len(texts) + 1 offsets as int64, and the numbers of the texts that were left out.");

static PyObject *encode(PyObject *object, PyObject *args) {
    Encoder *self = (Encoder *)object;
    PyObject *texts;
    if (!PyArg_ParseTuple(args, "O!p", &PyList_Type, &texts, &self->cutter.normal)) return NULL;
    PyObject *odd = PyList_New(0);
    self->out.size = self->offsets.size = 0;
    if (!odd || !note_offset(self) || !own_words(self)) goto no_memory;
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
             "The same for the texts before[kind] + data[start:stop] + after[kind], which are UTF-8.");

static PyObject *encode_columns(PyObject *object, PyObject *args) {
    Encoder *self = (Encoder *)object;
    Py_buffer data, start, stop, kind;
    PyObject *before, *after, *odd = NULL, *found = NULL;
    if (!PyArg_ParseTuple(args, "y*y*y*y*OO", &data, &start, &stop, &kind, &before, &after)) return NULL;
    Py_ssize_t count = kind.len;
    if (start.len != count * 8 || stop.len != count * 8 || !PyList_Check(before) || !PyList_Check(after)) {
        PyErr_SetString(PyExc_ValueError, "expected columns of one length, and two lists");
        goto done;
    }
    self->cutter.normal = 0;
    self->out.size = self->offsets.size = 0;
    if (!(odd = PyList_New(0)) || !note_offset(self) || !own_words(self)) goto no_memory;
    for (Py_ssize_t n = 0; n < count; n++) {
        int64_t from = ((const int64_t *)start.buf)[n], to = ((const int64_t *)stop.buf)[n];
        uint8_t which = ((const uint8_t *)kind.buf)[n];
        if (from < 0 || to < from || to > data.len) {
            PyErr_SetString(PyExc_ValueError, "expected texts that lie within the data");
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

static int take_in(Encoder *self, const Py_buffer *given) {
    const Py_buffer *classes = &given[0], *byte_ids = &given[1], *pairs = &given[2], *into = &given[3];
    const Py_buffer *vocabulary = &given[4], *places = &given[5], *numbers = &given[6];
    size_t merges = into->len / 4, words = numbers->len / 4;
    if (classes->len < 128 || byte_ids->len != sizeof self->byte_ids || pairs->len != into->len * 2 ||
        places->len != (Py_ssize_t)(words + 1) * 8 || ((const int64_t *)places->buf)[words] != vocabulary->len) {
        PyErr_SetString(PyExc_ValueError, "expected columns that fit together");
        return -1;
    }
    memset(self->cutter.lead, WIDE, sizeof self->cutter.lead);
    memcpy(self->cutter.lead, classes->buf, 128);
    self->cutter.lead[STOP] = END;
    memcpy(self->byte_ids, byte_ids->buf, sizeof self->byte_ids);
    for (self->merge_bits = 4; (size_t)1 << self->merge_bits < 2 * merges; self->merge_bits++) continue;
    size_t room = (size_t)1 << self->merge_bits;
    self->word_bits = 12;
    self->words = large(sizeof *self->words << self->word_bits);
    self->merges = large(room * sizeof *self->merges);
    self->process = getpid();
    if (!self->words || !self->merges || !append(&self->classes, classes->buf, classes->len) ||
        !append(&self->vocabulary, vocabulary->buf, vocabulary->len) ||
        !reserve(&self->vocabulary, vocabulary->len + BEYOND) ||
        !append(&self->places, places->buf, places->len) || !append(&self->numbers, numbers->buf, numbers->len))
        goto no_memory;
    self->cutter.classes = self->classes.data;
    self->cutter.known = self->classes.size;
    for (size_t at = 0; at < room; at++) self->merges[at] = (Merge){UINT64_MAX, UINT32_MAX, 0};
    for (uint32_t n = 0; n < merges; n++) {
        const uint32_t *pair = (const uint32_t *)pairs->buf + 2 * n;
        *merge_of(self, pair[0], pair[1]) =
            (Merge){(uint64_t)pair[0] << 32 | pair[1], n, ((const uint32_t *)into->buf)[n]};
    }
    if (begin(self)) return 0;
no_memory:
    PyErr_NoMemory();
    return -1;
}

PyDoc_STRVAR(encoder_doc,
             "Encoder(pattern, digits, whole, classes, byte_ids, pairs, into, vocabulary, places, numbers)\n\n"
             "pattern: 0 for GPT-2's, 1 for cl100k's, which takes up to `digits` of a number at a time.\n"
             "whole: whether a word of the vocabulary is its own token without being merged.\n"
             "classes: a byte for each character; byte_ids: 256 ids; pairs and into: ids of the merges, in order.\n"
             "vocabulary, places, numbers: the bytes of its words, where each begins, and their ids.");

static int init(PyObject *object, PyObject *args, PyObject *names) {
    static char *keys[] = {"pattern", "digits", "whole",      "classes", "byte_ids", "pairs",
                           "into",    "vocabulary", "places", "numbers", NULL};
    Encoder *self = (Encoder *)object;
    Py_buffer given[7];
    if (self->words) {
        PyErr_SetString(PyExc_RuntimeError, "an encoder is made once");
        return -1;
    }
    if (!PyArg_ParseTupleAndKeywords(args, names, "iipy*y*y*y*y*y*y*", keys, &self->cutter.pattern, &self->cutter.digits,
                                     &self->whole, &given[0], &given[1], &given[2], &given[3], &given[4], &given[5],
                                     &given[6]))
        return -1;
    int failed = take_in(self, given);
    for (int n = 0; n < 7; n++) PyBuffer_Release(&given[n]);
    return failed;
}

static void dealloc(PyObject *object) {
    Encoder *self = (Encoder *)object;
    Heap *heaps[] = {&self->classes, &self->vocabulary, &self->places, &self->numbers, &self->bytes,
                     &self->ids,     &self->text,       &self->out,    &self->offsets};
    for (size_t n = 0; n < sizeof heaps / sizeof *heaps; n++) free(heaps[n]->data);
    free(self->words);
    free(self->merges);
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
static PyType_Spec spec = {"chatmill.tokenizer._bpe.Encoder", sizeof(Encoder), 0, Py_TPFLAGS_DEFAULT, slots};
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_bpe", NULL, -1, NULL, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__bpe(void) {
    PyObject *module = PyModule_Create(&definition), *type = PyType_FromSpec(&spec);
    if (!module || !type || PyModule_AddObjectRef(module, "Encoder", type)) {
        Py_CLEAR(module);
    }
    Py_XDECREF(type);
    return module;
}
