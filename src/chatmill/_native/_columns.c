/* Parse lines of conversations in the common form into columns, without creating an object for each message.

   A line has the common form if it is {"messages": [{"role": …, "content": …}, …]}, with or without an id, and every
   other accepted key is null. Parsing stops before the first line that does not have the common form, and Python
   parses that line. Parsed lines are written as MessagePack, from which record keys are computed. */

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#ifdef __SSE2__
#include <emmintrin.h>
#endif

#include "_sha256.h"

/* The roles and nullable keys must match record.py. */
static const char *const ROLES[] = {"system", "user", "assistant", "tool"};
static const char *const NULL_KEYS[] = {"name",    "tool_calls",        "tool_call_id", "function_call",
                                        "refusal", "reasoning_content", "train",        "weight"};
#define COUNT(array) (sizeof(array) / sizeof *(array))
#define SLACK 256 /* extra bytes in the output buffer, because room is reserved before the size of a message is known */

typedef struct {
    uint8_t *data;
    size_t size, room;
} Column;

typedef struct {
    const uint8_t *at, *end; /* the remaining input, which is followed by a 0 byte */
    uint8_t *base, *out;     /* the start of the output, and the position of its next byte */
    Column messages, stop;   /* for each record: the number of messages and the end offset in the output */
    Column role, from, to;   /* for each message: the role and the range of the text */
    int no_memory;
} Reader;

static int add(Reader *self, Column *column, const void *value, size_t size) {
    if (column->size + size > column->room) {
        size_t room = column->room ? 2 * column->room : 4096;
        uint8_t *data = realloc(column->data, room);
        if (!data) return self->no_memory = 1, 0;
        column->data = data;
        column->room = room;
    }
    memcpy(column->data + column->size, value, size);
    column->size += size;
    return 1;
}

static int add_number(Reader *self, Column *column, int64_t number) { return add(self, column, &number, sizeof number); }

static inline int take(Reader *self, char wanted) {
    while (*self->at == ' ' || *self->at == '\t' || *self->at == '\r') self->at++;
    if (*self->at != (uint8_t)wanted) return 0;
    self->at++;
    return 1;
}

/* The input ends with a 0 byte, so strncmp never reads past the end of the input. */
static int take_word(Reader *self, const char *word) {
    size_t size = strlen(word);
    if (strncmp((const char *)self->at, word, size)) return 0;
    self->at += size;
    return 1;
}

static int take_null(Reader *self) { return take(self, 'n') && take_word(self, "ull"); }

/* Strings. */

/* Copy bytes up to the first quote, backslash or control character; set `high` to a nonzero value if any byte is not
   ASCII. */
static inline void copy_ordinary(Reader *self, int *high) {
#ifdef __SSE2__
    while (self->end - self->at >= 16) {
        __m128i bytes = _mm_loadu_si128((const __m128i *)self->at);
        __m128i quote = _mm_cmpeq_epi8(bytes, _mm_set1_epi8('"'));
        __m128i slash = _mm_cmpeq_epi8(bytes, _mm_set1_epi8('\\'));
        __m128i control = _mm_cmpeq_epi8(_mm_min_epu8(bytes, _mm_set1_epi8(0x1F)), bytes);
        unsigned found = _mm_movemask_epi8(_mm_or_si128(_mm_or_si128(quote, slash), control));
        _mm_storeu_si128((__m128i *)self->out, bytes);
        *high |= _mm_movemask_epi8(bytes);
        int count = found ? __builtin_ctz(found) : 16;
        self->at += count;
        self->out += count;
        if (found) return;
    }
#endif
    for (; *self->at >= 0x20 && *self->at != '"' && *self->at != '\\'; *self->out++ = *self->at++)
        *high |= *self->at & 0x80;
}

