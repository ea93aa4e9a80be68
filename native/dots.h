// Sums of four products of bytes, for `lanes` outputs at a time: the step of the quantized layers.
//
// A vector of weights holds four inputs of each output, [lanes][4]; the four activations are the
// same for all of them. `Dots` is what an instruction set does best:
//
//     AVX-512 VNNI  vpdpbusd, unsigned times signed into 32 bits: w + 128 and a start of -128 · Σa
//     AVX2, int8    |w| times a with the sign of w: at most 2 · 127 · 127 = 32258 in 16 bits
//     AVX2, int4    q + 8 times a: at most 2 · 15 · 127 = 3810. Sums wrap in 16 bits and end right:
//                   from -8 · Σa on, what remains is Σ q · a, at most 32 · 8 · 127 = 32512
//     elsewhere     32-bit multiplications of widened bytes
//
// A start for int4 is -8 · Σa over a unit, at most 64 inputs. In AVX2 it is two 16-bit numbers, since
// vpmaddubsw adds the inputs in pairs: -8 · (a0 + a1) and -8 · (a2 + a3).
#pragma once
#include "simd.h"

namespace headway {
namespace {

inline int32_t word_at(const void* at) { return load<int32_t>(at); }

#if defined(__AVX512VNNI__)

inline int32_t int4_start(int32_t low, int32_t high) { return -8 * (low + high); }

using Four = Ints;

inline Four four_of(const int8_t* a) { return Ints{} + word_at(a); }

// gcc 12 spills the intrinsic at 24 sums.
inline void add_products(Ints& sum, Ints weights, Four four) {
    asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(weights), "v"(four));
}

struct Int8Dots {
    using Sum = Ints;
    Ints weights;
    Int8Dots() = default;
    explicit Int8Dots(const char* at) : weights(load<Ints>(at) ^ static_cast<int32_t>(0x80808080)) {}
    static Sum start(int32_t word) { return Ints{} + word; }
    void add(Sum& sum, Four four) const { add_products(sum, weights, four); }
    static Ints total(Sum sum) { return sum; }
};

struct Int4Dots {
    using Sum = Ints;
    Ints weights;
    Int4Dots() = default;
    Int4Dots(const char* at, int shift) : weights(load<Ints>(at) >> shift & 0x0F0F0F0F) {}
    static Sum start(int32_t word) { return Ints{} + word; }
    void add(Sum& sum, Four four) const { add_products(sum, weights, four); }
    static Ints total(Sum sum) { return sum; }
};

#elif defined(__AVX2__)

// -8 · (low, high) in two 16-bit halves.
inline int32_t int4_start(int32_t low, int32_t high) {
    return static_cast<int32_t>((static_cast<uint32_t>(-8 * high) << 16) |
                                (static_cast<uint32_t>(-8 * low) & 0xFFFFu));
}

using Four = __m256i;

inline Four four_of(const int8_t* a) { return _mm256_set1_epi32(word_at(a)); }

struct Int8Dots {
    using Sum = Ints;
    __m256i weights, sizes;
    Int8Dots() = default;
    explicit Int8Dots(const char* at)
        : weights(load<__m256i>(at)), sizes(_mm256_abs_epi8(weights)) {}
    static Sum start(int32_t) { return Ints{}; }
    void add(Sum& sum, Four four) const {
        const __m256i pairs = _mm256_maddubs_epi16(sizes, _mm256_sign_epi8(four, weights));
        sum += bits_of<Ints>(_mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
    }
    static Ints total(Sum sum) { return sum; }
};

struct Int4Dots {
    typedef int16_t Sum __attribute__((vector_size(32)));
    __m256i weights;
    Int4Dots() = default;
    Int4Dots(const char* at, int shift)
        : weights(bits_of<__m256i>(load<Ints>(at) >> shift & 0x0F0F0F0F)) {}
    static Sum start(int32_t pair) { return bits_of<Sum>(_mm256_set1_epi32(pair)); }
    void add(Sum& sum, Four four) const {
        sum += bits_of<Sum>(_mm256_maddubs_epi16(weights, four));
        asm("" : "+x"(sum));  // or gcc adds the products first, and runs out of registers
    }
    static Ints total(Sum sum) {
        return bits_of<Ints>(_mm256_madd_epi16(bits_of<__m256i>(sum), _mm256_set1_epi16(1)));
    }
};

#else

inline int32_t int4_start(int32_t low, int32_t high) { return -8 * (low + high); }

using Four = const int8_t*;

inline Four four_of(const int8_t* a) { return a; }

struct Int8Dots {
    using Sum = Ints;
    Ints parts[4];
    Int8Dots() = default;
    explicit Int8Dots(const char* at) {
        const Words words = load<Words>(at);
        for (int i = 0; i < 4; ++i) parts[i] = bits_of<Ints>(words << (24 - 8 * i)) >> 24;
    }
    static Sum start(int32_t) { return Ints{}; }
    void add(Sum& sum, Four four) const {
        for (int i = 0; i < 4; ++i) sum += parts[i] * static_cast<int32_t>(four[i]);
    }
    static Ints total(Sum sum) { return sum; }
};

struct Int4Dots {
    using Sum = Ints;
    Ints parts[4];
    Int4Dots() = default;
    Int4Dots(const char* at, int shift) {
        const Ints words = load<Ints>(at) >> shift;
        for (int i = 0; i < 4; ++i) parts[i] = words >> (8 * i) & 15;
    }
    static Sum start(int32_t word) { return Ints{} + word; }
    void add(Sum& sum, Four four) const {
        for (int i = 0; i < 4; ++i) sum += parts[i] * static_cast<int32_t>(four[i]);
    }
    static Ints total(Sum sum) { return sum; }
};

#endif

}  // namespace
}  // namespace headway
