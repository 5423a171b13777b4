/* Find the word starts in the next 64 bytes of a text, as one bit per byte. The result must match `word_at`, which
   finds one word at a time.

   Shifting a bit set left by one selects the characters after those in the set; shifting it right selects the
   characters before them. */

#include "_vector.h"
#include "_words.h"

#ifdef HAS_VECTORS

#define ALWAYS_INLINE inline __attribute__((always_inline)) /* makes `pattern` a compile-time constant */

static const uint64_t ONE = 1;

typedef struct {
    /* for each class of ASCII characters: one bit per byte of the window */
    uint64_t letter, upper, number, space, blank, line, other, control, quote, slash;
    uint64_t inside; /* the bytes that belong to the text and precede the first non-ASCII byte */
    int known;       /* number of bytes before the first non-ASCII byte, or 64 */
    int ends;        /* whether the rest of the text is ASCII and shorter than 62 bytes */
} Window;

static inline uint64_t below(int bit) { return bit < 64 ? (ONE << bit) - 1 : ~(uint64_t)0; }

static ALWAYS_INLINE Window window_at(const uint8_t *at, size_t left, int pattern) {
    Bytes64 bytes = load64(at);
    Window window = {0};
    uint64_t wide = bits_between(bytes, 0x80, 0x80);
    window.ends = left < 62;
    window.inside = below(left < 64 ? (int)left : 64);
    if (wide &= window.inside) window.ends = 0, window.inside &= (wide & -wide) - 1;
    window.known = wide ? __builtin_ctzll(wide) : 64;
    window.letter = bits_between(folded(bytes), 'a', 26) & window.inside;
    window.number = bits_between(bytes, '0', 10) & window.inside;
    window.blank = bits_between(bytes, ' ', 1) & window.inside;
    window.space = (bits_between(bytes, '\t', 5) & window.inside) | window.blank;
    window.other = ~(window.letter | window.number | window.space) & window.inside;
    if (pattern != DEEPSEEK) window.quote = bits_between(bytes, '\'', 1);
    if (pattern != GPT2) window.line = (bits_between(bytes, '\n', 1) | bits_between(bytes, '\r', 1)) & window.inside;
    if (pattern == O200K || pattern == TEKKEN) {
        window.slash = bits_between(bytes, '/', 1) & window.inside;
        window.upper = bits_between(bytes, 'A', 26) & window.inside;
    }
    if (pattern == DEEPSEEK) {
        window.control = window.other & ~bits_between(bytes, 0x21, 0x5E);
        window.other &= ~window.control;
    }
    return window;
}

/* `fill_up` also marks each run of characters in `through` that directly follows a marked character; `fill_down` also
   marks each run that directly precedes one. */
static inline uint64_t fill_up(uint64_t marked, uint64_t through) {
    for (int step = 1; step < 64; through &= through << step, step *= 2) marked |= through & marked << step;
    return marked;
}

static inline uint64_t fill_down(uint64_t marked, uint64_t through) {
    for (int step = 1; step < 64; through &= through >> step, step *= 2) marked |= through & marked >> step;
    return marked;
}

/* Return the word starts that do not depend on text after the window. A word start is certain only if the window
   contains all text that may change it: the next character, a whole contraction, or a whole run of spaces. If the text
   ends in the window, the result also marks the end of the text. The first byte of the window is always a word start
   and is not included. */
static inline uint64_t certain(const Window *window, uint64_t starts, size_t left) {
    if (window->ends) return ((starts & window->inside) | ONE << left) & ~ONE;
    int known = window->known;
    uint64_t told = below(known) >> 1 & below(61);
    uint64_t gaps = ~window->space & below(known);
    int run = gaps ? 64 - __builtin_clzll(gaps) : 0;
    if (run < known) told &= below(run + 1);
    return starts & told & ~ONE;
}

