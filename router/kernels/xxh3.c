/* XXH3, 64 bits with a seed, for inputs from 4 bytes on: the hash of a block of at least one token.

   After Yann Collet's xxHash fast digest algorithm, specification 0.1.1, whose names of steps are kept. Little-endian
   machines alone. The tests compare it with the package xxhash for every length up to several blocks. */
#include "kernels.h"

#include <string.h>

#define PRIME32_1 0x9E3779B1U
#define PRIME32_2 0x85EBCA77U
#define PRIME32_3 0xC2B2AE3DU
#define PRIME64_1 0x9E3779B185EBCA87ULL
#define PRIME64_2 0xC2B2AE3D27D4EB4FULL
#define PRIME64_3 0x165667B19E3779F9ULL
#define PRIME64_4 0x85EBCA77C2B2AE63ULL
#define PRIME64_5 0x27D4EB2F165667C5ULL
#define PRIME_MX1 0x165667919E3779F9ULL
#define PRIME_MX2 0x9FB21C651E98DF25ULL

#define SECRET_BYTES 192
#define LANES 8
#define STRIPE 64
#define STRIPES ((SECRET_BYTES - STRIPE) / 8)

static const uint8_t secret[SECRET_BYTES] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};

static uint64_t read64(const uint8_t *at) {
    uint64_t found;
    memcpy(&found, at, sizeof found);
    return found;
}

static uint32_t read32(const uint8_t *at) {
    uint32_t found;
    memcpy(&found, at, sizeof found);
    return found;
}

static uint64_t rotated(uint64_t value, int bits) { return value << bits | value >> (64 - bits); }

/* The halves of the full product of two numbers, combined. */
static uint64_t folded(uint64_t one, uint64_t other) {
    unsigned __int128 product = (unsigned __int128)one * other;
    return (uint64_t)product ^ (uint64_t)(product >> 64);
}

static uint64_t avalanche(uint64_t value) {
    value = (value ^ value >> 37) * PRIME_MX1;
    return value ^ value >> 32;
}

static uint64_t of_4_to_8(const uint8_t *input, size_t length, uint64_t seed) {
    uint64_t modified = seed ^ (uint64_t)__builtin_bswap32((uint32_t)seed) << 32;
    uint64_t combined = read32(input + length - 4) | (uint64_t)read32(input) << 32;
    uint64_t value = ((read64(secret + 8) ^ read64(secret + 16)) - modified) ^ combined;
    value = (value ^ rotated(value, 49) ^ rotated(value, 24)) * PRIME_MX2;
    value = (value ^ ((value >> 35) + length)) * PRIME_MX2;
    return value ^ value >> 28;
}

static uint64_t of_9_to_16(const uint8_t *input, size_t length, uint64_t seed) {
    uint64_t low = ((read64(secret + 24) ^ read64(secret + 32)) + seed) ^ read64(input);
    uint64_t high = ((read64(secret + 40) ^ read64(secret + 48)) - seed) ^ read64(input + length - 8);
    return avalanche(length + __builtin_bswap64(low) + high + folded(low, high));
}

static uint64_t mix_step(const uint8_t *data, size_t offset, uint64_t seed) {
    return folded(read64(data) ^ (read64(secret + offset) + seed),
                  read64(data + 8) ^ (read64(secret + offset + 8) - seed));
}

static uint64_t of_17_to_128(const uint8_t *input, size_t length, uint64_t seed) {
    uint64_t sum = length * PRIME64_1;
    for (size_t round = 0; round <= (length - 1) >> 5; round++) {
        sum += mix_step(input + 16 * round, 32 * round, seed);
        sum += mix_step(input + length - 16 * round - 16, 32 * round + 16, seed);
    }
    return avalanche(sum);
}

static uint64_t of_129_to_240(const uint8_t *input, size_t length, uint64_t seed) {
    uint64_t sum = length * PRIME64_1;
    for (size_t at = 0; at < 8; at++) sum += mix_step(input + 16 * at, 16 * at, seed);
    sum = avalanche(sum);
    for (size_t at = 8; at < length >> 4; at++) sum += mix_step(input + 16 * at, 16 * (at - 8) + 3, seed);
    return avalanche(sum + mix_step(input + length - 16, 119, seed));
}

static void accumulate(uint64_t *sums, const uint8_t *stripe, const uint8_t *key) {
    for (size_t lane = 0; lane < LANES; lane++) {
        uint64_t read = read64(stripe + 8 * lane), value = read ^ read64(key + 8 * lane);
        sums[lane ^ 1] += read;
        sums[lane] += (value & 0xFFFFFFFFU) * (value >> 32);
    }
}

static void scramble(uint64_t *sums, const uint8_t *key) {
    for (size_t lane = 0; lane < LANES; lane++)
        sums[lane] = (sums[lane] ^ sums[lane] >> 47 ^ read64(key + 8 * lane)) * PRIME32_1;
}

static void derived(uint8_t *into, uint64_t seed) {
    for (size_t at = 0; at < SECRET_BYTES; at += 16) {
        uint64_t pair[] = {read64(secret + at) + seed, read64(secret + at + 8) - seed};
        memcpy(into + at, pair, sizeof pair);
    }
}

static uint64_t of_many(const uint8_t *input, size_t length, uint64_t seed) {
    uint64_t sums[LANES] = {PRIME32_3, PRIME64_1, PRIME64_2, PRIME64_3, PRIME64_4, PRIME32_2, PRIME64_5, PRIME32_1};
    uint8_t key[SECRET_BYTES];
    derived(key, seed);
    size_t whole = (length - 1) / STRIPE; /* the last stripe is the last 64 bytes, which may overlap others */
    for (size_t at = 0; at < whole; at++) {
        accumulate(sums, input + STRIPE * at, key + 8 * (at % STRIPES));
        if (at % STRIPES == STRIPES - 1) scramble(sums, key + SECRET_BYTES - STRIPE);
    }
    accumulate(sums, input + length - STRIPE, key + SECRET_BYTES - 71);
    uint64_t merged = length * PRIME64_1;
    for (size_t at = 0; at < LANES; at += 2)
        merged += folded(sums[at] ^ read64(key + 11 + 8 * at), sums[at + 1] ^ read64(key + 19 + 8 * at));
    return avalanche(merged);
}

uint64_t xxh3(const uint8_t *input, size_t length, uint64_t seed) {
    if (length <= 8) return of_4_to_8(input, length, seed);
    if (length <= 16) return of_9_to_16(input, length, seed);
    if (length <= 128) return of_17_to_128(input, length, seed);
    return length <= 240 ? of_129_to_240(input, length, seed) : of_many(input, length, seed);
}