static int is_utf8(const uint8_t *at, const uint8_t *end) {
    while (at < end) {
        uint64_t eight;
        if (end - at >= 8 && (memcpy(&eight, at, 8), !(eight & 0x8080808080808080u))) {
            at += 8;
            continue;
        }
        uint8_t first = *at++;
        if (first < 0x80) continue;
        int more = first < 0xE0 ? 1 : first < 0xF0 ? 2 : 3;
        /* The range of the second byte excludes overlong forms, surrogates, and code points above U+10FFFF. */
        uint8_t low = first == 0xE0 ? 0xA0 : first == 0xF0 ? 0x90 : 0x80;
        uint8_t high = first == 0xED ? 0x9F : first == 0xF4 ? 0x8F : 0xBF;
        if (first < 0xC2 || first > 0xF4 || end - at < more || *at < low || *at > high) return 0;
        for (int n = 1; n < more; n++)
            if ((at[n] & 0xC0) != 0x80) return 0;
        at += more;
    }
    return 1;
}

static int take_hexadecimal(Reader *self, uint32_t *value) {
    *value = 0;
    for (int n = 0; n < 4; n++, self->at++) {
        uint8_t digit = *self->at, letter = digit | 0x20;
        if (digit >= '0' && digit <= '9') *value = *value << 4 | (digit - '0');
        else if (letter >= 'a' && letter <= 'f') *value = *value << 4 | (letter - 'a' + 10);
        else return 0;
    }
    return 1;
}

static void write_character(Reader *self, uint32_t c) {
    int more = c < 0x80 ? 0 : c < 0x800 ? 1 : c < 0x10000 ? 2 : 3;
    static const uint8_t lead[] = {0, 0xC0, 0xE0, 0xF0};
    *self->out++ = (uint8_t)(lead[more] | c >> 6 * more);
    while (more--) *self->out++ = (uint8_t)(0x80 | (c >> 6 * more & 0x3F));
}

static int take_escape(Reader *self) {
    static const uint8_t meant[256] = {['"'] = '"',  ['\\'] = '\\', ['/'] = '/',  ['b'] = '\b',
                                       ['f'] = '\f', ['n'] = '\n',  ['r'] = '\r', ['t'] = '\t'};
    uint8_t known = meant[*++self->at];
    if (known) {
        *self->out++ = known;
        self->at++;
        return 1;
    }
    uint32_t point, second;
    if (!take_word(self, "u") || !take_hexadecimal(self, &point)) return 0;
    if (point >= 0xD800 && point < 0xE000) {
        if (point >= 0xDC00 || !take_word(self, "\\u") || !take_hexadecimal(self, &second)) return 0;
        if (second < 0xDC00 || second >= 0xE000) return 0;
        point = 0x10000 + ((point - 0xD800) << 10) + (second - 0xDC00);
    }
    write_character(self, point);
    return 1;
}

/* Parse a JSON string and write its text to `out`. */
static int take_string(Reader *self) {
    int high = 0;
    const uint8_t *begin = self->out;
    if (!take(self, '"')) return 0;
    for (;;) {
        copy_ordinary(self, &high);
        if (*self->at == '"') break;
        if (*self->at != '\\' || !take_escape(self)) return 0;
    }
    self->at++;
    return !high || is_utf8(begin, self->out);
}

/* MessagePack. */

static size_t header_of(uint8_t *header, size_t size, int is_text) {
    size_t bytes = 4;
    if (size < (is_text ? 32 : 16)) return header[0] = (uint8_t)((is_text ? 0xA0 : 0x90) | size), 1;
    if (is_text && size < 256) header[0] = 0xD9, bytes = 1;
    else if (size < 65536) header[0] = is_text ? 0xDA : 0xDC, bytes = 2;
    else header[0] = is_text ? 0xDB : 0xDD;
    for (size_t n = 0; n < bytes; n++) header[1 + n] = (uint8_t)(size >> 8 * (bytes - 1 - n));
    return 1 + bytes;
}

/* Parse a key without escapes and the colon after the key; return the index of the key in `names`, or -1 if it is not
   listed. */
static int take_key(Reader *self, const char *const *names, size_t count) {
    if (!take(self, '"')) return -1;
    const uint8_t *name = self->at;
    while (*self->at >= 0x20 && *self->at != '"') self->at++;
    size_t size = self->at - name;
    if (!take_word(self, "\"") || !take(self, ':')) return -1;
    for (size_t n = 0; n < count; n++)
        if (strlen(names[n]) == size && !memcmp(names[n], name, size)) return (int)n;
    return -1;
}

static int take_role(Reader *self) {
    if (take(self, '"'))
        for (size_t n = 0; n < COUNT(ROLES); n++)
            if (take_word(self, ROLES[n])) return take_word(self, "\"") ? (int)n : -1;
    return -1;
}

