/* Split any text into words, one word at a time, with the same result as the tokenizer's regular expression.
   `_starts.h` splits 64 bytes at a time and must give the same words as this file. */

#include <stddef.h>
#include <stdint.h>

/* The character classes must match split_pattern.py. DOUBT is added to the class of a character that normalization may
   change. WIDE and END are classes of single bytes, not of characters. Patterns that do not distinguish letter case use
   LETTER for all letters. */
enum { LETTER, UPPER, LOWER, MARK, NUMBER, SPACE, OTHER, CONTROL, CJK_LETTER, CJK_OTHER, UNKNOWN, WIDE, END, DOUBT = 16 };
enum { GPT2, CL100K, QWEN2, O200K, TEKKEN, DEEPSEEK, PATTERNS };

#define STOP 0xFF          /* end marker after a text; this byte never occurs in UTF-8 */
#define BEYOND 80          /* number of readable bytes after a text */

typedef struct {
    int pattern;
    uint8_t lead[256]; /* for each byte value: the class of the ASCII character, WIDE, or END */
    const uint8_t *classes;
    size_t known; /* number of code points in `classes` */
    int normal;   /* whether texts are known to be normalized */
    int odd;      /* whether the caller must encode the current text */
} Cutter;

/* Return the class that the caller's table must contain for an ASCII character. */
static inline uint8_t ascii_class(int pattern, int c) {
    int cased = pattern == O200K || pattern == TEKKEN;
    if (c >= 'a' && c <= 'z') return cased ? LOWER : LETTER;
    if (c >= 'A' && c <= 'Z') return cased ? UPPER : LETTER;
    if (c >= '0' && c <= '9') return NUMBER;
    if (c == ' ' || (c >= '\t' && c <= '\r')) return SPACE;
    return pattern == DEEPSEEK && (c < ' ' || c == 0x7F) ? CONTROL : OTHER;
}

/* Return the class of a multi-byte character. For invalid UTF-8, return END, so that splitting stops before any byte
   after the text is read. */
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

/* Sets of character classes, with one bit per class. */
#define SET(class) (1u << (class))
#define LETTERS (SET(LETTER) | SET(UPPER) | SET(LOWER) | SET(MARK))

static inline int is_in(uint32_t set, uint8_t class) { return set >> class & 1; }

/* Return the end of the run of characters whose class is in `set`. */
static inline const uint8_t *run_of(Cutter *self, const uint8_t *at, uint32_t set) {
    for (int size;; at += size) {
        while (is_in(set, self->lead[*at])) at++;
        if (self->lead[*at] != WIDE || !is_in(set, wide(self, at, &size))) return at;
    }
}

static inline const uint8_t *last_character(const uint8_t *end) {
    do end--;
    while ((*end & 0xC0) == 0x80);
    return end;
}

static inline int is_line_end(uint8_t byte) { return byte == '\n' || byte == '\r'; }

/* Return the end of a run of spaces. If a word follows the run, the last space belongs to the word. */
static inline const uint8_t *spaces(const uint8_t *from, const uint8_t *to) {
    if (*to == STOP) return to;
    const uint8_t *last = last_character(to);
    return last > from ? last : to;
}

/* Like `spaces`, but for patterns that end a run of spaces after its last line end. */
static inline const uint8_t *lines(const uint8_t *from, const uint8_t *to, int before_word) {
    for (const uint8_t *last = to; last > from; last--)
        if (is_line_end(last[-1])) return last;
    return before_word ? spaces(from, to) : to;
}

/* Return the end of the contraction ('s, 't, 're, 've, 'm, 'll or 'd) at `at`, or NULL. With a `fold` of 0x20, ignore
   case. */
static inline const uint8_t *contraction(const uint8_t *at, uint8_t fold) {
    uint8_t first = at[1] | fold, second = at[1] == STOP ? STOP : at[2] | fold;
    if (first == 's' || first == 't' || first == 'm' || first == 'd') return at + 2;
    if ((first == 'r' || first == 'v') && second == 'e') return at + 3;
    return first == 'l' && second == 'l' ? at + 3 : NULL;
}

/* Like `contraction`, but ignore case and return NULL if `at` is not an apostrophe. If a long s (U+017F) follows the
   apostrophe, let the caller encode the text: the regular expression ignores case and matches a long s as an s. */
static inline const uint8_t *contraction_folded(Cutter *self, const uint8_t *at) {
    if (*at != '\'') return NULL;
    if (at[1] == 0xC5 && at[2] == 0xBF) self->odd = 1;
    return contraction(at, 0x20);
}

/* Return the maximum number of digits in a word. GPT-2 has no limit and does not call this function. */
static inline int most_digits(int pattern) { return pattern == QWEN2 || pattern == TEKKEN ? 1 : 3; }

static inline const uint8_t *digits_of(Cutter *self, const uint8_t *end) {
    int size;
    for (int left = most_digits(self->pattern) - 1; left && class_of(self, end, &size) == NUMBER; left--) end += size;
    return end;
}

