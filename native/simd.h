// Vectors of one instruction set, through the compiler's own vector types: `Floats` has `lanes`
// of them, 16 with AVX-512 and 8 elsewhere. Included by the sources that are compiled once for each
// instruction set; everything is in an unnamed namespace, or the linker would keep one copy of an
// inline function for all of them.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include "table.h"

#define HEADWAY_INLINE __attribute__((always_inline))

namespace headway {
namespace {

#if defined(__AVX512F__)
constexpr int lanes = 16;
#else
constexpr int lanes = 8;
#endif

// Whether products of bf16 are instructions: two at a time, of neighbouring inputs.
#if defined(__AVX512BF16__)
constexpr bool has_pairs = true;
#else
constexpr bool has_pairs = false;
#endif

typedef float Floats __attribute__((vector_size(4 * lanes)));
typedef uint32_t Words __attribute__((vector_size(4 * lanes)));
typedef int32_t Ints __attribute__((vector_size(4 * lanes)));

template <class V, class T>
inline V load(const T* at) {
    V v;
    std::memcpy(&v, at, sizeof v);
    return v;
}

template <class V, class T>
inline void store(T* at, V v) { std::memcpy(at, &v, sizeof v); }

template <class To, class From>
inline To bits_of(From from) {
    static_assert(sizeof(To) == sizeof(From), "bits_of keeps every bit");
    To to;
    std::memcpy(&to, &from, sizeof to);
    return to;
}

inline Floats all(float value) { return value - Floats{}; }

// Into the L1 cache; or into the second, which fetches more at once. What only prefetches is always
// inlined: gcc 12 takes such a function for one without effect, and drops calls of it.
HEADWAY_INLINE inline void prefetch(const void* at) { __builtin_prefetch(at, 0, 3); }
HEADWAY_INLINE inline void fetch_later(const void* at) { __builtin_prefetch(at, 0, 2); }

// Adds halves: (0 + 8) + (4 + 12) …, always in this order.
inline float sum_of(Floats values) {
    Ints other;
    for (int lane = 0; lane < lanes; ++lane) other[lane] = lane;
    for (int width = lanes / 2; width > 0; width /= 2)
        values += __builtin_shuffle(values, other ^ width);
    return values[0];
}

inline float highest_of(Floats values) {
    Ints other;
    for (int lane = 0; lane < lanes; ++lane) other[lane] = lane;
    for (int width = lanes / 2; width > 0; width /= 2) {
        const Floats moved = __builtin_shuffle(values, other ^ width);
        values = moved > values ? moved : values;
    }
    return values[0];
}

// ── single numbers in 16 bits ───────────────────────────────────────────────────────────────

inline float of_bf16(uint16_t value) { return bits_of<float>(uint32_t{value} << 16); }

// Rounds to nearest, ties to even; a NaN stays one.
inline uint16_t to_bf16(float value) {
    const uint32_t bits = bits_of<uint32_t>(value);
    if (value != value) return static_cast<uint16_t>(bits >> 16 | 0x40);
    return static_cast<uint16_t>((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

inline float of_f16(uint16_t value) {
#if defined(__F16C__)
    return _cvtsh_ss(value);
#else
    const uint32_t sign = uint32_t{value & 0x8000u} << 16, rest = value & 0x7FFFu;
    if (rest >= 0x7C00) return bits_of<float>(sign | 0x7F800000u | (rest & 0x3FFu) << 13);
    const float magnitude = bits_of<float>(rest << 13) * bits_of<float>(uint32_t{0x77800000u});
    return bits_of<float>(sign | bits_of<uint32_t>(magnitude));
#endif
}

inline uint16_t to_f16(float value) {
#if defined(__F16C__)
    return _cvtss_sh(value, _MM_FROUND_TO_NEAREST_INT);
#else
    const uint32_t bits = bits_of<uint32_t>(value), sign = bits >> 16 & 0x8000u;
    const uint32_t rest = bits & 0x7FFFFFFFu;
    if (rest > 0x7F800000u) return static_cast<uint16_t>(sign | 0x7E00u);
    if (rest >= 0x477FF000u) return static_cast<uint16_t>(sign | 0x7C00u);
    if (rest < 0x38800000u) {  // subnormal: adding 0.5 lets the hardware round at the last bit
        const float shifted = bits_of<float>(rest) + 0.5f;
        return static_cast<uint16_t>(sign | (bits_of<uint32_t>(shifted) - 0x3F000000u));
    }
    return static_cast<uint16_t>(sign | (rest - 0x38000000u + 0xFFFu + (rest >> 13 & 1)) >> 13);
#endif
}

inline float number_at(const void* base, int64_t index, Type type) {
    if (type == Type::f32) return static_cast<const float*>(base)[index];
    if (type == Type::i8) return static_cast<const int8_t*>(base)[index];
    const uint16_t value = static_cast<const uint16_t*>(base)[index];
    return type == Type::bf16 ? of_bf16(value) : of_f16(value);
}

inline void put_number(void* base, int64_t index, float value, Type type) {
    if (type == Type::f32) static_cast<float*>(base)[index] = value;
    else static_cast<uint16_t*>(base)[index] = type == Type::bf16 ? to_bf16(value) : to_f16(value);
}

inline int64_t size_of(Type type) { return type == Type::f32 ? 4 : type == Type::i8 ? 1 : 2; }

// ── whole vectors ───────────────────────────────────────────────────────────────────────────

typedef uint16_t Halves __attribute__((vector_size(2 * lanes)));

inline Words words_of(Halves halves) {
#if defined(__AVX512F__)
    return bits_of<Words>(_mm512_cvtepu16_epi32(bits_of<__m256i>(halves)));
#elif defined(__AVX2__)
    return bits_of<Words>(_mm256_cvtepu16_epi32(bits_of<__m128i>(halves)));
#else
    return __builtin_convertvector(halves, Words);
#endif
}

inline Floats of_int8(const int8_t* at) {
#if defined(__AVX512F__)
    return bits_of<Floats>(_mm512_cvtepi32_ps(
        _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at)))));
#elif defined(__AVX2__)
    return bits_of<Floats>(_mm256_cvtepi32_ps(
        _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(at)))));
#else
    Floats found;
    for (int lane = 0; lane < lanes; ++lane) found[lane] = at[lane];
    return found;
#endif
}

