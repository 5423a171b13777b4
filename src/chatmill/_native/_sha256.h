/* Compute SHA-256 of several messages at the same time.

   With SHA-256 instructions, hashing two messages in one loop hides the latency of the instructions. Vector instructions
   hash 8 or 16 messages at the same time. */

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

#define LANES 1
#define FUNCTION sha256_plain
#define TARGET_LANES
#define LOAD_WORDS(words, data, at) memcpy(words, data[0] + (at), 64)
#include "_sha256_lanes.h"

#if !defined(TARGET)
static int has_sha256(void) { return 0; }
static inline void sha256_blocks(uint32_t (*state)[8], const uint8_t **data, int64_t blocks, const int lanes) {
    for (int l = 0; l < lanes; l++) sha256_plain(state + l, data + l, 0, blocks);
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
/* Load 64 bytes of each message from offset `at`, and set word n of `words` to word n of every message. */
__attribute__((target("avx2"))) static inline void words_avx2(void *words, const uint8_t *const *data, int64_t at) {
    for (int n = 0; n < 4; n++, at += 16) {
        __m256i part[4], *w = (__m256i *)words + 4 * n;
        for (int l = 0; l < 4; l++)
            part[l] = _mm256_inserti128_si256(
                _mm256_castsi128_si256(_mm_loadu_si128((const __m128i *)(data[l] + at))),
                _mm_loadu_si128((const __m128i *)(data[l + 4] + at)), 1);
        __m256i a = _mm256_unpacklo_epi32(part[0], part[1]), b = _mm256_unpacklo_epi32(part[2], part[3]);
        __m256i c = _mm256_unpackhi_epi32(part[0], part[1]), d = _mm256_unpackhi_epi32(part[2], part[3]);
        w[0] = _mm256_unpacklo_epi64(a, b), w[1] = _mm256_unpackhi_epi64(a, b);
        w[2] = _mm256_unpacklo_epi64(c, d), w[3] = _mm256_unpackhi_epi64(c, d);
    }
}

__attribute__((target("avx512f"))) static inline void words_avx512(void *words, const uint8_t *const *data, int64_t at) {
    for (int n = 0; n < 4; n++, at += 16) {
        __m512i part[4], *w = (__m512i *)words + 4 * n;
        for (int l = 0; l < 4; l++) {
            __m512i of = _mm512_castsi128_si512(_mm_loadu_si128((const __m128i *)(data[l] + at)));
            of = _mm512_inserti32x4(of, _mm_loadu_si128((const __m128i *)(data[l + 4] + at)), 1);
            of = _mm512_inserti32x4(of, _mm_loadu_si128((const __m128i *)(data[l + 8] + at)), 2);
            part[l] = _mm512_inserti32x4(of, _mm_loadu_si128((const __m128i *)(data[l + 12] + at)), 3);
        }
        __m512i a = _mm512_unpacklo_epi32(part[0], part[1]), b = _mm512_unpacklo_epi32(part[2], part[3]);
        __m512i c = _mm512_unpackhi_epi32(part[0], part[1]), d = _mm512_unpackhi_epi32(part[2], part[3]);
        w[0] = _mm512_unpacklo_epi64(a, b), w[1] = _mm512_unpackhi_epi64(a, b);
        w[2] = _mm512_unpacklo_epi64(c, d), w[3] = _mm512_unpackhi_epi64(c, d);
    }
}

#define LANES 8
#define LOAD_WORDS words_avx2
#define FUNCTION sha256_avx2
#define TARGET_LANES __attribute__((target("avx2")))
#include "_sha256_lanes.h"
#define LANES 16
#define LOAD_WORDS words_avx512
#define FUNCTION sha256_avx512
#define TARGET_LANES __attribute__((target("avx512f")))
#include "_sha256_lanes.h"

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

/* The methods of computing SHA-256. With SHA256_AVX512 | SHA256_INSTRUCTIONS, groups of up to 8 messages are hashed with
   the instructions, and larger groups with AVX-512. */
enum { SHA256_PLAIN = 1, SHA256_INSTRUCTIONS = 2, SHA256_AVX2 = 8, SHA256_AVX512 = 16 };

/* Return the fastest method that this processor supports. On Intel processors, AVX-512 is faster than the instructions;
   other processors were not measured. */
static int sha256_way(void) {
    int instructions = has_sha256() ? SHA256_INSTRUCTIONS : 0;
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && (!instructions || __builtin_cpu_is("intel")))
        return SHA256_AVX512 | instructions;
    if (!instructions && __builtin_cpu_supports("avx2")) return SHA256_AVX2;
#endif
    return instructions ? instructions : SHA256_PLAIN;
}

/* Return the maximum number of messages to hash at the same time. */
static int sha256_lanes(int way) { return way & SHA256_AVX512 ? SHA256_AVX512 : way; }

/* Write the padding of a message of `size` bytes to `last`, which has `blocks` blocks and starts with the last `left`
   bytes of the message. */
