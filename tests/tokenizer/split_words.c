/* Split texts into words as `_bpe.c` does, but without Python, so that the code can be tested on emulated processors.

       split_words PATTERN CLASSES < texts > words

   CLASSES is a file with the class of every character. Each text is preceded by its size as a uint32. For each text,
   the program writes the number of words and the end of each word as uint32, or UINT32_MAX if the caller must split it.
   Every text is split twice, 64 bytes at a time and one word at a time; the exit code is 3 if the results differ.
   Memory after the last readable byte is protected. */

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include "_starts.h"

static uint32_t cut(Cutter *self, const uint8_t *text, size_t size, int vectors, uint32_t *ends) {
    const uint8_t *at = text, *end = text + size;
    uint32_t count = 0;
    self->odd = 0;
    while (at < end) {
        uint64_t starts = vectors ? starts_after(self, at, end - at) : 0;
        if (starts) {
            const uint8_t *window = at;
            for (; starts; starts &= starts - 1) {
                at = window + __builtin_ctzll(starts);
                ends[count++] = (uint32_t)(at - text);
            }
        } else {
            const uint8_t *stop = *at == STOP ? NULL : word_at(self, at);
            if (self->odd || !stop) return UINT32_MAX;
            at = stop;
            ends[count++] = (uint32_t)(at - text);
        }
    }
    return count;
}

/* Allocate memory that ends at a protected page. */
static uint8_t *guarded(size_t size) {
    size_t page = 1 << 16, whole = (size + page - 1) / page * page;
    uint8_t *data = mmap(NULL, whole + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (data == MAP_FAILED || mprotect(data + whole, page, PROT_NONE)) exit(4);
    return data + whole - size;
}

int main(int count, char **arguments) {
    static uint8_t classes[1 << 20];
    FILE *file = count == 3 ? fopen(arguments[2], "rb") : NULL;
    if (!file) return 2;
    Cutter cutter = {.pattern = atoi(arguments[1]), .classes = classes, .normal = 1};
    cutter.known = fread(classes, 1, sizeof classes, file);
    memset(cutter.lead, WIDE, sizeof cutter.lead);
    memcpy(cutter.lead, classes, 128);
    cutter.lead[STOP] = END;
    size_t room = 1 << 20;
    uint8_t *memory = guarded(room + BEYOND);
    uint32_t size, *ends = malloc(4 * room), *right = malloc(4 * room);
    if (!ends || !right) return 4;
    while (fread(&size, 4, 1, stdin)) {
        uint8_t *text = memory + room - size;
        if (size > room || fread(text, 1, size, stdin) != size) return 2;
        memset(text + size, 0, BEYOND);
        text[size] = STOP;
        uint32_t words = cut(&cutter, text, size, 1, ends), expected = cut(&cutter, text, size, 0, right);
        if (words != expected || (words != UINT32_MAX && memcmp(ends, right, 4 * (size_t)words))) {
            fprintf(stderr, "64 bytes and one word at a time differ: %.*s\n", (int)size, (char *)text);
            return 3;
        }
        fwrite(&words, 4, 1, stdout);
        if (words != UINT32_MAX) fwrite(ends, 4, words, stdout);
    }
    return 0;
}
