// The inner loops of attention over int4 memory: up to 8 rows over a block of 64 tokens, whose layout
// is RoundKV's in table.h.
//
// A number is offset + scale · level. What is multiplied are the levels: a row's queries take the
// scales of K's channels, its weights those of V's tokens, once a block, and the offsets are sums apart.
//
//     scores   Σ q · K = Σ q · offset + Σ (q · scale) · level     over the channels
//     sum      Σ p · V = Σ p · offset + Σ (p · scale) · level     over the tokens
//
// A line of memory is 16 words of 8 levels. Level i of each word is a vector: of 16 tokens of K in one
// channel, or of 16 channels of V in one token. With AVX-512 it is one look-up of what a shift leaves
// in the low bits. Where bf16 is multiplied in pairs (queries in bf16, AVX512_BF16), levels i and i + 4
// are one look-up and one product: two channels of K, two tokens of V. Then folded queries and weights
// are rounded to bf16, and levels count from the middle, -7.5 … 7.5, so that little is lost.
#pragma once
#include "attention_tile.inl"
#include "kv.inl"

namespace headway {
namespace {

constexpr int level_rows = lanes == 16 ? 8 : 6;
constexpr int level_words = 16;  // of a cache line

// An Intel core, which may have tiles, multiplies pairs slower than floats.
#if defined(__AVX512BF16__) && !defined(__AMX_BF16__)
constexpr bool has_level_pairs = true;
#else
constexpr bool has_level_pairs = false;
#endif

template <bool pairs>
constexpr float middle = pairs ? 7.5f : 0.0f;

// One head's part of a block: K's and V's levels, their scales and, behind those, offsets. What is held
// in bytes lies as in int8 memory: `bytes` tells where, with a scale for each token.
struct Levels {
    const uint32_t *k = nullptr, *v = nullptr;
    const uint16_t *k_scale = nullptr, *v_scale = nullptr;
    const int8_t *k_bytes = nullptr, *v_bytes = nullptr;
    const float *k_factors = nullptr, *v_factors = nullptr;

    Levels(const KVMemory& kv, int64_t block, int64_t head) {
        const int64_t at = block * kv.kv_heads + head, size = kv.head_dim * rounded_tokens;
        const int64_t groups = kv.head_dim / rounded_channels;
        if (has_k_bytes(kv.type)) {
            k_bytes = static_cast<const int8_t*>(kv.k) + at * size;
            k_factors = kv.k_scale + at * rounded_tokens;
        } else {
            k = static_cast<const uint32_t*>(kv.k) + at * size / 8;
            k_scale = reinterpret_cast<const uint16_t*>(kv.k_scale) + at * 2 * kv.head_dim;
        }
        if (has_v_bytes(kv.type)) {
            v_bytes = static_cast<const int8_t*>(kv.v) + at * size;
            v_factors = kv.v_scale + at * rounded_tokens;
        } else {
            v = static_cast<const uint32_t*>(kv.v) + at * size / 8;
            v_scale = reinterpret_cast<const uint16_t*>(kv.v_scale) + at * groups * 2 * rounded_tokens;
        }
    }

    // The levels are fetched beside those of the block before.
    void fetch_scales(int64_t head_dim) const {
        const int64_t groups = head_dim / rounded_channels;
        for (int64_t i = 0; k_scale && i < 2 * head_dim; i += 2 * level_words) prefetch(k_scale + i);
        for (int64_t i = 0; v_scale && i < groups * 2 * rounded_tokens; i += 2 * level_words)
            prefetch(v_scale + i);
    }