static ALWAYS_INLINE uint64_t starts_gpt2(const uint8_t *at, size_t left) {
    Window w = window_at(at, left, GPT2);
    uint64_t goes_on = (w.letter & w.letter << 1) | (w.number & w.number << 1) | (w.other & w.other << 1) | w.blank << 1;
    uint64_t before_word = ~(w.space >> 1) & w.inside >> 1;
    uint64_t starts = (~w.space & ~goes_on) | (w.space & (~(w.space << 1) | before_word));
    for (uint64_t quotes = w.quote & starts & below(61); quotes; quotes &= quotes - 1) {
        int n = __builtin_ctzll(quotes);
        const uint8_t *stop = contraction(at + n, 0);
        if (stop) starts = (starts & ~(ONE << (n + 1))) | ONE << (stop - at);
    }
    return certain(&w, starts, left);
}

static inline uint64_t starts_of_numbers(uint64_t number, int digits) {
    if (digits == 1) return number;
    uint64_t starts = number & ~(number << 1), more = number & number << 1 & number << 2;
    for (uint64_t next = starts; next; starts |= next) next = next << 3 & more;
    return starts;
}

/* Return the word starts for any split pattern other than GPT-2's. */
static ALWAYS_INLINE uint64_t starts_of(const uint8_t *at, size_t left, int pattern) {
    Window w = window_at(at, left, pattern);
    uint64_t tabs = w.space & ~w.line; /* whitespace characters other than line ends */
    /* Line ends directly after OTHER characters belong to the same word as those characters. */
    uint64_t taken = w.line & w.other << 1;
    if (taken) taken = fill_up(taken, w.line | w.slash);
    uint64_t other = w.other & ~taken, space = w.space & ~taken;
    uint64_t first_other = other & ~(other << 1) & ~(w.blank << 1);
    /* A word that is a run of letters also includes one character before the run, such as a space. */
    uint64_t prefix = tabs | w.control | (first_other & ~(other >> 1));
    uint64_t starts = first_other | (w.letter & ~(w.letter << 1) & ~(prefix << 1)) | starts_of_numbers(w.number, most_digits(pattern));
    /* Split a run of spaces after its last line end, and before its last space if a word follows. */
    uint64_t words = pattern == DEEPSEEK ? w.inside & ~w.number : w.inside;
    uint64_t last = tabs & ~(w.space >> 1);
    starts |= (space & ~(space << 1)) | (last & words >> 1);
    uint64_t behind_line = tabs & w.line << 1;
    if ((tabs + behind_line) & w.line) behind_line &= fill_down(last, tabs);
    starts |= behind_line;
    if (pattern == DEEPSEEK) starts |= w.control & (~(w.control << 1) | w.letter >> 1);
    if (pattern == CL100K || pattern == QWEN2) {
        for (uint64_t quotes = w.quote & prefix & w.letter >> 1 & below(61); quotes; quotes &= quotes - 1) {
            const uint8_t *stop = contraction(at + __builtin_ctzll(quotes), 0x20);
            if (stop) starts |= ONE << (stop - at);
        }
    }
    if (pattern == O200K || pattern == TEKKEN) starts |= w.upper & (w.letter & ~w.upper) << 1;
    if (pattern == O200K) {
        int last_stop = 0;
        for (uint64_t quotes = w.quote & w.letter << 1 & w.letter >> 1 & below(61); quotes; quotes &= quotes - 1) {
            int n = __builtin_ctzll(quotes);
            const uint8_t *stop = n == last_stop ? NULL : contraction(at + n, 0x20);
            if (!stop) continue;
            last_stop = (int)(stop - at);
            starts = (starts & ~(below(last_stop) & ~below(n))) | ONE << last_stop;
        }
    }
    return certain(&w, starts, left);
}

/* Return the starts of the words after the word at `at`, or 0 if `word_at` must find them. */
static inline uint64_t starts_after(const Cutter *self, const uint8_t *at, size_t left) {
    if (*at >= 0x80) return 0;
    switch (self->pattern) {
    case GPT2: return starts_gpt2(at, left);
    case CL100K: return starts_of(at, left, CL100K);
    case QWEN2: return starts_of(at, left, QWEN2);
    case O200K: return starts_of(at, left, O200K);
    case TEKKEN: return starts_of(at, left, TEKKEN);
    default: return starts_of(at, left, DEEPSEEK);
    }
}

#else
static inline uint64_t starts_after(const Cutter *self, const uint8_t *at, size_t left) {
    (void)self, (void)at, (void)left;
    return 0;
}
#endif
