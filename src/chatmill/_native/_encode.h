/* Encode the texts of one call. This code does not use Python objects, so it can run without the GIL.

   Concurrent calls share a model, which is not modified after its creation. A call writes only to its own workspace,
   which also caches the ids of merged words. */

#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include "_starts.h"
#include "_table.h"

typedef struct {
    Cutter cutter;
    Table table; /* the initial word table, which is copied to every new workspace */
    Heap classes;
    Heap added; /* added tokens to search for before splitting, each stored as one length byte followed by its bytes */
} Model;

typedef struct Workspace {
    Cutter cutter;
    Table table; /* the workspace owns `words`, `bytes` and `ids`; the model owns everything else */
    Heap text, out, offsets, odd;
    struct Workspace *next;
} Workspace;

static int has_added(const Model *self, const uint8_t *text, size_t size) {
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

static void free_workspace(Workspace *work) {
    Heap *heaps[] = {&work->table.bytes, &work->table.ids, &work->text, &work->out, &work->offsets, &work->odd};
    for (size_t n = 0; n < sizeof heaps / sizeof *heaps; n++) free(heaps[n]->data);
    free_large(work->table.words, sizeof *work->table.words << work->table.word_bits);
    free(work);
}

static Workspace *new_workspace(const Model *self) {
    Workspace *work = calloc(1, sizeof *work);
    if (!work) return NULL;
    work->cutter = self->cutter;
    work->table = self->table;
    work->table.bytes = work->table.ids = (Heap){NULL, 0, 0};
    work->table.process = getpid();
    work->table.words = copy_words(&self->table);
    if (work->table.words && append(&work->table.bytes, self->table.bytes.data, self->table.bytes.size) &&
        append(&work->table.ids, self->table.ids.data, self->table.ids.size))
        return work;
    free_workspace(work);
    return NULL;
}

/* Append the token ids of `work->text`, or set `odd` if the caller must encode the text. Return 0 if out of memory. */
static int encode_text(const Model *self, Workspace *work, size_t size) {
    size_t room = work->out.size + (size + FEW) * sizeof(uint32_t);
    if (!reserve(&work->out, room)) return 0;
    Cutter *cutter = &work->cutter;
    uint32_t *out = (uint32_t *)(work->out.data + work->out.size);
    const uint8_t *at = work->text.data, *end = at + size;
    memset(work->text.data + size, 0, BEYOND);
    work->text.data[size] = STOP;
    cutter->odd = has_added(self, at, size);
    if (cutter->odd) return 1;
    Batch batch;
    batch.count = 0;
    while (at < end) {
        uint64_t starts = starts_after(cutter, at, end - at);
        if (starts) {
            add_words(&work->table, &batch, at, starts);
            at += 63 - __builtin_clzll(starts);
        } else {
            const uint8_t *stop = *at == STOP ? NULL : word_at(cutter, at);
            if (cutter->odd || !stop || stop - at > LONGEST) {
                cutter->odd = 1;
                return 1;
            }
            add_word(&work->table, &batch, at, stop - at);
            at = stop;
        }
        if (batch.count >= FULL && !(out = write_batch(&work->table, &batch, out))) return 0;
    }
    if (!(out = write_batch(&work->table, &batch, out))) return 0;
    work->out.size = (uint8_t *)out - work->out.data;
    return 1;
}

static int note_offset(Workspace *work) {
    int64_t offset = work->out.size / sizeof(uint32_t);
    return append(&work->offsets, &offset, sizeof offset);
}

typedef struct {
    const char *data;
    ptrdiff_t size;
} Text;

typedef struct {
    ptrdiff_t count;
    const Text *texts; /* the texts passed to `encode`, or NULL in a call to `encode_columns` */
    /* The arguments of `encode_columns`: the columns, and the texts to add before and after a text of each kind. */
    const uint8_t *data, *start, *stop, *kind;
    int64_t size;
    const Text *before, *after;
    ptrdiff_t kinds;
} Call;

/* Read an integer from a column that may be unaligned. */
static inline int64_t number_at(const uint8_t *data, size_t n) {
    int64_t number;
    memcpy(&number, data + 8 * n, 8);
    return number;
}

typedef enum { DONE, NO_MEMORY, NO_KIND, OUTSIDE } Result;

/* Copy text `n` of a call to the workspace. Another thread may change the columns during the copy, so every number
   is read only once. */
static Result copy_text(const Call *call, ptrdiff_t n, Heap *text, size_t *size) {
    Text parts[3] = {{"", 0}, {"", 0}, {"", 0}};
    if (call->texts) {
        parts[1] = call->texts[n];
    } else {
        int64_t from = number_at(call->start, n), to = number_at(call->stop, n);
        uint8_t kind = call->kind[n];
        if (from < 0 || to < from || to > call->size) return OUTSIDE;
        if (kind >= call->kinds) return NO_KIND;
        parts[0] = call->before[kind];
        parts[1] = (Text){(const char *)call->data + from, to - from};
        parts[2] = call->after[kind];
    }
    *size = parts[0].size + parts[1].size + parts[2].size;
    if (!reserve(text, *size + BEYOND)) return NO_MEMORY;
    uint8_t *at = text->data;
    for (int part = 0; part < 3; at += parts[part].size, part++)
        if (parts[part].size) memcpy(at, parts[part].data, parts[part].size);
    return DONE;
}

/* Encode all texts of a call. The caller does not need to hold the GIL. */
static Result encode_call(const Model *self, Workspace *work, const Call *call, int normal) {
    work->cutter.normal = normal;
    work->out.size = work->offsets.size = work->odd.size = 0;
    if (!note_offset(work) || !own_words(&work->table)) return NO_MEMORY;
    for (ptrdiff_t n = 0; n < call->count; n++) {
        size_t size;
        int64_t number = n;
        Result result = copy_text(call, n, &work->text, &size);
        if (result != DONE) return result;
        if (!encode_text(self, work, size) || !note_offset(work)) return NO_MEMORY;
        if (work->cutter.odd && !append(&work->odd, &number, sizeof number)) return NO_MEMORY;
    }
    return DONE;
}
