// The inner loops of attention: up to 6 rows over a strip of 64 tokens, see attention.inl.
//
//     scores   rows · K     lanes are tokens:    K[d][0 … 7] · q[r][d], one chain over d each
//     softmax  a row        lanes are tokens:    2^(score - highest), the sums so far shrink
//     sum      weights · V  lanes are channels:  V[t][0 … 7] · weight[r][t], one chain over t each
#pragma once
#include <algorithm>
#include <limits>
#include <type_traits>

#include "kv.inl"
#include "pool.h"
#include "powers.h"
#include "simd.h"

namespace headway {
namespace {

constexpr int strip_tokens = 64, strip_vectors = strip_tokens / lanes;
constexpr int tile_rows = 6;
constexpr float nothing = -std::numeric_limits<float>::infinity();

constexpr int vectors_at_once(int rows) {
    if (lanes == 16) return 4;
    return rows == 1 ? 8 : rows <= 3 ? 4 : 2;
}

// Where the tokens of a strip lie. K's channels are `k_step` bytes apart.
struct Strip {
    const char* k[strip_vectors];
    const char* v[strip_tokens];
    float k_scale[strip_tokens], v_scale[strip_tokens];
    int64_t k_step;
    Type k_type, v_type;
    int begin, end;  // tokens that are there
};

// Where a row's sums lie: the weighted V; of int4 memory for each group of channels a vector, what
// V's offsets add in parts; then the highest score and the sum of weights.
struct Shape {
    int64_t group, channels, sums, record;

    explicit Shape(const Attention& job)
        : group(job.heads / job.kv.kv_heads),
          channels((job.kv.head_dim + lanes - 1) / lanes * lanes),
          sums(channels + (job.open_tables ? channels / rounded_channels * lanes : 0)),
          record(sums + lanes) {}

