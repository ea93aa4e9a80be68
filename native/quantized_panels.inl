// Rows rounded to int8, and rounded weights in panels: what quantized.inl multiplies, and in what
// layout.
#pragma once
#include <vector>

#include "dots.h"
#include "pool.h"

namespace headway {
namespace {

// ── activations ─────────────────────────────────────────────────────────────────────────────

// To the nearest, ties to even.
inline Ints rounded(Floats values) {
#if defined(__AVX512F__)
    return bits_of<Ints>(_mm512_cvtps_epi32(bits_of<__m512>(values)));
#elif defined(__AVX2__)
    return bits_of<Ints>(_mm256_cvtps_epi32(bits_of<__m256>(values)));
#else
    Ints found;
    for (int lane = 0; lane < lanes; ++lane)
        found[lane] = static_cast<int32_t>(__builtin_lrintf(values[lane]));
    return found;
#endif
}

typedef int8_t Bytes __attribute__((vector_size(lanes)));

// The low bytes; gcc 12 takes the vector apart for __builtin_convertvector.
inline Bytes bytes_of(Ints values) {
#if defined(__AVX512F__)
    return bits_of<Bytes>(_mm512_cvtepi32_epi8(bits_of<__m512i>(values)));
#elif defined(__AVX2__)
    const __m256i all = bits_of<__m256i>(values);
    const __m128i words =
        _mm_packs_epi32(_mm256_castsi256_si128(all), _mm256_extracti128_si256(all, 1));
    return bits_of<Bytes>(_mm_cvtsi128_si64(_mm_packs_epi16(words, words)));
#else
    return __builtin_convertvector(values, Bytes);
#endif
}

// `lanes` numbers from `index` on; those at `end` and beyond are 0.
inline Floats floats_before(const void* x, int64_t index, int64_t end, Type type) {
    if (index + lanes <= end) return floats_at(x, index, type);
    Floats found{};
    for (int lane = 0; index + lane < end; ++lane) found[lane] = number_at(x, index + lane, type);
    return found;
}

// Applies `combine` to lanes 0 and width, 1 and width + 1 …, from half a vector down to `least` lanes:
// the first `least` lanes hold the results.
template <class Vector, class Combine>
inline Vector folded(Vector values, int least, const Combine& combine) {
    Ints other;
    for (int lane = 0; lane < lanes; ++lane) other[lane] = lane;
    for (int width = lanes / 2; width >= least; width /= 2)
        values = combine(values, __builtin_shuffle(values, other ^ width));
    return values;
}

// The largest |x| of numbers first … end - 1; a NaN, whose bits are above those of infinity, wins.
template <Type type>
inline float largest(const void* x, int64_t first, int64_t end) {
    Ints most{};
    for (int64_t at = first; at < end; at += lanes) {
        const Ints bits = bits_of<Ints>(floats_before(x, at, end, type)) & 0x7FFFFFFF;
        most = bits > most ? bits : most;
    }
    most = folded(most, 1, [](Ints one, Ints other) { return one > other ? one : other; });
    return bits_of<float>(static_cast<int32_t>(most[0]));
}

// Multiplies x[count] with the Hadamard matrix of 2^k entries on the diagonal, block by block: the
// fast Walsh-Hadamard transform, butterflies of distance 1, 2, 4 … in this order.
void rotate(float* x, int64_t count, int64_t size) {
    for (int64_t distance = 1; distance < size; distance *= 2)
        for (int64_t first = 0; first < count; first += 2 * distance)
            for (int64_t i = first; i < first + distance; ++i) {
                const float one = x[i], other = x[i + distance];
                x[i] = one + other;
                x[i + distance] = one - other;
            }
}

// The same for blocks of 64, whose numbers stay in registers: those of x from `first` on, to `to`.
template <Type type>
void rotate_64(const void* x, int64_t first, int64_t count, float* to) {
    constexpr int vectors = 64 / lanes;
    Ints lane_of;
    for (int lane = 0; lane < lanes; ++lane) lane_of[lane] = lane;
    for (const float* end = to + count; to < end; to += 64, first += 64) {
        Floats values[vectors];
        for (int i = 0; i < vectors; ++i) values[i] = floats_at(x, first + i * lanes, type);
#pragma GCC unroll 4
        for (int distance = 1; distance < lanes; distance *= 2) {
            // -1 where the distance's bit is set: a multiply-add is exact up to its sum
            const Floats sign = (lane_of & distance) != 0 ? all(-1) : all(1);
#pragma GCC unroll 8
            for (int i = 0; i < vectors; ++i)
                values[i] = values[i] * sign + __builtin_shuffle(values[i], lane_of ^ distance);
        }
#pragma GCC unroll 4
        for (int distance = 1; distance < vectors; distance *= 2)
#pragma GCC unroll 8
            for (int i = 0; i < vectors; ++i) {
                if (i & distance) continue;
                const Floats one = values[i], other = values[i + distance];
                values[i] = one + other;
                values[i + distance] = one - other;
            }
        for (int i = 0; i < vectors; ++i) store(to + i * lanes, values[i]);
    }
}

// Inputs of one rotation: the largest power of two up to 64 that divides all inputs.
inline int64_t rotation_of(int64_t inputs) {
    return std::min(inputs & -inputs, Layout::longest_rotation);
}

// `inputs` numbers of x from `first` on, rotated, to `to`, which has room for whole vectors.
template <Type type>
void rotate_row(const void* x, int64_t first, int64_t inputs, float* to) {
    const int64_t size = rotation_of(inputs);
    if (size == 64) return rotate_64<type>(x, first, inputs, to);
    for (int64_t i = 0; i < inputs; i += lanes)
        store(to + i, floats_before(x, first + i, first + inputs, type));
    rotate(to, inputs, size);
}

// One row: x = q · scale with |q| at most 127, and a scale for each block. A block of zeros has scale
// 0; one with a number that is not finite has scale NaN, and so has all that is computed from it.
template <Type type>
void quantize_row(const Rows& job, const void* x, int64_t first, int64_t row) {
    constexpr float smallest = 1e-30f;
    const Layout layout(job.layout);
    const int64_t width = padded_inputs(job.inputs, job.layout), end = first + job.inputs;
    const int64_t block = layout.block(), unit = layout.unit();
    const auto parts = [&](int64_t size) { return parts_of_row(job.inputs, job.layout, size); };
    float* scales = job.scales + row * parts(block);
    int32_t* start = job.starts + row * parts(unit);
    float* of_group = job.sums ? job.sums + row * parts(layout.group) : nullptr;
    int8_t* q = job.q + row * width;
    for (int64_t begin = 0; begin < width; begin += block) {
        const int64_t last = std::min(begin + block, width);
        const float most = largest<type>(x, first + begin, std::min(first + last, end));
        const bool finite = most < INFINITY, counts = finite && most > smallest;
        const float scale = !finite ? NAN : counts ? most / 127 : 0;
        const float inverse = counts ? 127 / most : 0;
        *scales++ = scale;
        for (int64_t part = begin; part < last; part += unit, ++start) {
            const int64_t stop = std::min(part + unit, last);
            Ints sums{};
            for (int64_t at = part; at < stop; at += lanes) {
                Ints values{};
                if (counts) values = rounded(floats_before(x, first + at, end, type) * inverse);
                sums += values;
                const Bytes bytes = bytes_of(values);
                if (at + lanes <= stop) store(q + at, bytes);
                else std::memcpy(q + at, &bytes, stop - at);
            }
            sums = folded(sums, 4, [](Ints one, Ints other) { return one + other; });
            const int32_t low = sums[0] + sums[1], high = sums[2] + sums[3];
            *start = layout.bytes ? -128 * (low + high) : int4_start(low, high);
            if (!of_group) continue;
            // fused by name: gcc contracts nothing over a condition
            float& total = of_group[part / layout.group];
            const float before = part % layout.group ? total : 0.0f;
            total = __builtin_fmaf(static_cast<float>(low + high), scale, before);
        }
    }
}

// The same of a row whose inputs stand in an order of their own, or are rotated; `copy` has room for
// whole vectors.
template <Type type>
void quantize_copy(const Rows& job, int64_t row, float* copy) {
    const int64_t first = row * job.inputs;
    if (job.order)
        for (int64_t i = 0; i < job.inputs; ++i)
            copy[i] = number_at(job.x, first + job.order[i], type);
    else rotate_row<type>(job.x, first, job.inputs, copy);
    quantize_row<Type::f32>(job, copy, 0, row);
}

template <Type type>
void quantize_some(const Rows& job, int64_t row, int64_t end) {
    const bool copies = job.order || Layout(job.layout).rotated;
    std::vector<float> copy(copies ? job.inputs + lanes : 0);
    for (; row < end; ++row)
        if (copies) quantize_copy<type>(job, row, copy.data());
        else quantize_row<type>(job, job.x, row * job.inputs, row);
}

void quantize_rows(Pool& pool, const Rows& job) {
    const int64_t block = std::max<int64_t>(1, 16384 / job.inputs);
    pool.run((job.tokens + block - 1) / block, [&](int64_t chunk, int) {
        const int64_t row = chunk * block, end = std::min(job.tokens, row + block);
        if (job.type == Type::f32) quantize_some<Type::f32>(job, row, end);
        else if (job.type == Type::bf16) quantize_some<Type::bf16>(job, row, end);
        else quantize_some<Type::f16>(job, row, end);
    });
}

// ── weights ─────────────────────────────────────────────────────────────────────────────────

// Bytes of a group of one panel, without zeros; and where in it steps begin.
inline int64_t head_bytes(const Layout& layout) {
    if (layout.supers) return panel_width * (layout.offsets ? 2 : 1);
    return panel_width * ((layout.wide ? 4 : 2) + (layout.offsets ? 4 : 0));
}
inline int64_t group_bytes(const Layout& layout) {
    return head_bytes(layout) + panel_width * (layout.bytes ? layout.group : layout.group / 2);
}

// What stands behind a panel's groups: how many groups share it, a power of two, and its bytes.
struct Behind {
    int64_t groups, bytes;
    int shift;