static int take_message(Reader *self) {
    static const char *const KEYS[] = {"role", "content"};
    enum { ROLE, CONTENT, NAME_SIZE = 9, HEADER = 3 };
    uint8_t *begin = self->out, *content = NULL, header[5];
    int role = -1;
    unsigned seen = 0;
    if (!take(self, '{')) return 0;
    do {
        const uint8_t *before = self->at;
        int key = take_key(self, KEYS, COUNT(KEYS));
        if (key == ROLE) {
            if (role >= 0 || (role = take_role(self)) < 0) return 0;
        } else if (key == CONTENT) {
            if (content) return 0;
            /* Leave room for the role and a three-byte header; the text is moved if their actual size differs. */
            self->out += 1 + 5 + 1 + (role < 0 ? NAME_SIZE : strlen(ROLES[role])) + 8 + HEADER;
            content = self->out;
            if (!take_string(self)) return 0;
        } else {
            self->at = before;
            key = take_key(self, NULL_KEYS, COUNT(NULL_KEYS));
            if (key < 0 || seen >> key & 1 || !take_null(self)) return 0;
            seen |= 1u << key;
        }
    } while (take(self, ','));
    if (!take(self, '}') || role < 0 || !content) return 0;
    size_t size = self->out - content, name = strlen(ROLES[role]);
    uint8_t *out = begin;
    *out++ = size ? 0x82 : 0x81;
    memcpy(out, "\xA4role", 5);
    out[5] = (uint8_t)(0xA0 | name);
    memcpy(out + 6, ROLES[role], name);
    out += 6 + name;
    if (size) {
        size_t length = header_of(header, size, 1);
        if (out + 8 + length != content) memmove(out + 8 + length, content, size);
        memcpy(out, "\xA7" "content", 8);
        memcpy(out + 8, header, length);
        out += 8 + length;
    }
    self->out = out + size;
    uint8_t code = (uint8_t)role;
    return add(self, &self->role, &code, 1) && add_number(self, &self->from, out - self->base) &&
           add_number(self, &self->to, self->out - self->base);
}

static int take_messages(Reader *self) {
    uint8_t *begin = self->out++, header[5];
    int64_t count = 0;
    if (!take(self, '[')) return 0;
    do {
        if (!take_message(self)) return 0;
        count++;
    } while (take(self, ','));
    if (!take(self, ']')) return 0;
    size_t more = header_of(header, count, 0) - 1;
    if (more) {
        memmove(begin + 1 + more, begin + 1, self->out - begin - 1);
        self->out += more;
        for (int64_t n = 1; n <= count; n++) {
            ((int64_t *)(self->from.data + self->from.size))[-n] += more;
            ((int64_t *)(self->to.data + self->to.size))[-n] += more;
        }
    }
    memcpy(begin, header, 1 + more);
    return add_number(self, &self->messages, count);
}

/* Parse the id (a string, an integer or null) and discard it, because record keys do not depend on ids. */
static int take_id(Reader *self) {
    uint8_t *out = self->out;
    if (take(self, 'n')) return take_word(self, "ull");
    if (take(self, '"')) {
        self->at--;
        int taken = take_string(self);
        self->out = out;
        return taken;
    }
    take_word(self, "-");
    const uint8_t *digits = self->at;
    while (*self->at >= '0' && *self->at <= '9') self->at++;
    return self->at > digits && self->at - digits <= 18 && (*digits != '0' || self->at - digits == 1);
}

static int take_record(Reader *self) {
    static const char *const KEYS[] = {"messages", "id", "tools"};
    unsigned seen = 0;
    *self->out++ = 0x92;
    if (!take(self, '{')) return 0;
    do {
        int key = take_key(self, KEYS, COUNT(KEYS));
        if (key < 0 || seen >> key & 1) return 0;
        seen |= 1u << key;
        if (!(key == 0 ? take_messages(self) : key == 1 ? take_id(self) : take_null(self))) return 0;
    } while (take(self, ','));
    if (!take(self, '}') || !(seen & 1)) return 0;
    *self->out++ = 0x90;
    return 1;
}