    float& highest(float* row) const { return row[sums]; }
    float& total(float* row) const { return row[sums + 1]; }
    float highest(const float* row) const { return row[sums]; }
    float total(const float* row) const { return row[sums + 1]; }
};

// ── GEMMs ───────────────────────────────────────────────────────────────────────────────────

// sums[r][v] += vector(v) · number(r). Of the two kinds the fewer are held in registers: 6 rows and
// 2 vectors take 12 + 2 + 1 of the 16.
template <int rows, int vectors, class Vector, class Number>
inline __attribute__((always_inline)) void add_products(Floats (&sums)[rows][vectors],
                                                        const Vector& vector,
                                                        const Number& number) {
    if constexpr (vectors <= rows) {
        Floats held[vectors];
#pragma GCC unroll 8
        for (int v = 0; v < vectors; ++v) held[v] = vector(v);
#pragma GCC unroll 8
        for (int r = 0; r < rows; ++r) {
            const Floats value = all(number(r));
#pragma GCC unroll 8
            for (int v = 0; v < vectors; ++v) sums[r][v] += held[v] * value;
        }
    } else {
        Floats held[rows];
#pragma GCC unroll 8
        for (int r = 0; r < rows; ++r) held[r] = all(number(r));
#pragma GCC unroll 8
        for (int v = 0; v < vectors; ++v) {
            const Floats value = vector(v);
#pragma GCC unroll 8
            for (int r = 0; r < rows; ++r) sums[r][v] += value * held[r];
        }
    }
}

template <Type type, int rows, int vectors, bool ahead>
__attribute__((noinline)) void score_vectors(const Strip& strip, const Strip& next, const float* q,
                                             int64_t head_dim, int first, float* scores) {
    Floats sums[rows][vectors] = {};
    const char* at[vectors];
#pragma GCC unroll 8
    for (int v = 0; v < vectors; ++v) at[v] = strip.k[first + v];
    for (int64_t d = 0; d < head_dim; ++d) {
        if constexpr (ahead)
#pragma GCC unroll 8
            for (int v = 0; v < vectors; v += 2) prefetch(next.k[first + v] + d * strip.k_step);
        add_products<rows, vectors>(
            sums, [&](int v) { return floats_at(at[v] + d * strip.k_step, 0, type); },
            [&](int r) { return q[r * head_dim + d]; });
    }
#pragma GCC unroll 6
    for (int r = 0; r < rows; ++r)
#pragma GCC unroll 8
        for (int v = 0; v < vectors; ++v)
            store(scores + r * strip_tokens + (first + v) * lanes, sums[r][v]);
}

template <Type type, int rows, bool ahead>
void score(const Strip& strip, const Strip& next, const float* q, int64_t head_dim, int first,
           int last, float* scores) {
    constexpr int together = vectors_at_once(rows);
    int v = first;
    for (; v + together <= last; v += together)
        score_vectors<type, rows, together, ahead>(strip, next, q, head_dim, v, scores);
    for (; v < last; ++v) score_vectors<type, rows, 1, ahead>(strip, next, q, head_dim, v, scores);
}

template <Type type, int rows, int vectors, bool ahead>
__attribute__((noinline)) void sum_vectors(const Strip& strip, const Strip& next,
                                           const float* weights, float* sums, int64_t record,
                                           int64_t channel, int first, int last) {
    Floats found[rows][vectors];
#pragma GCC unroll 6
    for (int r = 0; r < rows; ++r)
#pragma GCC unroll 8
        for (int v = 0; v < vectors; ++v)
            found[r][v] = load<Floats>(sums + r * record + channel + v * lanes);
    for (int t = first; t < last; ++t) {
        const char* at = strip.v[t];
        if constexpr (ahead) prefetch(next.v[t] + channel * size_of(type));
        add_products<rows, vectors>(
            found, [&](int v) { return floats_at(at, channel + v * lanes, type); },
            [&](int r) { return weights[r * strip_tokens + t]; });
    }
#pragma GCC unroll 6
    for (int r = 0; r < rows; ++r)
#pragma GCC unroll 8
        for (int v = 0; v < vectors; ++v)
            store(sums + r * record + channel + v * lanes, found[r][v]);
}

template <Type type, int rows, bool ahead>
void sum(const Strip& strip, const Strip& next, const float* weights, float* sums, const Shape& shape, int first,
         int last) {
    constexpr int together = vectors_at_once(rows);
    int64_t c = 0;
    for (; c + together * lanes <= shape.channels; c += together * lanes)
        sum_vectors<type, rows, together, ahead>(strip, next, weights, sums, shape.record, c, first, last);
    for (; c < shape.channels; c += lanes)
        sum_vectors<type, rows, 1, ahead>(strip, next, weights, sums, shape.record, c, first, last);
}

template <int rows, class Work>
inline void with_rows(int count, const Work& work) {
    if (count == rows) work(std::integral_constant<int, rows>());
    else if constexpr (rows > 1) with_rows<rows - 1>(count, work);
}

template <class Work>
inline void with_type(Type type, const Work& work) {
    if (type == Type::f32) work(std::integral_constant<Type, Type::f32>());
    else if (type == Type::bf16) work(std::integral_constant<Type, Type::bf16>());
    else if (type == Type::f16) work(std::integral_constant<Type, Type::f16>());
    else work(std::integral_constant<Type, Type::i8>());
}

// ── softmax ─────────────────────────────────────────────────────────────────────────────────

// Adds halves: (0 + 4) + (2 + 6) …, always in this order.
inline float total_of(const float* values) {
    float half[lanes];
    std::memcpy(half, values, sizeof half);
    for (int width = lanes / 2; width > 0; width /= 2)
        for (int lane = 0; lane < width; ++lane) half[lane] += half[lane + width];
    return half[0];
}

inline float shrink(float from, float to) {
    return from == to ? 1 : exp2_of(all(from - to))[0];
}

// A row's scores of a strip, times `factor`, of which it sees tokens lo … hi - 1, become
// 2^(score - highest).
// Returns what the sums so far are worth beside the new highest score.
__attribute__((noinline)) float soften(const Attention& job, const Strip& strip, float* scores,
                                       float factor, int first, int last, int lo, int hi,
                                       float& highest, float* weights) {
    const bool cut = lo > first * lanes || hi < last * lanes;
    const bool k_scaled = has_k_bytes(job.kv.type), v_scaled = has_v_bytes(job.kv.type);
    Ints token;
    for (int lane = 0; lane < lanes; ++lane) token[lane] = first * lanes + lane;
    Floats best = all(nothing);
    for (int v = first; v < last; ++v, token += lanes) {
        Floats z = load<Floats>(scores + v * lanes) * factor;
        if (k_scaled) z *= load<Floats>(strip.k_scale + v * lanes);
        if (job.softcap > 0) z = tanh_of_log2(z) * (job.softcap * log2_e);
        if (cut) z = (token < lo) | (token >= hi) ? all(nothing) : z;
        store(scores + v * lanes, z);
        best = z > best ? z : best;
    }
    const float now = std::max(highest, highest_of(best)), base = now == nothing ? 0 : now;
    const float worth = shrink(highest, base);
    Floats total = load<Floats>(weights);
    if (worth != 1) total *= worth;
    for (int v = first; v < last; ++v) {
        Floats weight = exp2_of(load<Floats>(scores + v * lanes) - base);
        total += weight;
        if (v_scaled) {  // what lies at a token that is not there may be no number: it weighs nothing
            const Floats scale = load<Floats>(strip.v_scale + v * lanes);
            weight *= bits_of<Floats>(bits_of<Ints>(scale) & (weight != 0));
        }
        store(scores + v * lanes, weight);
    }
    store(weights, total);
    highest = now;
    return worth;
}

__attribute__((noinline)) void multiply_row(float* row, float factor, int64_t channels) {
    for (int64_t c = 0; c < channels; c += lanes) store(row + c, load<Floats>(row + c) * factor);
}

// The sums of a later split join those of the earlier ones.
__attribute__((noinline)) void merge_row(const Shape& shape, float* sums, const float* from) {
    float* part = const_cast<float*>(from);
    const float now = std::max(shape.highest(sums), shape.highest(part));
    const float base = now == nothing ? 0 : now;
    const float old = shrink(shape.highest(sums), base), fresh = shrink(shape.highest(part), base);
    shape.highest(sums) = now;
    shape.total(sums) = shape.total(sums) * old + shape.total(part) * fresh;
    for (int64_t c = 0; c < shape.channels; c += lanes) {
        const Floats kept = load<Floats>(sums + c) * old;
        store(sums + c, kept + load<Floats>(part + c) * fresh);
    }
}

}  // namespace
}  // namespace headway
