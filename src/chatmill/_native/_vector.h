/* Test 64 bytes at a time with SSE2 (x86-64) or NEON (ARM), and return one bit per byte. */

#include <stdint.h>

#if defined(__SSE2__)
#define HAS_VECTORS 1
#include <emmintrin.h>

typedef struct {
    __m128i part[4];
} Bytes64;

static inline Bytes64 load64(const uint8_t *at) {
    Bytes64 bytes;
    for (int n = 0; n < 4; n++) bytes.part[n] = _mm_loadu_si128((const __m128i *)(at + 16 * n));
    return bytes;
}

/* Convert uppercase letters to lowercase; other bytes may also change, but never to a letter. */
static inline Bytes64 folded(Bytes64 bytes) {
    for (int n = 0; n < 4; n++) bytes.part[n] = _mm_or_si128(bytes.part[n], _mm_set1_epi8(0x20));
    return bytes;
}

/* Return one bit per byte: whether first <= byte < first + count. */
static inline uint64_t bits_between(Bytes64 bytes, int first, int count) {
    uint64_t bits = 0;
    for (int n = 0; n < 4; n++) {
        __m128i shifted = _mm_add_epi8(bytes.part[n], _mm_set1_epi8((char)(-128 - first)));
        __m128i found = _mm_cmplt_epi8(shifted, _mm_set1_epi8((char)(-128 + count)));
        bits |= (uint64_t)(uint32_t)_mm_movemask_epi8(found) << (16 * n);
    }
    return bits;
}

#elif defined(__ARM_NEON) && defined(__aarch64__)
#define HAS_VECTORS 1
#include <arm_neon.h>

typedef struct {
    uint8x16_t part[4];
} Bytes64;

static inline Bytes64 load64(const uint8_t *at) {
    Bytes64 bytes;
    for (int n = 0; n < 4; n++) bytes.part[n] = vld1q_u8(at + 16 * n);
    return bytes;
}

static inline Bytes64 folded(Bytes64 bytes) {
    for (int n = 0; n < 4; n++) bytes.part[n] = vorrq_u8(bytes.part[n], vdupq_n_u8(0x20));
    return bytes;
}

/* NEON has no movemask instruction. Each matching byte is reduced to the bit of its position modulo 8, and three
   pairwise additions combine eight bytes into one. */
static inline uint64_t bits_between(Bytes64 bytes, int first, int count) {
    static const uint8_t PLACES[16] = {1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128};
    uint8x16_t place = vld1q_u8(PLACES), found[4];
    for (int n = 0; n < 4; n++) {
        uint8x16_t shifted = vsubq_u8(bytes.part[n], vdupq_n_u8((uint8_t)first));
        found[n] = vandq_u8(vcltq_u8(shifted, vdupq_n_u8((uint8_t)count)), place);
    }
    uint8x16_t sum = vpaddq_u8(vpaddq_u8(found[0], found[1]), vpaddq_u8(found[2], found[3]));
    return vgetq_lane_u64(vreinterpretq_u64_u8(vpaddq_u8(sum, sum)), 0);
}

#endif