static inline const uint8_t *word_gpt2(Cutter *self, const uint8_t *at) {
    int size;
    const uint8_t *end;
    if (*at == ' ') {
        uint8_t class = class_of(self, at + 1, &size);
        if (class != SPACE && class != END) return run_of(self, at + 1 + size, SET(class));
    } else {
        if (*at == '\'' && (end = contraction(at, 0))) return end;
        uint8_t class = class_of(self, at, &size);
        if (class != SPACE) return run_of(self, at + size, SET(class));
    }
    return spaces(at, run_of(self, at, SET(SPACE)));
}

/* Skip line ends that belong to the preceding word; in some patterns, also skip slashes. */
static inline const uint8_t *line_ends(const uint8_t *at, int slashes) {
    while (is_line_end(*at) || (slashes && *at == '/')) at++;
    return at;
}

static inline const uint8_t *word_cl100k(Cutter *self, const uint8_t *at) {
    int size, next_size;
    const uint8_t *end = contraction_folded(self, at);
    if (end) return end;
    uint8_t class = class_of(self, at, &size);
    if (class == LETTER) return run_of(self, at + size, SET(LETTER));
    if (class == NUMBER) return digits_of(self, at + size);
    uint8_t next = class_of(self, at + size, &next_size);
    if (next == LETTER && !is_line_end(*at)) return run_of(self, at + size + next_size, SET(LETTER));
    if (class != SPACE) return line_ends(run_of(self, at + size, SET(class)), 0);
    if (*at == ' ' && next == OTHER) return line_ends(run_of(self, at + size + next_size, SET(OTHER)), 0);
    return lines(at, run_of(self, at, SET(SPACE)), 1);
}

/* Match [upper or caseless]* [lower or caseless]+ or [upper or caseless]+. Without a lowercase letter, the word ends
   after its last caseless character, if it has one. */
static inline const uint8_t *cased_letters(Cutter *self, const uint8_t *at) {
    const uint8_t *caseless = NULL;
    for (int size;; at += size) {
        uint8_t class = class_of(self, at, &size);
        if (class == LOWER) return run_of(self, at + size, SET(LOWER) | SET(LETTER) | SET(MARK));
        if (class == LETTER || class == MARK) caseless = at + size;
        else if (class != UPPER) return caseless ? caseless : at;
    }
}

static inline const uint8_t *word_o200k(Cutter *self, const uint8_t *at) {
    int size, next_size;
    uint8_t class = class_of(self, at, &size);
    if (class == NUMBER) return digits_of(self, at + size);
    uint8_t next = class_of(self, at + size, &next_size);
    int begins = is_in(LETTERS, class);
    if (begins || (is_in(LETTERS, next) && !is_line_end(*at))) {
        const uint8_t *end = cased_letters(self, begins ? at : at + size);
        const uint8_t *longer = self->pattern == O200K ? contraction_folded(self, end) : NULL;
        return longer ? longer : end;
    }
    const uint32_t others = SET(OTHER) | SET(MARK);
    if (class != SPACE) return line_ends(run_of(self, at + size, others), 1);
    if (*at == ' ' && next == OTHER) return line_ends(run_of(self, at + size + next_size, others), 1);
    return lines(at, run_of(self, at, SET(SPACE)), 1);
}

/* The DeepSeek pattern first splits off numbers, then runs of Chinese characters and kana, so no word crosses the
   boundary of a number or of such a run. */
static inline const uint8_t *word_deepseek(Cutter *self, const uint8_t *at) {
    int size, next_size;
    uint8_t class = class_of(self, at, &size);
    if (class == NUMBER) return digits_of(self, at + size);
    /* The text is invalid UTF-8, and `odd` is set. Return now: the code below calls `last_character`, which may find no
       first byte of a character in invalid UTF-8. */
    if (class == END) return at + size;
    if (class == LETTER || class == CJK_LETTER || class == CJK_OTHER) return run_of(self, at + size, SET(class));
    uint8_t next = class_of(self, at + size, &next_size);
    const uint8_t *end = at + size + next_size;
    if (class == OTHER && size == 1 && next == LETTER && next_size == 1) {
        while (self->lead[*end] == LETTER) end++;
        return end;
    }
    if (class == OTHER) return line_ends(run_of(self, at + size, SET(OTHER)), 0);
    if (next == LETTER && !is_line_end(*at)) return run_of(self, end, SET(LETTER));
    if (*at == ' ' && next == OTHER) return line_ends(run_of(self, end, SET(OTHER)), 0);
    end = run_of(self, at, SET(class));
    next = class_of(self, end, &next_size);
    if (class == SPACE) return lines(at, end, next != NUMBER && next != CJK_LETTER && next != CJK_OTHER);
    return next == LETTER ? last_character(end) : end;
}

static inline const uint8_t *word_at(Cutter *self, const uint8_t *at) {
    switch (self->pattern) {
    case GPT2: return word_gpt2(self, at);
    case CL100K:
    case QWEN2: return word_cl100k(self, at);
    case DEEPSEEK: return word_deepseek(self, at);
    default: return word_o200k(self, at);
    }
}
