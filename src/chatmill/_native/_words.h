/* The words of a text, as the pattern of its tokenizer would cut it. */

#include <stddef.h>
#include <stdint.h>
#ifdef __SSE2__
#include <emmintrin.h>
#endif

/* Classes of characters as in byte_bpe.py, with DOUBT added where normalizing may change a text; WIDE and END are those
   of bytes. */
enum { LETTER, NUMBER, SPACE, OTHER, UNKNOWN, WIDE, END, DOUBT = 8 };
enum { GPT2, CL100K };

#define STOP 0xFF          /* the byte behind a text: no UTF-8 has it */
#define BEYOND 80          /* bytes behind a text that may be read */

typedef struct {
    int pattern, digits;
    uint8_t lead[256]; /* the class of an ASCII character by its byte; WIDE, END */
    const uint8_t *classes;
    size_t known; /* how many characters have a class */
    int normal;   /* whether texts are known to be normalized */
    int odd;      /* set by a text whose words cannot be told here */
} Cutter;

/* Bytes that are no UTF-8 end the words: what follows them is not looked at, so nothing is read beyond a text. */
static inline uint8_t wide(Cutter *self, const uint8_t *at, int *size) {
    uint32_t c = *at;
    int more = c < 0xE0 ? 1 : c < 0xF0 ? 2 : 3;
    *size = 1 + more;
    int begins = c >= 0xC2;
    c &= 0x3F >> more;
    for (int n = 1; n <= more; n++) {
        if (!begins || (at[n] & 0xC0) != 0x80) {
            self->odd = *size = 1;
            return END;
        }
        c = c << 6 | (at[n] & 0x3F);
    }
    uint8_t class = c < self->known ? self->classes[c] : UNKNOWN;
    if (class == UNKNOWN || (class & DOUBT && !self->normal)) self->odd = 1;
    return class & ~DOUBT;
}

static inline uint8_t class_of(Cutter *self, const uint8_t *at, int *size) {
    uint8_t class = self->lead[*at];
    *size = 1;
    return class == WIDE ? wide(self, at, size) : class;
}

static inline const uint8_t *run_of(Cutter *self, const uint8_t *at, uint8_t class) {
    for (int size;; at += size) {
        while (self->lead[*at] == class) at++;
        if (self->lead[*at] != WIDE || wide(self, at, &size) != class) return at;
    }
}

/* Of a run of spaces before a word, the last is not the run's. */
static inline const uint8_t *spaces(const uint8_t *from, const uint8_t *to) {
    if (*to == STOP) return to;
    const uint8_t *last = to - 1;
    while ((*last & 0xC0) == 0x80) last--;
    return last > from ? last : to;
}

/* The end of 's, 't, 're, 've, 'm, 'll or 'd; with `fold` 0x20 in either case. */
static inline const uint8_t *contraction(const uint8_t *at, uint8_t fold) {
    uint8_t first = at[1] | fold, second = at[1] == STOP ? STOP : at[2] | fold;
    if (first == 's' || first == 't' || first == 'm' || first == 'd') return at + 2;
    if ((first == 'r' || first == 'v') && second == 'e') return at + 3;
    return first == 'l' && second == 'l' ? at + 3 : NULL;
}

static inline const uint8_t *word_gpt2(Cutter *self, const uint8_t *at) {
    int size;
    const uint8_t *end;
    if (*at == ' ') {
        uint8_t class = class_of(self, at + 1, &size);
        if (class != SPACE && class != END) return run_of(self, at + 1 + size, class);
    } else {
        if (*at == '\'' && (end = contraction(at, 0))) return end;
        uint8_t class = class_of(self, at, &size);
        if (class != SPACE) return run_of(self, at + size, class);
    }
    return spaces(at, run_of(self, at, SPACE));
}

static inline const uint8_t *line_ends(const uint8_t *at) {
    while (*at == '\n' || *at == '\r') at++;
    return at;
}

