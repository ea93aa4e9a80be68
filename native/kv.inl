// Writing keys and values into paged memory; the layout is KVMemory's in table.h.
//
// K keeps a block's tokens side by side, channel after channel, V a token's channels: D = 4, blocks
// of 4, the second token of a block is written at
//
//     K  . k0 . .   . k1 . .   . k2 . .   . k3 . .        V  . . . .   v0 v1 v2 v3   . . . .   . . . .
//
// so that scores of several tokens and outputs of several channels are vectors as they lie. In pairs,
// as matrix tiles read it, two channels of K and two tokens of V lie side by side:
//
//     K  . . k0 k1 . . . .   . . k2 k3 . . . .            V  . v0 . v1 . v2 . v3   . . . . . . . .
#pragma once
#include <algorithm>
#include <cstring>
#include <limits>
#include <vector>

#include "pool.h"
#include "simd.h"

namespace headway {
namespace {

template <class Number>
void copy_row(const Number* from, Number* to, int64_t count, int64_t step) {
    for (int64_t i = 0; i < count; ++i) to[i * step] = from[i];
}

// x ≈ scale · int8 with scale = max|x| / 127. A row that is not finite gets a scale that is not
// a number, so that it shows in whatever reads it.
inline float quantize_row(const void* from, int64_t at, Type type, int8_t* to, int64_t count,
                          int64_t step, int64_t from_step = 1) {
    float largest = 0;
    bool finite = true;
    for (int64_t i = 0; i < count; ++i) {
        const float size = std::fabs(number_at(from, at + i * from_step, type));
        finite = finite && size <= std::numeric_limits<float>::max();
        largest = std::max(largest, size);
    }
    constexpr float halves = 12582912.0f;  // 1.5 · 2^23: a sum with it has no fraction
    if (largest <= 1e-30f) largest = 0;  // whose inverse would not be finite
    const float inverse = finite && largest > 0 ? 127.0f / largest : 0.0f;
    for (int64_t i = 0; i < count; ++i) {
        const float value = finite ? number_at(from, at + i * from_step, type) * inverse : 0.0f;
        to[i * step] = static_cast<int8_t>(value + halves - halves);
    }
    return finite ? largest / 127.0f : std::numeric_limits<float>::quiet_NaN();
}

// One token's row of one head to `to`, whose numbers are `step` apart.
inline void write_row(const void* from, int64_t at, Type type, void* to, int64_t place,
                      const KVMemory& memory, int64_t step, float* scale) {
    const int64_t count = memory.head_dim;
    if (memory.type == Type::i8)
        *scale = quantize_row(from, at, type, static_cast<int8_t*>(to) + place, count, step);
    else if (memory.type == Type::f32)
        copy_row(static_cast<const float*>(from) + at, static_cast<float*>(to) + place, count,
                 step);
    else
        copy_row(static_cast<const uint16_t*>(from) + at, static_cast<uint16_t*>(to) + place,
                 count, step);
}

// One token's rows of one head into memory in pairs; the head's memory begins at number `base`.
inline void write_pairs(const WriteKV& job, int64_t token, int64_t head, int64_t base,
                        int64_t offset) {
    const KVMemory& to = job.to;
    const int64_t dim = to.head_dim;
    const auto* k = static_cast<const uint16_t*>(job.k) + token * job.k_step + head * dim;
    const auto* v = static_cast<const uint16_t*>(job.v) + token * job.v_step + head * dim;
    auto* to_k = static_cast<uint16_t*>(to.k) + base + 2 * offset;
    auto* to_v = static_cast<uint16_t*>(to.v) + base + offset / 2 * 2 * dim + offset % 2;
    for (int64_t pair = 0; pair < dim / 2; ++pair)
        std::memcpy(to_k + pair * 2 * to.block_size, k + 2 * pair, 4);
    copy_row(v, to_v, dim, 2);
}

constexpr int rounded_tokens = 64, rounded_channels = 32;

// `count` numbers as levels 0 … 15: number ≈ offset + scale · level. What is not finite
// makes both no numbers, so that it shows in whatever reads them.
inline void round_group(const void* base, int64_t at, Type type, int count, uint16_t& scale,
                        uint16_t& offset, uint32_t* levels) {
    constexpr float none = std::numeric_limits<float>::quiet_NaN();
    Floats numbers[rounded_tokens / lanes];
    Floats low = floats_at(base, at, type), high = low;
    Ints bad{};
    for (int i = 0; i < count / lanes; ++i) {
        const Floats x = floats_at(base, at + i * lanes, type);
        numbers[i] = x;
        bad |= ~(bits_of<Floats>(bits_of<Words>(x) & 0x7FFFFFFFu) <= std::numeric_limits<float>::max());
        low = x < low ? x : low;
        high = x > high ? x : high;
    }
    const bool finite = sum_of(__builtin_convertvector(bad, Floats)) == 0;
    const float least = -highest_of(-low), most = highest_of(high);
    scale = to_f16(finite ? (most - least) / 15.0f : none);
    offset = to_f16(finite ? least : none);
    const float size = of_f16(scale), begin = of_f16(offset);
    for (int i = 0; i < count / lanes; ++i) {
        Floats level = (numbers[i] - begin) / all(size > 0 ? size : 1.0f);
        level = level > 0.0f ? level : Floats{};
        level = level < 15.0f ? level : all(15.0f);
        constexpr float halves = 12582912.0f;  // 1.5 · 2^23: a sum with it has no fraction
        if (!(size > 0)) level = Floats{};
        store(levels + i * lanes, __builtin_convertvector(level + halves - halves, Ints));
    }
}

// The words of a line, or two: level(i)[j] is level i of word j.
template <class Level>
inline void pack_levels(uint32_t* words, int count, const Level& level) {
    for (int j = 0; j < count; j += lanes) {
        Words word{};
        for (int i = 0; i < 8; ++i) word |= load<Words>(level(i) + j) << (4 * i);
        store(words + j, word);
    }
}

// One head's keys of a block, which begin at number `from` of `open`, as levels; and as bytes.
inline void round_keys(const KVMemory& open, int64_t from, int64_t dim, uint32_t* k,
                       uint16_t* k_scale) {
    uint32_t levels[2][rounded_tokens];
    for (int64_t d = 0; d < dim; ++d) {
        round_group(open.k, from + d * rounded_tokens, open.type, rounded_tokens, k_scale[d],
                    k_scale[dim + d], levels[d % 2]);
        if (d % 2)
            pack_levels(k + d / 2 * 16, 16, [&](int i) { return levels[i / 4] + i % 4 * 16; });
    }
}

inline void quantize_keys(const KVMemory& open, int64_t from, int64_t dim, int8_t* k,
                          float* k_scale) {
    for (int t = 0; t < rounded_tokens; ++t)
        k_scale[t] = quantize_row(open.k, from + t, open.type, k + t, dim, rounded_tokens,
                                  rounded_tokens);
}

// The same of its values.
inline void round_values(const KVMemory& open, int64_t from, int64_t dim, uint32_t* v,
                         uint16_t* v_scale) {
    uint32_t levels[8][rounded_tokens];
    for (int64_t group = 0; group < dim / rounded_channels; ++group, v_scale += 2 * rounded_tokens)
        for (int t = 0; t < rounded_tokens; ++t) {
            round_group(open.v, from + t * dim + group * rounded_channels, open.type,
                        rounded_channels, v_scale[t], v_scale[rounded_tokens + t], levels[t % 8]);
            if (t % 8 < 7) continue;
            pack_levels(v, rounded_channels, [&](int i) { return levels[i % 4 * 2 + i / 4]; });
            v += rounded_channels;
        }
}

inline void quantize_values(const KVMemory& open, int64_t from, int64_t dim, int8_t* v,
                            float* v_scale) {
    for (int t = 0; t < rounded_tokens; ++t)
        v_scale[t] = quantize_row(open.v, from + t * dim, open.type, v + t * dim, dim, 1);
}

// Head `to` of the rounded memory, whose numbers begin at `from` of the open one.
inline void round_head(const KVMemory& open, const KVMemory& rounded, int64_t from, int64_t to) {
    const int64_t dim = rounded.head_dim, size = dim * rounded_tokens;
    if (has_k_bytes(rounded.type))
        quantize_keys(open, from, dim, static_cast<int8_t*>(rounded.k) + to * size,
                      rounded.k_scale + to * rounded_tokens);
    else
        round_keys(open, from, dim, static_cast<uint32_t*>(rounded.k) + to * size / 8,
                   reinterpret_cast<uint16_t*>(rounded.k_scale) + to * 2 * dim);
    if (has_v_bytes(rounded.type))
        quantize_values(open, from, dim, static_cast<int8_t*>(rounded.v) + to * size,
                        rounded.v_scale + to * rounded_tokens);
    else
        round_values(open, from, dim, static_cast<uint32_t*>(rounded.v) + to * size / 8,
                     reinterpret_cast<uint16_t*>(rounded.v_scale) + to * 2 * size / rounded_channels);
}

// Indices into the tables of the blocks that a step fills: of 60 + 80 tokens 0 and 1, with 64 a block.
inline std::vector<int64_t> filled_blocks(const RoundKV& job) {
    std::vector<int64_t> found;
    for (int64_t s = 0; s < job.sequences; ++s) {
        const int64_t end = job.context_lens[s], begin = end - job.query_lens[s];
        for (int64_t i = begin / rounded_tokens; i < end / rounded_tokens; ++i)
            found.push_back(s * job.width + i);
    }
    return found;
}

void round_kv(Pool& pool, const RoundKV& job) {
    const int64_t dim = job.to.head_dim, heads = job.to.kv_heads, size = dim * rounded_tokens;
    const std::vector<int64_t> filled = filled_blocks(job);
    if (filled.empty()) return;
    pool.run(static_cast<int64_t>(filled.size()) * heads, [&](int64_t task, int) {
        const int64_t at = filled[task / heads], head = task % heads;
        const int64_t from = (job.open_tables[at] * heads + head) * size;
        round_head(job.from, job.to, from, job.tables[at] * heads + head);
    });
}

// One head's bounds of a block that is full.
inline void bound_head(const KVMemory& kv, int64_t block, int64_t head) {
    constexpr float most = std::numeric_limits<float>::infinity();
    const int64_t at = block * kv.kv_heads + head, dim = kv.head_dim, size = kv.block_size;
    for (int64_t d = 0; d < dim; ++d) {
        float low = most, high = -most;
        for (int64_t t = 0; t < size; ++t) {
            const int64_t place = kv.paired ? (d / 2 * size + t) * 2 + d % 2 : d * size + t;
            float number = number_at(kv.k, at * dim * size + place, kv.type);
            if (kv.type == Type::i8) number *= kv.k_scale[at * size + t];
            low = number < low ? number : low;
            high = number > high ? number : high;
        }
        put_number(kv.bounds, at * 2 * dim + d, low, Type::bf16);
        put_number(kv.bounds, (at * 2 + 1) * dim + d, high, Type::bf16);
    }
}

void bound_filled(Pool& pool, const WriteKV& job) {
    const KVMemory& to = job.to;
    std::vector<int64_t> filled;
    for (int64_t token = 0; token < job.tokens; ++token)
        if (job.slots[token] % to.block_size == to.block_size - 1)
            filled.push_back(job.slots[token] / to.block_size);
    if (filled.empty()) return;
    pool.run(static_cast<int64_t>(filled.size()), [&](int64_t i, int) {
        for (int64_t head = 0; head < to.kv_heads; ++head) bound_head(to, filled[i], head);
    });
}

void write_kv(Pool& pool, const WriteKV& job) {
    constexpr int64_t each = 16;
    const KVMemory& to = job.to;
    pool.run((job.tokens + each - 1) / each, [&](int64_t chunk, int) {
        const int64_t end = std::min(job.tokens, (chunk + 1) * each);
        for (int64_t token = chunk * each; token < end; ++token) {
            const int64_t block = job.slots[token] / to.block_size;
            const int64_t offset = job.slots[token] % to.block_size;
            for (int64_t head = 0; head < to.kv_heads; ++head) {
                const int64_t at = block * to.kv_heads + head;
                const int64_t scale = at * to.block_size + offset;
                const int64_t base = at * to.block_size * to.head_dim;
                if (to.paired) {
                    write_pairs(job, token, head, base, offset);
                    continue;
                }
                write_row(job.k, token * job.k_step + head * to.head_dim, job.type, to.k,
                          base + offset, to, to.block_size, to.k_scale ? to.k_scale + scale : nullptr);
                write_row(job.v, token * job.v_step + head * to.head_dim, job.type, to.v,
                          base + offset * to.head_dim, to, 1, to.v_scale ? to.v_scale + scale : nullptr);
            }
        }
    });
    if (to.bounds) bound_filled(pool, job);
}

}  // namespace
}  // namespace headway