inline Floats floats_at(const void* base, int64_t index, Type type) {
    if (type == Type::f32) return load<Floats>(static_cast<const float*>(base) + index);
    if (type == Type::i8) return of_int8(static_cast<const int8_t*>(base) + index);
    const Halves halves = load<Halves>(static_cast<const uint16_t*>(base) + index);
    if (type == Type::bf16) return bits_of<Floats>(words_of(halves) << 16);
#if defined(__AVX512F__)
    return bits_of<Floats>(_mm512_cvtph_ps(bits_of<__m256i>(halves)));
#elif defined(__F16C__)
    return bits_of<Floats>(_mm256_cvtph_ps(bits_of<__m128i>(halves)));
#else
    Floats found;
    for (int lane = 0; lane < lanes; ++lane) found[lane] = of_f16(halves[lane]);
    return found;
#endif
}

// The high half of each word is the number in bf16. A NaN stays one: it is not rounded, and any that
// comes from arithmetic has its quiet bit in that half.
inline Words round_to_bf16(Floats values) {
    const Words bits = bits_of<Words>(values);
    return bits + ((0x7FFF + (bits >> 16 & 1)) & bits_of<Words>(values == values));
}

// Words below 65,536 in half the room.
inline Halves low_halves(Words words) {
#if defined(__AVX2__) && !defined(__AVX512F__)
    const __m256i packed = _mm256_packus_epi32(bits_of<__m256i>(words), bits_of<__m256i>(words));
    return bits_of<Halves>(_mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0x08)));
#else
    return __builtin_convertvector(words, Halves);
#endif
}

inline void put_floats(void* base, int64_t index, Floats values, Type type) {
    if (type == Type::f32) {
        store(static_cast<float*>(base) + index, values);
        return;
    }
    uint16_t* at = static_cast<uint16_t*>(base) + index;
    if (type == Type::bf16) {
#if defined(__AVX512BF16__)
        store(at, _mm512_cvtneps_pbh(bits_of<__m512>(values)));
#else
        store(at, low_halves(round_to_bf16(values) >> 16));
#endif
        return;
    }
#if defined(__AVX512F__)
    store(at, _mm512_cvtps_ph(bits_of<__m512>(values), _MM_FROUND_TO_NEAREST_INT));
#elif defined(__F16C__)
    store(at, _mm256_cvtps_ph(bits_of<__m256>(values), _MM_FROUND_TO_NEAREST_INT));
#else
    for (int lane = 0; lane < lanes; ++lane) at[lane] = to_f16(values[lane]);
#endif
}

#if defined(__AVX512F__)
inline void put_line(char* at, __m512i line, bool past) {
    if (past) _mm512_stream_si512(reinterpret_cast<__m512i*>(at), line);
    else store(at, line);
}
#endif

// Two vectors, one behind the other. With AVX-512 numbers of 16 bits are a cache line where y is
// aligned, and a processor whose memory is busy does not read a line first that is written at once.
// `past` the caches it is not read for sure; y is aligned then, and `pass` has to follow.
inline void put_pair(void* base, int64_t index, Floats low, Floats high, Type type,
                     bool past = false) {
#if defined(__AVX512F__)
    char* at = static_cast<char*>(base) + index * size_of(type);
    if (type == Type::f32) {
        put_line(at, bits_of<__m512i>(low), past);
        put_line(at + sizeof low, bits_of<__m512i>(high), past);
        return;
    }
#if defined(__AVX512BF16__)
    if (type == Type::bf16) {
        const __m512bh both = _mm512_cvtne2ps_pbh(bits_of<__m512>(high), bits_of<__m512>(low));
        put_line(at, bits_of<__m512i>(both), past);
        return;
    }
#endif
    Halves both[2];
    put_floats(both, 0, low, type);
    put_floats(both, lanes, high, type);
    put_line(at, load<__m512i>(both), past);
#else
    static_cast<void>(past);
    put_floats(base, index, low, type);
    put_floats(base, index + lanes, high, type);
#endif
}

// Other threads see from here on what was put past the caches.
inline void pass() {
#if defined(__AVX512F__)
    _mm_sfence();
#endif
}

}  // namespace
}  // namespace headway