    // What is in bytes, as int8 memory is read.
    void find(Strip& strip, int64_t head_dim) const {
        strip.k_step = rounded_tokens;
        for (int i = 0; k_bytes && i < strip_vectors; ++i)
            strip.k[i] = reinterpret_cast<const char*>(k_bytes + i * lanes);
        for (int t = 0; v_bytes && t < rounded_tokens; ++t)
            strip.v[t] = reinterpret_cast<const char*>(v_bytes + t * head_dim);
        if (k_factors) std::copy_n(k_factors, rounded_tokens, strip.k_scale);
        if (v_factors) std::copy_n(v_factors, rounded_tokens, strip.v_scale);
    }
};

inline Floats level_of(Words words, int i) {
#if defined(__AVX512F__)
    const __m512 table = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    return bits_of<Floats>(_mm512_permutexvar_ps(bits_of<__m512i>(words >> (4 * i)), table));
#else
    return __builtin_convertvector(bits_of<Ints>(words >> (4 * i) & 15), Floats);
#endif
}

// sums[r][v] += pair(v) · number(r), two products each.
template <int rows, int vectors>
inline HEADWAY_INLINE void add_level_pairs(Floats (&sums)[rows][vectors], const Words (&words)[vectors],
                                           const int (&levels)[vectors], const int32_t* numbers,
                                           int64_t step) {
#if defined(__AVX512BF16__)
    const __m512 table = _mm512_setr_ps(-7.5f, -6.5f, -5.5f, -4.5f, -3.5f, -2.5f, -1.5f, -0.5f, 0.5f,
                                        1.5f, 2.5f, 3.5f, 4.5f, 5.5f, 6.5f, 7.5f);
    const __m512i both = bits_of<__m512i>(_mm512_cvtne2ps_pbh(table, table));
    __m512i held[vectors];
#pragma GCC unroll 4
    for (int v = 0; v < vectors; ++v)
        held[v] = _mm512_permutexvar_epi16(
            _mm512_srli_epi16(bits_of<__m512i>(words[v]), 4 * levels[v]), both);
#pragma GCC unroll 8
    for (int r = 0; r < rows; ++r) {
        const __m512i number = _mm512_set1_epi32(numbers[r * step]);
#pragma GCC unroll 4
        for (int v = 0; v < vectors; ++v)
            sums[r][v] = bits_of<Floats>(_mm512_dpbf16_ps(
                bits_of<__m512>(sums[r][v]), bits_of<__m512bh>(held[v]), bits_of<__m512bh>(number)));
    }
#else
    static_cast<void>(sums), static_cast<void>(words), static_cast<void>(levels);
    static_cast<void>(numbers), static_cast<void>(step);
#endif
}

// Scores of the tokens that are levels `first` … of the words from `at` on; they begin as `added`.
template <bool pairs, int rows, int vectors, int first>
__attribute__((noinline)) void score_levels(const Levels& block, const Levels& next, int at,
                                            const void* q, const float* added, int64_t head_dim,
                                            float* scores) {
    Floats sums[rows][vectors];
#pragma GCC unroll 8
    for (int r = 0; r < rows; ++r)
#pragma GCC unroll 4
        for (int v = 0; v < vectors; ++v) sums[r][v] = all(added[r]);
    for (int64_t pair = 0; pair < head_dim / 2; ++pair) {
        const Words line = load<Words>(block.k + pair * level_words + at);
        if constexpr (first == 0) prefetch(next.k + pair * level_words);
        if constexpr (pairs) {
            Words words[vectors];
            int levels[vectors];
#pragma GCC unroll 4
            for (int v = 0; v < vectors; ++v) words[v] = line, levels[v] = first + v;
            add_level_pairs<rows, vectors>(sums, words, levels,
                                           static_cast<const int32_t*>(q) + pair, head_dim / 2);
        } else {
            const float* numbers = static_cast<const float*>(q) + 2 * pair;
#pragma GCC unroll 2
            for (int channel = 0; channel < 2; ++channel)
                add_products<rows, vectors>(
                    sums, [&](int v) { return level_of(line, 4 * channel + first + v); },
                    [&](int r) { return numbers[r * head_dim + channel]; });
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; ++r)
#pragma GCC unroll 4
        for (int v = 0; v < vectors; ++v)
            store(scores + r * strip_tokens + (first + v) * level_words + at, sums[r][v]);
}

template <bool pairs, int rows>
void score_block(const Levels& block, const Levels& next, const void* q, const float* added,
                 int64_t head_dim, float* scores) {
    constexpr int together = 2 * rows <= level_rows ? 4 : 2;
    for (int at = 0; at < level_words; at += lanes) {
        score_levels<pairs, rows, together, 0>(block, next, at, q, added, head_dim, scores);
        if constexpr (together == 2)
            score_levels<pairs, rows, 2, 2>(block, next, at, q, added, head_dim, scores);
    }
}

// sums[r] += weights[r][64] · V, in the channels of two vectors, whose levels begin at `v`.
template <bool pairs, int rows>
__attribute__((noinline)) void sum_levels(const uint32_t* v, const uint32_t* next, const void* weights,
                                          float* sums, int64_t record) {
    Floats found[rows][2];
#pragma GCC unroll 8
    for (int r = 0; r < rows; ++r)
        for (int i = 0; i < 2; ++i) found[r][i] = load<Floats>(sums + r * record + i * lanes);
    for (int token = 0; token < rounded_tokens; token += 8) {
        const Words words[2] = {load<Words>(v), load<Words>(v + lanes)};
        prefetch(next);
        prefetch(next + level_words);
        v += 2 * level_words;
        next += 2 * level_words;
        if constexpr (pairs) {
#pragma GCC unroll 4
            for (int i = 0; i < 4; ++i) {
                const int levels[2] = {i, i};
                add_level_pairs<rows, 2>(found, words, levels,
                                         static_cast<const int32_t*>(weights) + token / 2 + i,
                                         rounded_tokens / 2);
            }
        } else {
            const float* numbers = static_cast<const float*>(weights) + token;
#pragma GCC unroll 8
            for (int t = 0; t < 8; ++t)
                add_products<rows, 2>(
                    found, [&](int i) { return level_of(words[i], t / 2 + t % 2 * 4); },
                    [&](int r) { return numbers[r * rounded_tokens + t]; });
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; ++r)
        for (int i = 0; i < 2; ++i) store(sums + r * record + i * lanes, found[r][i]);
}

// The queries of rows times the scales of a block's channels, and what its offsets add to each score.
template <bool pairs>
void fold_queries(const Levels& block, const float* q, int64_t head_dim, int rows, void* folded,
                  float* added) {
    for (int r = 0; r < rows; ++r, q += head_dim) {
        Floats total{};
        for (int64_t d = 0; d < head_dim; d += lanes) {
            const Floats numbers = load<Floats>(q + d);
            const Floats scale = floats_at(block.k_scale, d, Type::f16);
            const Floats offset = floats_at(block.k_scale, head_dim + d, Type::f16);
            total += numbers * (offset + scale * middle<pairs>);
            put_floats(folded, r * head_dim + d, numbers * scale, pairs ? Type::bf16 : Type::f32);
        }
        added[r] = sum_of(total);
    }
}

// The weights of rows times the scales of a block's tokens in one group of channels; what its offsets
// add is left in `offsets`, `record` apart. A token of weight 0 may have no number for a scale.
template <bool pairs>
void fold_weights(const uint16_t* scales, const float* weights, int rows, void* folded,
                  float* offsets, int64_t record) {
    for (int t = 0; t < rounded_tokens; t += lanes) {
        const Floats scale = floats_at(scales, t, Type::f16);
        const Floats offset = floats_at(scales, rounded_tokens + t, Type::f16) + scale * middle<pairs>;
        for (int r = 0; r < rows; ++r) {
            const Floats weight = load<Floats>(weights + r * rounded_tokens + t);
            const auto weighs = [&](Floats x) {
                return bits_of<Floats>(bits_of<Ints>(x) & (weight != 0));
            };
            put_floats(folded, r * rounded_tokens + t, weight * weighs(scale),
                       pairs ? Type::bf16 : Type::f32);
            const Floats sum = load<Floats>(offsets + r * record);
            store(offsets + r * record, sum + weight * weighs(offset));
        }
    }
}

}  // namespace
}  // namespace headway