/* Parse one line including its line end. If the line does not have the common form, restore the state and return 0. */
static int take_line(Reader *self) {
    Reader before = *self;
    if (*self->at == '{' && take_record(self)) {
        if (take(self, '\n') || self->at == self->end) return add_number(self, &self->stop, self->out - self->base);
    }
    self->at = before.at, self->out = before.out;
    self->messages.size = before.messages.size;
    self->role.size = before.role.size;
    self->from.size = before.from.size, self->to.size = before.to.size;
    return 0;
}

PyDoc_STRVAR(columns_doc,
             "columns(block: bytes, start: int) -> (end, data, messages, stop, role, from, to)\n\n"
             "Parse lines in the common form from `start` on. Return the offset after the last parsed line, the data,\n"
             "and columns. For each record: the number of messages and the end offset in the data. For each message:\n"
             "the role and the range of the text in the data. Numbers are int64, and roles are uint8.");

static PyObject *columns(PyObject *module, PyObject *args) {
    (void)module;
    PyObject *block, *found = NULL;
    char *data;
    Py_ssize_t size, start;
    if (!PyArg_ParseTuple(args, "On", &block, &start) || PyBytes_AsStringAndSize(block, &data, &size)) return NULL;
    if (start < 0 || start > size) {
        PyErr_SetString(PyExc_ValueError, "expected a start offset within the block");
        return NULL;
    }
    Reader self = {.at = (uint8_t *)data + start, .end = (uint8_t *)data + size};
    self.base = self.out = malloc(size - start + SLACK);
    self.no_memory = !self.base;
    while (!self.no_memory && self.at < self.end && take_line(&self)) continue;
    Column *all[] = {&self.messages, &self.stop, &self.role, &self.from, &self.to};
    if (self.no_memory) {
        PyErr_NoMemory();
    } else if ((found = PyTuple_New(2 + COUNT(all)))) {
        PyTuple_SetItem(found, 0, PyLong_FromSsize_t(self.at - (uint8_t *)data));
        PyTuple_SetItem(found, 1, PyBytes_FromStringAndSize((char *)self.base, self.out - self.base));
        for (size_t n = 0; n < COUNT(all); n++)
            PyTuple_SetItem(found, 2 + n, PyBytes_FromStringAndSize((char *)all[n]->data, all[n]->size));
        if (PyErr_Occurred()) Py_CLEAR(found);
    }
    for (size_t n = 0; n < COUNT(all); n++) free(all[n]->data);
    free(self.base);
    return found;
}

/* Duplicate keys. */

#define MAX_DEPTH 64
#define MAX_KEYS 64 /* maximum number of keys per object; limited because every pair of keys is compared */

typedef struct {
    const uint8_t *name;
    size_t size;
} Key;

/* Return the end of the string whose first character is at `at`, or NULL if the string is not closed. Set `escaped` if
   the string contains a backslash. */
static const uint8_t *skip_string(const uint8_t *at, const uint8_t *end, int *escaped) {
    for (; at < end && *at != '"'; at++)
        if (*at == '\\') {
            *escaped = 1;
            at++;
        }
    return at < end ? at + 1 : NULL;
}

/* Return 1 if an object in the JSON text may contain a key twice. Also return 1 for text that is too complex to
   check here, so that Python checks it. */
static int may_repeat_key(const uint8_t *at, const uint8_t *end) {
    Key keys[MAX_DEPTH * 8]; /* the keys of all open objects, innermost last */
    size_t first[MAX_DEPTH], count = 0, depth = 0;
    uint64_t is_object = 0; /* one bit per nesting level: 1 for an object, 0 for an array */
    int expects_key = 0;
    while (at < end) {
        uint8_t c = *at++;
        if (c == '"') {
            int escaped = 0;
            const uint8_t *name = at;
            if (!(at = skip_string(at, end, &escaped))) return 1;
            if (!expects_key) continue;
            size_t size = at - 1 - name, from = first[depth - 1];
            if (escaped || count - from >= MAX_KEYS || count == COUNT(keys)) return 1;
            for (size_t n = from; n < count; n++)
                if (keys[n].size == size && !memcmp(keys[n].name, name, size)) return 1;
            keys[count++] = (Key){name, size};
            expects_key = 0;
        } else if (c == '{' || c == '[') {
            if (depth == MAX_DEPTH) return 1;
            expects_key = c == '{';
            is_object = (is_object & ~(1ull << depth)) | (uint64_t)expects_key << depth;
            first[depth++] = count;
        } else if (c == '}' || c == ']') {
            if (!depth) return 1;
            count = first[--depth];
            expects_key = 0;
        } else if (c == ',') {
            expects_key = depth && is_object >> (depth - 1) & 1;
        }
    }
    return 0;
}