    explicit Behind(const Layout& layout)
        : groups(layout.supers ? Layout::super_block / layout.group : 1),
          bytes(layout.supers ? head_bytes(layout) * 2 : layout.zeros ? panel_width : 0),
          shift(__builtin_ctzll(groups)) {}

    // That of group `n`, counted from the first.
    int64_t of(int64_t n) const { return (n >> shift) * bytes; }
};

// The scales of `lanes` outputs from `lane` on, of a group at `at` with what it has behind.
HEADWAY_INLINE inline Floats group_scales(const Layout& layout, const char* at, const char* behind,
                                          int64_t lane) {
    if (layout.supers)
        return floats_at(at, lane, Type::i8) * floats_at(behind, lane, Type::f16);
    return floats_at(at, lane, layout.wide ? Type::f32 : Type::f16);
}

// Their offsets.
HEADWAY_INLINE inline Floats group_offsets(const Layout& layout, const char* at, const char* behind,
                                           int64_t lane, Floats scales) {
    if (layout.zeros) return scales * floats_at(behind, lane, Type::i8);
    if (!layout.supers)
        return floats_at(at + panel_width * (layout.wide ? 4 : 2), lane, Type::f32);
    return scales * all(layout.middle()) - floats_at(at + panel_width, lane, Type::i8) *
                                               floats_at(behind + 2 * panel_width, lane, Type::f16);
}

// Bytes of one panel.
inline int64_t panel_bytes(int64_t inputs, int64_t code) {
    const Layout layout(code);
    const int64_t width = padded_inputs(inputs, code);
    if (!layout.group) return width * panel_width;
    const int64_t groups = width / layout.group;
    const Behind behind(layout);
    const int64_t shared = (groups + behind.groups - 1) / behind.groups;
    return groups * group_bytes(layout) + (shared * behind.bytes + 63) / 64 * 64;
}

// Levels of inputs from `begin` on of one output, as many as a number of type T has bytes; what
// lies outside of the weight is 0.
template <class T>
inline T levels_of(const int8_t* weight, int64_t outputs, int64_t inputs, int64_t output,
                   int64_t begin) {
    T found = 0;
    if (output >= outputs) return found;
    const int8_t* at = weight + output * inputs + begin;
    if (inputs - begin >= static_cast<int64_t>(sizeof found)) return load<T>(at);
    if (begin < inputs) std::memcpy(&found, at, inputs - begin);
    return found;
}

// Levels of `count` inputs from `begin` on of a panel's outputs, in steps.
char* pack_bytes(const PackWeight& job, char* to, int64_t first, int64_t begin, int64_t count) {
    for (const int64_t end = begin + count; begin < end; begin += 4)
        for (int lane = 0; lane < panel_width; ++lane, to += 4)
            store(to, levels_of<uint32_t>(job.levels, job.outputs, job.inputs, first + lane, begin));
    return to;
}

char* pack_halves(const PackWeight& job, char* to, int64_t first, int64_t begin, int64_t count) {
    for (const int64_t end = begin + count; begin < end; begin += 8)
        for (int lane = 0; lane < panel_width; ++lane, to += 4) {
            const uint64_t levels =
                levels_of<uint64_t>(job.levels, job.outputs, job.inputs, first + lane, begin);
            const uint64_t halves = (levels & 0x0F0F0F0F0F0F0F0Fu) ^ 0x0808080808080808u;
            store(to, static_cast<uint32_t>(halves | halves >> 28));
        }
    return to;
}

// A number of `size` bytes for each output of a panel, those of group `n` of `groups`.
char* pack_numbers(const PackWeight& job, const void* numbers, int size, char* to, int64_t first,
                   int64_t n, int64_t groups) {
    for (int lane = 0; lane < panel_width; ++lane, to += size) {
        const int64_t output = first + lane;
        const char* from = static_cast<const char*>(numbers) + (output * groups + n) * size;
        if (output < job.outputs) std::memcpy(to, from, size);
        else std::memset(to, 0, size);
    }
    return to;
}

void pack_panel(const PackWeight& job, char* to, int64_t panel) {
    const Layout layout(job.layout);
    const int64_t first = panel * panel_width, width = padded_inputs(job.inputs, job.layout);
    if (!layout.group) {
        pack_bytes(job, to, first, 0, width);
        return;
    }
    const int64_t groups = width / layout.group;
    const char* end = to + panel_bytes(job.inputs, job.layout);
    const auto* bytes = static_cast<const char*>(job.scales);  // of super-blocks
    for (int64_t n = 0; n < groups; ++n) {
        if (layout.supers) {
            to = pack_numbers(job, bytes, 1, to, first, n, groups);
            if (layout.offsets)
                to = pack_numbers(job, bytes + job.outputs * groups, 1, to, first, n, groups);
        } else {
            to = pack_numbers(job, job.scales, layout.wide ? 4 : 2, to, first, n, groups);
            if (layout.offsets) to = pack_numbers(job, job.offsets, 4, to, first, n, groups);
        }
        const int64_t begin = n * layout.group;
        to = layout.bytes ? pack_bytes(job, to, first, begin, layout.group)
                          : pack_halves(job, to, first, begin, layout.group);
    }
    const int64_t per = Behind(layout).groups, supers = (groups + per - 1) / per;
    const auto* factors = static_cast<const char*>(job.offsets);
    for (int64_t n = 0; layout.supers && n < supers; ++n) {
        to = pack_numbers(job, factors, 2, to, first, n, supers);
        if (layout.offsets)
            to = pack_numbers(job, factors + 2 * job.outputs * supers, 2, to, first, n, supers);
    }
    for (int64_t n = 0; layout.zeros && n < groups; ++n)
        to = pack_numbers(job, job.offsets, 1, to, first, n, groups);
    std::memset(to, 0, end - to);
}

void pack_quantized(Pool& pool, const PackWeight& job) {
    const int64_t bytes = panel_bytes(job.inputs, job.layout);
    pool.run((job.outputs + panel_width - 1) / panel_width, [&](int64_t panel, int) {
        pack_panel(job, static_cast<char*>(job.packed) + panel * bytes, panel);
    });
}

}  // namespace
}  // namespace headway
