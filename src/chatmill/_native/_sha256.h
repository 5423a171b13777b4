/* Compute SHA-256 of two messages in one loop, which hides the latency of the instructions. */

#include <stdint.h>
#include <string.h>

#if defined(__aarch64__) && (defined(__linux__) || defined(__ARM_FEATURE_SHA2))
#include <arm_neon.h>
#if !defined(__ARM_FEATURE_SHA2)
#include <sys/auxv.h>
#define TARGET __attribute__((target("+crypto")))
#else
#define TARGET
#endif
#elif defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#define TARGET __attribute__((target("sha,sse4.1,ssse3")))
#endif

static const uint32_t SHA256_START[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                         0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
static const uint32_t SHA256_ROUND[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

static inline uint32_t rotated(uint32_t word, int by) { return word >> by | word << (32 - by); }

/* Hash one message, for processors without SHA-256 instructions. */
static void sha256_plain(uint32_t *state, const uint8_t *data, int64_t blocks) {
    for (; blocks > 0; blocks--, data += 64) {
        uint32_t w[64], s[8];
        memcpy(s, state, sizeof s);
        for (int n = 0; n < 16; n++)
            w[n] = (uint32_t)data[4 * n] << 24 | data[4 * n + 1] << 16 | data[4 * n + 2] << 8 | data[4 * n + 3];
        for (int n = 16; n < 64; n++)
            w[n] = w[n - 16] + (rotated(w[n - 15], 7) ^ rotated(w[n - 15], 18) ^ w[n - 15] >> 3) + w[n - 7] +
                   (rotated(w[n - 2], 17) ^ rotated(w[n - 2], 19) ^ w[n - 2] >> 10);
        for (int n = 0; n < 64; n++) {
            uint32_t choice = (s[4] & s[5]) ^ (~s[4] & s[6]), most = (s[0] & s[1]) ^ (s[0] & s[2]) ^ (s[1] & s[2]);
            uint32_t one = s[7] + (rotated(s[4], 6) ^ rotated(s[4], 11) ^ rotated(s[4], 25)) + choice + SHA256_ROUND[n] + w[n];
            uint32_t two = (rotated(s[0], 2) ^ rotated(s[0], 13) ^ rotated(s[0], 22)) + most;
            memmove(s + 1, s, 28);
            s[4] += one, s[0] = one + two;
        }
        for (int n = 0; n < 8; n++) state[n] += s[n];
    }
}

#if !defined(TARGET)
static int has_sha256(void) { return 0; }
static inline void sha256_blocks(uint32_t (*state)[8], const uint8_t **data, int64_t blocks, const int lanes) {
    for (int l = 0; l < lanes; l++) sha256_plain(state[l], data[l], blocks);
}
#define TARGET
#elif defined(__aarch64__)
static int has_sha256(void) {
#if defined(__ARM_FEATURE_SHA2)
    return 1;
#else
    return (getauxval(AT_HWCAP) & HWCAP_SHA2) != 0;
#endif
}

TARGET static inline __attribute__((always_inline)) void sha256_blocks(uint32_t (*state)[8], const uint8_t **data,
                                                                       int64_t blocks, const int lanes) {
    uint32x4_t a[2], e[2], w[2][4];
    for (int l = 0; l < lanes; l++) a[l] = vld1q_u32(state[l]), e[l] = vld1q_u32(state[l] + 4);
    for (int64_t at = 0; at < 64 * blocks; at += 64) {
        uint32x4_t first_a[2], first_e[2];
        for (int l = 0; l < lanes; l++) {
            first_a[l] = a[l], first_e[l] = e[l];
            for (int n = 0; n < 4; n++) w[l][n] = vreinterpretq_u32_u8(vrev32q_u8(vld1q_u8(data[l] + at + 16 * n)));
        }
#pragma GCC unroll 16
        for (int n = 0; n < 16; n++)
            for (int l = 0; l < lanes; l++) {
                uint32x4_t *now = w[l], sum = vaddq_u32(now[n % 4], vld1q_u32(SHA256_ROUND + 4 * n)), before = a[l];
                if (n < 12)
                    now[n % 4] = vsha256su1q_u32(vsha256su0q_u32(now[n % 4], now[(n + 1) % 4]), now[(n + 2) % 4],
                                                 now[(n + 3) % 4]);
                a[l] = vsha256hq_u32(a[l], e[l], sum);
                e[l] = vsha256h2q_u32(e[l], before, sum);
            }
        for (int l = 0; l < lanes; l++) a[l] = vaddq_u32(a[l], first_a[l]), e[l] = vaddq_u32(e[l], first_e[l]);
    }
    for (int l = 0; l < lanes; l++) vst1q_u32(state[l], a[l]), vst1q_u32(state[l] + 4, e[l]);
}
#else
static int has_sha256(void) {
    unsigned a, b, c, d;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_SSSE3) || !(c & bit_SSE4_1)) return 0;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (b & 1u << 29);
}