PyDoc_STRVAR(may_repeat_key_doc,
             "may_repeat_key(text: bytes) -> bool\n\n"
             "Whether an object in JSON text or JSON lines may have a duplicate key. True also means that only a JSON\n"
             "parser can decide.");

static PyObject *may_repeat_key_of(PyObject *module, PyObject *text) {
    (void)module;
    char *data;
    Py_ssize_t size;
    if (PyBytes_AsStringAndSize(text, &data, &size)) return NULL;
    return PyBool_FromLong(may_repeat_key((uint8_t *)data, (uint8_t *)data + size));
}

/* Record keys. */

typedef struct {
    int64_t size, start, number;
} Sized;

static int by_size(const void *one, const void *other) {
    int64_t a = ((const Sized *)one)->size, b = ((const Sized *)other)->size;
    return (a > b) - (a < b);
}

PyDoc_STRVAR(keys_doc,
             "keys(data: bytes, stop) -> bytes\n\n"
             "Return the first 16 bytes of the SHA-256 of each record. `stop` is an int64 array with the end offset of each\n"
             "record in `data`.");

static PyObject *keys(PyObject *module, PyObject *args) {
    (void)module;
    Py_buffer data, stop;
    if (!PyArg_ParseTuple(args, "y*y*", &data, &stop)) return NULL;
    Py_ssize_t count = stop.len / 8;
    PyObject *result = PyBytes_FromStringAndSize(NULL, 16 * count);
    Sized *records = PyMem_Malloc((count ? count : 1) * sizeof *records);
    int fits = stop.len % 8 == 0;
    if (result == NULL || records == NULL) goto end;
    uint8_t *out = (uint8_t *)PyBytes_AsString(result);
    Py_BEGIN_ALLOW_THREADS
    for (Py_ssize_t n = 0, start = 0; fits && n < count; n++) {
        int64_t end;
        memcpy(&end, (const uint8_t *)stop.buf + 8 * n, 8);
        fits = start <= end && end <= data.len;
        if (fits) records[n] = (Sized){end - start, start, n}, start = end;
    }
    /* Hash records of similar size at the same time. */
    if (fits) qsort(records, count, sizeof *records, by_size);
    int way = sha256_way(), lanes = sha256_lanes(way);
    for (Py_ssize_t at = 0; fits && at < count; at += lanes) {
        const uint8_t *texts[SHA256_AVX512];
        uint8_t hashes[SHA256_AVX512][32];
        int64_t sizes[SHA256_AVX512];
        int several = (int)(count - at < lanes ? count - at : lanes);
        for (int n = 0; n < several; n++)
            texts[n] = (const uint8_t *)data.buf + records[at + n].start, sizes[n] = records[at + n].size;
        sha256_unpadded(texts, sizes, several, way, hashes);
        for (int n = 0; n < several; n++) memcpy(out + 16 * records[at + n].number, hashes[n], 16);
    }
    Py_END_ALLOW_THREADS
end:
    PyMem_Free(records);
    PyBuffer_Release(&data), PyBuffer_Release(&stop);
    if (result != NULL && records != NULL && fits) return result;
    Py_XDECREF(result);
    if (result != NULL && records != NULL)
        PyErr_SetString(PyExc_ValueError, "expected increasing offsets within the data");
    else if (!PyErr_Occurred())
        PyErr_NoMemory();
    return NULL;
}

static PyMethodDef methods[] = {{"columns", columns, METH_VARARGS, columns_doc},
                                {"may_repeat_key", may_repeat_key_of, METH_O, may_repeat_key_doc},
                                {"keys", keys, METH_VARARGS, keys_doc},
                                {NULL, NULL, 0, NULL}};
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_columns", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__columns(void) { return PyModule_Create(&definition); }
