/* Test 64 bytes or integers at a time with SSE2 (x86-64) or NEON (ARM), and return one bit for each. */

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

/* Return one bit for each of 64 integers: whether first <= integer <= last. */
static inline uint64_t integers_between(const uint8_t *at, uint32_t first, uint32_t last) {
    /* SSE2 compares signed integers, so both sides are shifted by 2^31. */
    __m128i base = _mm_set1_epi32((int)(first + 0x80000000u)), limit = _mm_set1_epi32((int)(last - first + 0x80000000u));
    uint64_t outside = 0;
    for (int n = 0; n < 4; n++) {
        __m128i four[4];
        for (int m = 0; m < 4; m++) {
            __m128i integers = _mm_loadu_si128((const __m128i *)(at + 64 * n + 16 * m));
            four[m] = _mm_cmpgt_epi32(_mm_sub_epi32(integers, base), limit);
        }
        __m128i bytes = _mm_packs_epi16(_mm_packs_epi32(four[0], four[1]), _mm_packs_epi32(four[2], four[3]));
        outside |= (uint64_t)(uint32_t)_mm_movemask_epi8(bytes) << (16 * n);
    }
    return ~outside;
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

/* Return one bit for each of 64 integers: whether first <= integer <= last. */
static inline uint64_t integers_between(const uint8_t *at, uint32_t first, uint32_t last) {
    Bytes64 inside;
    for (int n = 0; n < 4; n++) {
        uint16x4_t four[4];
        for (int m = 0; m < 4; m++) {
            uint32x4_t integers = vreinterpretq_u32_u8(vld1q_u8(at + 64 * n + 16 * m));
            four[m] = vmovn_u32(vcleq_u32(vsubq_u32(integers, vdupq_n_u32(first)), vdupq_n_u32(last - first)));
        }
        inside.part[n] = vcombine_u8(vmovn_u16(vcombine_u16(four[0], four[1])), vmovn_u16(vcombine_u16(four[2], four[3])));
    }
    return bits_between(inside, 255, 1);
}

#endif
