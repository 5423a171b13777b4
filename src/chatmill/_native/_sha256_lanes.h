/* Define a function that computes SHA-256 of LANES messages at the same time, with one message in each lane of a vector.

   This file is included once for each width, with these macros: LANES, FUNCTION (the name of the function), TARGET_LANES
   (the attribute of the function), and LOAD_WORDS (a function that sets word n of `words` to word n of every message). */

#if LANES == 1
#define WORDS uint32_t
#else
#define WORDS __attribute__((vector_size(4 * LANES))) uint32_t
#endif
#define ROTATED(word, by) ((word) >> (by) | (word) << (32 - (by)))

TARGET_LANES static void FUNCTION(uint32_t (*state)[8], const uint8_t *const *data, int64_t begin, int64_t stop) {
    WORDS s[8];
    for (int n = 0; n < 8; n++) {
        uint32_t lanes[LANES];
        for (int l = 0; l < LANES; l++) lanes[l] = state[l][n];
        memcpy(&s[n], lanes, sizeof lanes);
    }
    for (int64_t at = 64 * begin; at < 64 * stop; at += 64) {
        WORDS w[16], t[8];
        memcpy(t, s, sizeof s);
        LOAD_WORDS(w, data, at);
        for (int n = 0; n < 16; n++) /* The words of a message are big-endian. */
            w[n] = (ROTATED(w[n], 24) & 0x00FF00FF) | (ROTATED(w[n], 8) & 0xFF00FF00);
#pragma GCC unroll 64
        for (int n = 0; n < 64; n++) {
            if (n >= 16) {
                WORDS one = w[(n - 15) % 16], two = w[(n - 2) % 16];
                w[n % 16] += (ROTATED(one, 7) ^ ROTATED(one, 18) ^ one >> 3) + w[(n - 7) % 16] +
                             (ROTATED(two, 17) ^ ROTATED(two, 19) ^ two >> 10);
            }
            WORDS a = t[0], e = t[4];
            WORDS first = t[7] + (ROTATED(e, 6) ^ ROTATED(e, 11) ^ ROTATED(e, 25)) + ((e & t[5]) ^ (~e & t[6])) +
                          SHA256_ROUND[n] + w[n % 16];
            WORDS second = (ROTATED(a, 2) ^ ROTATED(a, 13) ^ ROTATED(a, 22)) + ((a & t[1]) ^ (a & t[2]) ^ (t[1] & t[2]));
            t[7] = t[6], t[6] = t[5], t[5] = e, t[4] = t[3] + first;
            t[3] = t[2], t[2] = t[1], t[1] = a, t[0] = first + second;
        }
        for (int n = 0; n < 8; n++) s[n] += t[n];
    }
    for (int n = 0; n < 8; n++) {
        uint32_t lanes[LANES];
        memcpy(lanes, &s[n], sizeof lanes);
        for (int l = 0; l < LANES; l++) state[l][n] = lanes[l];
    }
}

#undef WORDS
#undef ROTATED
#undef LANES
#undef FUNCTION
#undef TARGET_LANES
#undef LOAD_WORDS