TARGET static inline __attribute__((always_inline)) void sha256_blocks(uint32_t (*state)[8], const uint8_t **data,
                                                                       int64_t blocks, const int lanes) {
    const __m128i swap = _mm_set_epi64x(0x0c0d0e0f08090a0b, 0x0405060700010203);
    __m128i abef[2], cdgh[2], w[2][4];
    for (int l = 0; l < lanes; l++) {
        __m128i low = _mm_shuffle_epi32(_mm_loadu_si128((const __m128i *)state[l]), 0xB1);          /* c d a b */
        __m128i high = _mm_shuffle_epi32(_mm_loadu_si128((const __m128i *)(state[l] + 4)), 0x1B);   /* e f g h */
        abef[l] = _mm_alignr_epi8(low, high, 8), cdgh[l] = _mm_blend_epi16(high, low, 0xF0);
    }
    for (int64_t at = 0; at < 64 * blocks; at += 64) {
        __m128i first_abef[2], first_cdgh[2];
        for (int l = 0; l < lanes; l++) {
            first_abef[l] = abef[l], first_cdgh[l] = cdgh[l];
            for (int n = 0; n < 4; n++)
                w[l][n] = _mm_shuffle_epi8(_mm_loadu_si128((const __m128i *)(data[l] + at + 16 * n)), swap);
        }
#pragma GCC unroll 16
        for (int n = 0; n < 16; n++)
            for (int l = 0; l < lanes; l++) {
                __m128i *now = w[l], last = now[(n + 3) % 4];
                __m128i sum = _mm_add_epi32(now[n % 4], _mm_loadu_si128((const __m128i *)(SHA256_ROUND + 4 * n)));
                if (n < 12)
                    now[n % 4] = _mm_sha256msg2_epu32(
                        _mm_add_epi32(_mm_sha256msg1_epu32(now[n % 4], now[(n + 1) % 4]),
                                      _mm_alignr_epi8(last, now[(n + 2) % 4], 4)), last);
                cdgh[l] = _mm_sha256rnds2_epu32(cdgh[l], abef[l], sum);
                abef[l] = _mm_sha256rnds2_epu32(abef[l], cdgh[l], _mm_shuffle_epi32(sum, 0x0E));
            }
        for (int l = 0; l < lanes; l++)
            abef[l] = _mm_add_epi32(abef[l], first_abef[l]), cdgh[l] = _mm_add_epi32(cdgh[l], first_cdgh[l]);
    }
    for (int l = 0; l < lanes; l++) {
        __m128i low = _mm_shuffle_epi32(abef[l], 0x1B), high = _mm_shuffle_epi32(cdgh[l], 0xB1);
        _mm_storeu_si128((__m128i *)state[l], _mm_blend_epi16(low, high, 0xF0));
        _mm_storeu_si128((__m128i *)(state[l] + 4), _mm_alignr_epi8(high, low, 8));
    }
}
#endif

TARGET static void sha256_one(uint32_t *state, const uint8_t *data, int64_t blocks) {
    const uint8_t *of[1] = {data};
    sha256_blocks((uint32_t(*)[8])state, of, blocks, 1);
}

TARGET static void sha256_both(uint32_t (*state)[8], const uint8_t **data, int64_t blocks) {
    sha256_blocks(state, data, blocks, 2);
}

/* Pad a message in place and return the number of 64-byte blocks. The buffer must have room for 72 more bytes. */
static int64_t sha256_padded(uint8_t *message, int64_t length) {
    int64_t blocks = (length + 72) / 64;
    memset(message + length, 0, 64 * blocks - length);
    message[length] = 0x80;
    for (int n = 1; n <= 8; n++) message[64 * blocks - n] = (uint8_t)((uint64_t)length * 8 >> 8 * (n - 1));
    return blocks;
}

/* Compute the 32-byte hashes of one or two padded messages. */
static void sha256(const uint8_t **data, const int64_t *blocks, int count, int has_instructions, uint8_t (*hashes)[32]) {
    uint32_t state[2][8];
    int64_t both = count < 2 ? 0 : blocks[0] < blocks[1] ? blocks[0] : blocks[1];
    for (int n = 0; n < count; n++) memcpy(state[n], SHA256_START, sizeof state[n]);
    if (!has_instructions) both = 0;
    if (both) sha256_both(state, data, both);
    for (int n = 0; n < count; n++) {
        (has_instructions ? sha256_one : sha256_plain)(state[n], data[n] + 64 * both, blocks[n] - both);
        for (int b = 0; b < 32; b++) hashes[n][b] = (uint8_t)(state[n][b / 4] >> (24 - 8 * (b % 4)));
    }
}
