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
#include <algorithm>
#include <cstring>
#include <limits>

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
                          int64_t step) {
    float largest = 0;
    bool finite = true;
    for (int64_t i = 0; i < count; ++i) {
        const float size = std::fabs(number_at(from, at + i, type));
        finite = finite && size <= std::numeric_limits<float>::max();
        largest = std::max(largest, size);
    }
    constexpr float halves = 12582912.0f;  // 1.5 · 2^23: a sum with it has no fraction
    if (largest <= 1e-30f) largest = 0;  // whose inverse would not be finite
    const float inverse = finite && largest > 0 ? 127.0f / largest : 0.0f;
    for (int64_t i = 0; i < count; ++i) {
        const float value = finite ? number_at(from, at + i, type) * inverse : 0.0f;
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

// `count` numbers as levels 0 … 15: number ≈ offset + scale · level. What is not finite
// makes both no numbers, so that it shows in whatever reads them.
inline void round_group(const float* from, int count, uint16_t* scale, uint8_t* levels) {
    float low = from[0], high = from[0];
    bool finite = true;
    for (int i = 0; i < count; ++i) {
        const float value = from[i];
        finite = finite && std::fabs(value) <= std::numeric_limits<float>::max();
        low = std::min(low, value);
        high = std::max(high, value);
    }
    constexpr float bad = std::numeric_limits<float>::quiet_NaN();
    scale[0] = to_f16(finite ? (high - low) / 15.0f : bad);
    scale[1] = to_f16(finite ? low : bad);
    const float size = of_f16(scale[0]), offset = of_f16(scale[1]);
    constexpr float halves = 12582912.0f;  // 1.5 · 2^23: a sum with it has no fraction
    const auto level = [&](int i) {
        if (!(size > 0)) return 0;
        const float value = (from[i] - offset) / size;
        return static_cast<int>(std::clamp(value, 0.0f, 15.0f) + halves - halves);
    };
    for (int i = 0; i < count / 2; ++i)
        levels[i] = static_cast<uint8_t>(level(i) | level(i + count / 2) << 4);
}

constexpr int rounded_tokens = 64, rounded_channels = 32;

void round_kv(Pool& pool, const RoundKV& job) {
    const int64_t dim = job.to.head_dim, heads = job.to.kv_heads, size = dim * rounded_tokens;
    pool.run(job.count * heads, [&](int64_t task, int) {
        const int64_t pair = task / heads, head = task % heads;
        const int64_t from = (job.pairs[2 * pair] * heads + head) * size;
        const int64_t to = job.pairs[2 * pair + 1] * heads + head;
        auto* k = static_cast<uint8_t*>(job.to.k) + to * size / 2;
        auto* v = static_cast<uint8_t*>(job.to.v) + to * size / 2;
        auto* k_scale = reinterpret_cast<uint16_t*>(job.to.k_scale) + to * dim * 2;
        auto* v_scale = reinterpret_cast<uint16_t*>(job.to.v_scale) + to * size / rounded_channels * 2;
        float numbers[rounded_tokens];
        for (int64_t d = 0; d < dim; ++d) {
            for (int t = 0; t < rounded_tokens; ++t)
                numbers[t] = number_at(job.from.k, from + d * rounded_tokens + t, job.from.type);
            round_group(numbers, rounded_tokens, k_scale + 2 * d, k + d * rounded_tokens / 2);
        }
        for (int64_t at = 0; at < size; at += rounded_channels) {
            for (int c = 0; c < rounded_channels; ++c)
                numbers[c] = number_at(job.from.v, from + at + c, job.from.type);
            round_group(numbers, rounded_channels, v_scale + at / rounded_channels * 2, v + at / 2);
        }
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
}

}  // namespace
}  // namespace headway