static void sha256_pad(uint8_t *last, int64_t left, int64_t blocks, int64_t size) {
    last[left] = 0x80;
    for (int n = 1; n <= 8; n++) last[64 * blocks - n] = (uint8_t)((uint64_t)size * 8 >> 8 * (n - 1));
}

/* Pad a message in place and return the number of 64-byte blocks. The buffer must have room for 72 more bytes. */
static inline int64_t sha256_padded(uint8_t *message, int64_t length) {
    int64_t blocks = (length + 72) / 64;
    memset(message + length, 0, 64 * blocks - length);
    sha256_pad(message, length, blocks, length);
    return blocks;
}

/* Hash the blocks [begin, stop) of each message. */
static void sha256_range(uint32_t (*state)[8], const uint8_t **data, int count, int64_t begin, int64_t stop, int way) {
    int instructions = way & SHA256_INSTRUCTIONS;
#if defined(__x86_64__)
    int lanes = sha256_lanes(way);
    if (lanes >= SHA256_AVX2 && count > (instructions ? lanes / 2 : 2)) {
        uint32_t states[SHA256_AVX512][8];
        const uint8_t *of[SHA256_AVX512];
        /* Unused lanes repeat the last message. */
        for (int l = 0; l < lanes; l++) {
            int n = l < count ? l : count - 1;
            memcpy(states[l], state[n], sizeof states[l]), of[l] = data[n];
        }
        (lanes == SHA256_AVX512 ? sha256_avx512 : sha256_avx2)(states, of, begin, stop);
        memcpy(state, states, count * sizeof *states);
        return;
    }
#endif
    for (int n = 0; n < count; n++) {
        if (instructions && n + 1 < count) {
            const uint8_t *both[2] = {data[n] + 64 * begin, data[n + 1] + 64 * begin};
            sha256_both(state + n++, both, stop - begin);
        } else if (instructions)
            sha256_one(state[n], data[n] + 64 * begin, stop - begin);
        else
            sha256_plain(state + n, data + n, begin, stop);
    }
}

/* Hash the blocks of up to `sha256_lanes(way)` messages. */
static void sha256_blocks_of(uint32_t (*state)[8], const uint8_t **data, const int64_t *blocks, int count, int way) {
    uint32_t sorted_state[SHA256_AVX512][8];
    const uint8_t *sorted[SHA256_AVX512];
    int64_t done = 0;
    int order[SHA256_AVX512];
    /* Sort the messages by length, longest first, so that the messages with blocks left come first. */
    for (int n = 0; n < count; n++) {
        int at = n;
        for (; at && blocks[order[at - 1]] < blocks[n]; at--) order[at] = order[at - 1];
        order[at] = n;
    }
    for (int n = 0; n < count; n++) {
        memcpy(sorted_state[n], state[order[n]], sizeof *state);
        sorted[n] = data[order[n]];
    }
    for (int left = count; left; left--) {
        int64_t stop = blocks[order[left - 1]];
        if (stop > done) sha256_range(sorted_state, sorted, left, done, stop, way), done = stop;
    }
    for (int n = 0; n < count; n++) memcpy(state[order[n]], sorted_state[n], sizeof *state);
}

static void sha256_finish(uint32_t (*state)[8], int count, uint8_t (*hashes)[32]) {
    for (int n = 0; n < count; n++)
        for (int b = 0; b < 32; b++) hashes[n][b] = (uint8_t)(state[n][b / 4] >> (24 - 8 * (b % 4)));
}

/* Compute the 32-byte hashes of up to `sha256_lanes(way)` padded messages. */
static inline void sha256(const uint8_t **data, const int64_t *blocks, int count, int way, uint8_t (*hashes)[32]) {
    uint32_t state[SHA256_AVX512][8];
    for (int n = 0; n < count; n++) memcpy(state[n], SHA256_START, sizeof state[n]);
    sha256_blocks_of(state, data, blocks, count, way);
    sha256_finish(state, count, hashes);
}

/* Compute the 32-byte hashes of up to `sha256_lanes(way)` messages that are not padded, without copying them. */
static inline void sha256_unpadded(const uint8_t **data, const int64_t *sizes, int count, int way, uint8_t (*hashes)[32]) {
    uint32_t state[SHA256_AVX512][8];
    uint8_t last[SHA256_AVX512][128];
    const uint8_t *ends[SHA256_AVX512];
    int64_t whole[SHA256_AVX512], blocks[SHA256_AVX512];
    for (int n = 0; n < count; n++) {
        int64_t left = sizes[n] % 64;
        memcpy(state[n], SHA256_START, sizeof state[n]);
        whole[n] = sizes[n] / 64, blocks[n] = (left + 72) / 64, ends[n] = last[n];
        memset(last[n], 0, sizeof last[n]);
        memcpy(last[n], data[n] + sizes[n] - left, left);
        sha256_pad(last[n], left, blocks[n], sizes[n]);
    }
    sha256_blocks_of(state, data, whole, count, way);
    sha256_blocks_of(state, ends, blocks, count, way);
    sha256_finish(state, count, hashes);
}
