/* A hash table of words and their ids. */

#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "word keys are read as little-endian numbers; use the Python implementation on big-endian machines"
#endif

#define LONGEST 512           /* maximum length of a word in bytes; must be a power of two */
#define MERGES (1u << 22)     /* limit on merges, so that a merge rank and a position in a word fit into 32 bits */
#define SHORT 15
#define BYTE_PAIRS (1u << 16)
#define FEW 3
#define MOST (1u << 16)       /* maximum number of words in addition to those of the vocabulary */
#define MOST_BYTES (1u << 25) /* maximum number of additional bytes for words with the flag ELSEWHERE */
#define ELSEWHERE (1u << 31)  /* flag in `count`: the bytes and ids of a word are stored outside the table */

/* The lookup key of a word. For a short word, `low` and `high` contain the bytes of the word, and the top byte of
   `high` is the length. For a long word, `low` is a hash, and `high` contains the length and has a top byte of 0xFF. */
typedef struct {
    uint64_t low, high;
} Key;

typedef struct {
    Key key;
    uint32_t ids[FEW]; /* the token ids or, with the flag ELSEWHERE, the offsets of the word's bytes and ids */
    uint32_t count;
} Word;

typedef struct {
    uint64_t pair;
    uint32_t rank, id;
} Merge;

/* The result of looking up a pair of tokens: the rank of its merge, or UINT32_MAX if there is none, and the new id. */
typedef struct {
    uint32_t rank, id;
} Merged;

typedef struct {
    uint8_t *data;
    size_t size, room;
} Heap;

typedef struct {
    uint32_t byte_ids[256];
    Merge *merges;
    uint8_t *merge_tags; /* for each entry of `merges`: 0 if it is empty, otherwise TAG and some bits of its hash */
    int merge_bits;
    Merged *byte_pairs; /* the merge of each pair of bytes */
    Heap vocabulary, places, numbers; /* the words of the vocabulary: their bytes, offsets and ids */
    int whole;                        /* whether every word of the vocabulary is a single token that needs no merging */
    Word *words;
    uint32_t num_words, most_words;
    size_t most_bytes;
    int word_bits;
    pid_t process;
    Heap bytes, ids; /* the bytes and ids of words with the flag ELSEWHERE */
} Table;

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

/* Allocate zeroed memory for random access, in huge pages if the system supports them. Memory from the heap would not
   use huge pages, because the heap reuses small pages. */
#define LARGE_PAGE ((size_t)1 << 21)

static size_t in_pages(size_t size) { return (size + LARGE_PAGE - 1) / LARGE_PAGE * LARGE_PAGE; }

