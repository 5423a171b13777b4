/* Print the hashes of groups of messages: `sha256 [WAY]`, where WAY is a value that `sha256_way` can return.

   A group on stdin consists of the number of messages and their lengths as int64, followed by the messages. The program
   exits with code 3 if the processor does not support WAY. */

#include <stdio.h>
#include <stdlib.h>

#ifdef EMULATED
/* The SHA instructions of x86-64, implemented in C, for machines and emulators that lack them. */
#include <immintrin.h>
#include <stdint.h>
#include <string.h>

typedef struct {
    uint32_t at[4];
} Words;

static uint32_t turned(uint32_t word, int by) { return word >> by | word << (32 - by); }

static Words words(__m128i from) {
    Words to;
    memcpy(&to, &from, 16);
    return to;
}

static __m128i vector(Words from) {
    __m128i to;
    memcpy(&to, &from, 16);
    return to;
}

static __m128i msg1(__m128i one, __m128i two) {
    Words a = words(one), b = words(two);
    uint32_t w[5] = {a.at[0], a.at[1], a.at[2], a.at[3], b.at[0]};
    for (int n = 0; n < 4; n++) a.at[n] = w[n] + (turned(w[n + 1], 7) ^ turned(w[n + 1], 18) ^ w[n + 1] >> 3);
    return vector(a);
}

static __m128i msg2(__m128i one, __m128i two) {
    Words a = words(one), b = words(two);
    uint32_t w[6] = {b.at[2], b.at[3]};
    for (int n = 0; n < 4; n++) w[n + 2] = a.at[n] + (turned(w[n], 17) ^ turned(w[n], 19) ^ w[n] >> 10);
    memcpy(a.at, w + 2, 16);
    return vector(a);
}

static __m128i rnds2(__m128i one, __m128i two, __m128i three) {
    Words x = words(one), y = words(two), k = words(three);
    uint32_t a = y.at[3], b = y.at[2], c = x.at[3], d = x.at[2], e = y.at[1], f = y.at[0], g = x.at[1], h = x.at[0];
    for (int n = 0; n < 2; n++) {
        uint32_t t1 = h + (turned(e, 6) ^ turned(e, 11) ^ turned(e, 25)) + ((e & f) ^ (~e & g)) + k.at[n];
        uint32_t t2 = (turned(a, 2) ^ turned(a, 13) ^ turned(a, 22)) + ((a & b) ^ (a & c) ^ (b & c));
        h = g, g = f, f = e, e = d + t1, d = c, c = b, b = a, a = t1 + t2;
    }
    return vector((Words){{f, e, b, a}});
}

#define _mm_sha256msg1_epu32 msg1
#define _mm_sha256msg2_epu32 msg2
#define _mm_sha256rnds2_epu32 rnds2
#endif

#include "_sha256.h"

static int is_supported(int way) {
#ifndef EMULATED
    if (way & SHA256_INSTRUCTIONS && !has_sha256()) return 0;
#endif
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (way & SHA256_AVX2) return __builtin_cpu_supports("avx2");
    if (way & SHA256_AVX512) return __builtin_cpu_supports("avx512f");
#endif
    return way <= SHA256_INSTRUCTIONS;
}

int main(int count, char **values) {
    int way = count > 1 ? atoi(values[1]) : sha256_way();
    if (!is_supported(way)) return 3;
    int64_t size, lengths[SHA256_AVX512], blocks[SHA256_AVX512];
    while (fread(&size, 8, 1, stdin) == 1) {
        uint8_t *messages[SHA256_AVX512], hashes[SHA256_AVX512][32];
        if (size > sha256_lanes(way)) return 1;
        if (fread(lengths, 8, size, stdin) != (size_t)size) return 1;
        for (int n = 0; n < size; n++) {
            messages[n] = malloc(lengths[n] + 72);
            if (messages[n] == NULL || fread(messages[n], 1, lengths[n], stdin) != (size_t)lengths[n]) return 1;
            blocks[n] = sha256_padded(messages[n], lengths[n]);
        }
        sha256((const uint8_t **)messages, blocks, (int)size, way, hashes);
        fwrite(hashes, 32, size, stdout);
        for (int n = 0; n < size; n++) free(messages[n]);
    }
    return 0;
}