static inline const uint8_t *word_cl100k(Cutter *self, const uint8_t *at) {
    int size, next_size;
    const uint8_t *end;
    if (*at == '\'') {
        if ((end = contraction(at, 0x20))) return end;
        /* A long s is an s where case does not count. */
        if (at[1] == 0xC5 && at[2] == 0xBF) self->odd = 1;
    }
    uint8_t class = class_of(self, at, &size);
    if (class == LETTER) return run_of(self, at + size, LETTER);
    if (class == NUMBER) {
        end = at + size;
        for (int left = self->digits - 1; left && class_of(self, end, &size) == NUMBER; left--) end += size;
        return end;
    }
    uint8_t next = class_of(self, at + size, &next_size);
    if (next == LETTER && *at != '\n' && *at != '\r') return run_of(self, at + size + next_size, LETTER);
    if (class != SPACE) return line_ends(run_of(self, at + size, class));
    if (*at == ' ' && next == OTHER) return line_ends(run_of(self, at + size + next_size, OTHER));
    end = run_of(self, at, SPACE);
    for (const uint8_t *last = end; last > at; last--)
        if (last[-1] == '\n' || last[-1] == '\r') return last;
    return spaces(at, end);
}

#ifdef __SSE2__

static inline uint64_t bits_between(__m128i bytes, int first, int count) {
    __m128i shifted = _mm_add_epi8(bytes, _mm_set1_epi8((char)(-128 - first)));
    return (uint32_t)_mm_movemask_epi8(_mm_cmplt_epi8(shifted, _mm_set1_epi8((char)(-128 + count))));
}

static inline uint64_t bits_equal(__m128i bytes, char byte) {
    return (uint32_t)_mm_movemask_epi8(_mm_cmpeq_epi8(bytes, _mm_set1_epi8(byte)));
}

/* The bytes of the next 64 at which word_gpt2 would begin a word, the end of the text among them, as bits; only those
   that can be told without looking further, and not the first, which is one. */
static inline uint64_t starts_gpt2(const uint8_t *at, size_t left) {
    uint64_t letter = 0, number = 0, space = 0, blank = 0, quote = 0, high = 0;
    for (int part = 0; part < 64; part += 16) {
        __m128i bytes = _mm_loadu_si128((const __m128i *)(at + part));
        letter |= bits_between(_mm_or_si128(bytes, _mm_set1_epi8(0x20)), 'a', 26) << part;
        number |= bits_between(bytes, '0', 10) << part;
        space |= bits_between(bytes, '\t', 5) << part;
        blank |= bits_equal(bytes, ' ') << part;
        quote |= bits_equal(bytes, '\'') << part;
        high |= (uint64_t)(uint32_t)_mm_movemask_epi8(bytes) << part;
    }
    space |= blank;
    const uint64_t one = 1, all = ~(uint64_t)0;
    int ends = left < 62;
    uint64_t inside = left < 64 ? (one << left) - 1 : all;
    uint64_t other = ~(letter | number | space);
    uint64_t goes_on = (letter & letter << 1) | (number & number << 1) | (other & other << 1) | blank << 1;
    uint64_t before_word = ~(space >> 1) & inside >> 1;
    uint64_t starts = ((~space & ~goes_on) | (space & (~(space << 1) | before_word))) & inside;
    if (ends) starts |= one << left;
    for (uint64_t quotes = quote & starts & (all >> 3); quotes; quotes &= quotes - 1) {
        int n = __builtin_ctzll(quotes);
        const uint8_t *stop = contraction(at + n, 0);
        if (stop) starts = (starts & ~(one << (n + 1))) | one << (stop - at);
    }
    uint64_t told = ends ? all : (one << 61) - 1;
    if (high &= inside) told &= ((high & -high) >> 1) - 1;
    return starts & told & ~one;
}

#else
static inline uint64_t starts_gpt2(const uint8_t *at, size_t left) {
    (void)at, (void)left;
    return 0;
}
#endif

static inline const uint8_t *word_at(Cutter *self, const uint8_t *at) {
    return self->pattern == GPT2 ? word_gpt2(self, at) : word_cl100k(self, at);
}

/* Where words begin after the one that begins here, as bits of the next 64 bytes; 0 if that has to be seen by word_at. */
static inline uint64_t starts_after(const Cutter *self, const uint8_t *at, size_t left) {
    return self->pattern == GPT2 && *at < 0x80 ? starts_gpt2(at, left) : 0;
}