static void *large(size_t size) {
    size = in_pages(size);
    uint8_t *data = mmap(NULL, size + LARGE_PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (data == MAP_FAILED) return NULL;
    size_t before = in_pages((uintptr_t)data) - (uintptr_t)data;
    if (before) munmap(data, before);
    if (before < LARGE_PAGE) munmap(data + before + size, LARGE_PAGE - before);
#ifdef MADV_HUGEPAGE
    madvise(data + before, size, MADV_HUGEPAGE);
#endif
    return data + before;
}

static void free_large(void *data, size_t size) {
    if (data) munmap(data, in_pages(size));
}

static inline uint64_t mixed(uint64_t low, uint64_t high) {
    unsigned __int128 product = (unsigned __int128)(low ^ 0x9E3779B97F4A7C15u) * (high ^ 0xD6E8FEB86659FD93u);
    return (uint64_t)product ^ (uint64_t)(product >> 64);
}

#define TAG 0x80

static inline uint64_t pair_of(uint32_t left, uint32_t right) { return (uint64_t)left << 32 | right; }

static inline uint8_t tag_of(uint64_t hash) { return (uint8_t)(TAG | hash >> 8); }

/* Return the index of a pair in `merges`, or of the empty entry at which to insert it. Most pairs that are looked up
   cannot be merged. The tags, which fit into the processor's cache, show this without an access to `merges`. */
static inline size_t merge_index(const Table *self, uint64_t pair) {
    size_t mask = ((size_t)1 << self->merge_bits) - 1;
    uint64_t hash = pair * 0x9E3779B97F4A7C15u;
    uint8_t tag = tag_of(hash);
    for (size_t at = hash >> (64 - self->merge_bits);; at = (at + 1) & mask) {
        if (!self->merge_tags[at] || (self->merge_tags[at] == tag && self->merges[at].pair == pair)) return at;
    }
}

static inline Merged merge_of(const Table *self, uint32_t left, uint32_t right) {
    size_t at = merge_index(self, pair_of(left, right));
    if (!self->merge_tags[at]) return (Merged){UINT32_MAX, 0};
    return (Merged){self->merges[at].rank, self->merges[at].id};
}

/* Add the merge with rank `rank`; merges must be added in the order of their ranks. */
static void add_merge(Table *self, uint32_t left, uint32_t right, uint32_t rank, uint32_t id) {
    uint64_t pair = pair_of(left, right);
    size_t at = merge_index(self, pair);
    self->merges[at] = (Merge){pair, rank, id};
    self->merge_tags[at] = tag_of(pair * 0x9E3779B97F4A7C15u);
}

static void fill_byte_pairs(Table *self) {
    for (uint32_t left = 0; left < 256; left++)
        for (uint32_t right = 0; right < 256; right++)
            self->byte_pairs[left << 8 | right] = merge_of(self, self->byte_ids[left], self->byte_ids[right]);
}

#define NEVER INT32_MAX

/* Return the merge rank of a pair in the high bits, and the position of the pair in the word in the low bits. Pairs
   with lower values are merged first; a pair that cannot be merged has the value NEVER. The values are signed, because
   SSE2 compares only signed integers. */
static inline int32_t rank_at(Merged merge, uint32_t at) {
    return merge.rank == UINT32_MAX ? NEVER : (int32_t)(merge.rank * LONGEST | at);
}

static inline int32_t pair_at(const Table *self, const uint32_t *ids, uint32_t at, uint32_t next, uint32_t *into) {
    Merged merge = merge_of(self, ids[at], ids[next]);
    *into = merge.id;
    return rank_at(merge, at);
}

#define GROUP 16 /* LONGEST must be a multiple of GROUP */

static inline int32_t least_of(const int32_t *pair, uint32_t count) {
    int32_t least = NEVER;
    for (uint32_t at = 0; at < count; at++) least = pair[at] < least ? pair[at] : least;
    return least;
}

/* Repeatedly merge the pair with the lowest rank, leftmost first, until no pair can be merged. `least` contains the
   lowest value of each group of pairs, so that a merge does not compare all pairs of a long word. */
static uint32_t merged(const Table *self, const uint8_t *word, uint32_t size, uint32_t *ids) {
    int32_t pair[LONGEST], least[LONGEST / GROUP];
    uint32_t into[LONGEST], count = 0, groups = (size + GROUP - 1) / GROUP;
    uint16_t next[LONGEST + 1], before[LONGEST + 1];
    for (uint32_t at = 0; at < size; at++) {
        ids[at] = self->byte_ids[word[at]];
        next[at] = (uint16_t)(at + 1), before[at + 1] = (uint16_t)at;
    }
    for (uint32_t at = size - 1; at < groups * GROUP; at++) pair[at] = NEVER;
    for (uint32_t at = 0; at + 1 < size; at++) {
        Merged merge = self->byte_pairs[word[at] << 8 | word[at + 1]];
        into[at] = merge.id, pair[at] = rank_at(merge, at);
    }
    for (uint32_t n = 0; n < groups; n++) least[n] = least_of(pair + n * GROUP, GROUP);
    for (;;) {
        int32_t lowest = least_of(least, groups);
        if (lowest == NEVER) break;
        uint32_t at = (uint32_t)lowest % LONGEST, gone = next[at], after = next[gone], first = at;
        ids[at] = into[at];
        pair[gone] = NEVER;
        next[at] = (uint16_t)after, before[after] = (uint16_t)at;
        pair[at] = after < size ? pair_at(self, ids, at, after, &into[at]) : NEVER;
        if (at) {
            first = before[at];
            pair[first] = pair_at(self, ids, first, at, &into[first]);
        }
        for (uint32_t n = first / GROUP; n <= gone / GROUP; n++) least[n] = least_of(pair + n * GROUP, GROUP);
    }
    for (uint32_t at = 0; at < size; at = next[at]) ids[count++] = ids[at];
    return count;
}

static __attribute__((noinline)) Key long_key(const uint8_t *word, size_t size) {
    Key key = {0, (uint64_t)0xFF << 56 | size};
    for (size_t at = 0; at < size; at += 8) {
        uint64_t part = 0;
        memcpy(&part, word + at, size - at < 8 ? size - at : 8);
        key.low = mixed(key.low + at, part);
    }
    return key;
}

static inline Key key_of(const uint8_t *word, size_t size) {
    static const uint8_t KEPT[31] = {255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255};
    if (size > SHORT) return long_key(word, size);
    Key key;
    uint64_t low, high;
    memcpy(&low, KEPT + SHORT - size, 8);
    memcpy(&high, KEPT + SHORT - size + 8, 8);
    memcpy(&key.low, word, 8);
    memcpy(&key.high, word + 8, 8);
    key.low &= low;
    key.high = (key.high & high) | (uint64_t)size << 56;
    return key;
}

static inline uint64_t hash_of(Key key) { return mixed(key.low, key.high); }

static void place(Word *words, int bits, const Word *word) {
    size_t mask = ((size_t)1 << bits) - 1;
    size_t at = hash_of(word->key) & mask;
    while (words[at].key.high) at = (at + 1) & mask;
    words[at] = *word;
}

static int enlarge(Table *self) {
    size_t size = sizeof *self->words << (self->word_bits + 1);
    Word *words = large(size);
    if (!words) return 0;
    for (size_t at = 0; at < (size_t)1 << self->word_bits; at++)
        if (self->words[at].key.high) place(words, self->word_bits + 1, &self->words[at]);
    free_large(self->words, size / 2);
    self->words = words;
    self->word_bits++;
    return 1;
}

static int keep(Table *self, Word *word, const uint8_t *bytes, size_t size, const uint32_t *ids, uint32_t count) {
    if (4 * self->num_words >= 3u << self->word_bits && !enlarge(self)) return 0;
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

/* Reset the table to the words of the vocabulary, or to an empty table. */
static int begin(Table *self, int with_vocabulary) {
    memset(self->words, 0, sizeof(Word) << self->word_bits);
    self->num_words = 0;
    self->bytes.size = self->ids.size = 0;
    const int64_t *at = (const int64_t *)self->places.data;
    size_t count = self->numbers.size / sizeof(uint32_t);
    for (size_t n = 0; with_vocabulary && n < count; n++) {
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

static int learn(Table *self, Word *fresh, const uint8_t *bytes, size_t size) {
    uint32_t ids[LONGEST];
    /* Reset a full table to limit its memory use. Add the vocabulary again only if its words need no merging. */
    int full = self->num_words >= self->most_words || self->bytes.size + self->ids.size >= self->most_bytes;
    if (full && !begin(self, self->whole)) return 0;
    return keep(self, fresh, bytes, size, ids, merged(self, bytes, (uint32_t)size, ids));
}

static inline size_t word_mask(const Table *self) { return ((size_t)1 << self->word_bits) - 1; }

/* Write the token ids of a word to `out`; return the output position after them, or NULL if out of memory. */
static __attribute__((noinline)) uint32_t *write_ids(Table *self, Key key, uint64_t hash, const uint8_t *bytes,
                                                     size_t size, uint32_t *out) {
    Word fresh = {{0, 0}, {0}, 0};
    const Word *word;
    size_t mask = word_mask(self);
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

#define FULL 32 /* number of words after which a batch is written */

typedef struct {
    Key key;
    uint64_t hash;
    const uint8_t *bytes;
    size_t size;
} Lookup;

/* Words to look up. The table entry of a word is prefetched when the word is added, and read when the batch is
   written, because memory latency dominates the run time. */
typedef struct {
    Lookup words[FULL + 64];
    size_t count;
} Batch;

static inline void prepare(Lookup *word, const Word *words, size_t mask, const uint8_t *bytes, size_t size) {
    word->key = key_of(bytes, size);
    word->hash = hash_of(word->key);
    word->bytes = bytes, word->size = size;
    __builtin_prefetch(&words[word->hash & mask]);
}

static inline void add_word(const Table *self, Batch *batch, const uint8_t *bytes, size_t size) {
    prepare(&batch->words[batch->count++], self->words, word_mask(self), bytes, size);
}

/* Add the words that start at `at` and at each bit of `starts`; the highest bit marks the end of the last word. */
static inline void add_words(const Table *self, Batch *batch, const uint8_t *at, uint64_t starts) {
    const Word *words = self->words;
    size_t mask = word_mask(self), begin = 0;
    Lookup *word = &batch->words[batch->count];
    for (; starts; starts &= starts - 1, word++) {
        size_t end = __builtin_ctzll(starts);
        prepare(word, words, mask, at + begin, end - begin);
        begin = end;
    }
    batch->count = word - batch->words;
}

/* Write the token ids of the words of a batch to `out`, and empty the batch. Return the output position after the ids,
   or NULL if out of memory. */
static inline uint32_t *write_batch(Table *self, Batch *batch, uint32_t *out) {
    const Word *words = self->words;
    size_t mask = word_mask(self);
    for (const Lookup *word = batch->words, *last = word + batch->count; word < last; word++) {
        const Word *found = &words[word->hash & mask];
        if (found->key.low == word->key.low && found->key.high == word->key.high && found->count <= FEW) {
            memcpy(out, found->ids, sizeof found->ids);
            out += found->count;
            continue;
        }
        if (!(out = write_ids(self, word->key, word->hash, word->bytes, word->size, out))) return NULL;
        words = self->words, mask = word_mask(self);
    }
    batch->count = 0;
    return out;
}

static Word *copy_words(const Table *self) {
    size_t size = sizeof *self->words << self->word_bits;
    Word *words = large(size);
    return words ? memcpy(words, self->words, size) : NULL;
}

/* Copy the table after a fork, because writing to copy-on-write memory would split its huge pages. */
static int own_words(Table *self) {
    if (self->process == getpid()) return 1;
    Word *words = copy_words(self);
    if (!words) return 0;
    free_large(self->words, sizeof *words << self->word_bits);
    self->words = words;
    self->process = getpid();
    return 1;
}
