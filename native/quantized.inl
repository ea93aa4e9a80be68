// Linear layers on int8 and int4 weights, with activations rounded to int8 row by row.
//
// Weights are packed in panels of 2 · lanes outputs. In int8 a step is 4 inputs of every output,
// [O / panel][I / 4][2][lanes][4], and each output has a scale of its own. In int4 a group of
// inputs is one run of bytes, the panel's fp16 scales and then steps of 8 inputs: byte i of an
// output holds q + 8 of input i in its low half and of input i + 4 in its high half.
//
//     int4, AVX2, groups of 64:   [16 scales of 2 bytes][8 steps][2][8 outputs][4 bytes]  = 544 bytes
//
// Inputs are padded with zeros to whole steps, of int4 to whole groups. Sums within a group are
// integers, exact in any order; groups are added first to last: results do not depend on the batch.
// With matrix tiles more than a few rows are multiplied by quantized_tiles.inl, to the same bits.
#pragma once
#include <utility>

#include "dots.h"
#include "pool.h"

namespace headway {
namespace {

constexpr int64_t dots_bytes = 4 * lanes, line_bytes = 64;
constexpr int64_t near_bytes = 96 * 1024;  // panels that stay in the L2 cache for all rows

// Panels that `rows` rows take at once: sums stay in registers, and memory is fastest when several
// pages are read in turn (lab log, 2026-11-22, panels that nobody had beside them). With AVX-512 that
// is for few rows: 5 are multiplied a third faster by one panel at a time (2026-11-23).
constexpr int together_at_once(int rows) {
    if (lanes == 16) return rows == 1 ? 6 : rows <= 4 ? 3 : 1;
    return std::max(1, 4 / rows);
}

// Whether panels are so short that each is read alone by 3 and 4 rows too: they lie one behind the
// other in few pages.
inline bool reads_alone(int64_t rows, int64_t bytes) {
    return lanes == 16 && rows > 2 && bytes <= 32 * 1024;
}

// Prefetch distance of a panel that is read beside others: with several, 2 KB is faster than 4 (the
// same entry).
constexpr int64_t ahead_beside(int panels) {
    return lanes == 16 && panels > 1 ? ahead_bytes / 2 : ahead_bytes;
}

// Whether prefetches are interleaved across pages of the same panel, see `PlacesAhead`.
constexpr bool fetches_places(int panels) { return lanes == 16 && panels == 1; }

// With int4, AVX-512 is so fast that the 16 line-fill buffers of the L1 cache limit it: its weights
// are prefetched into L2.
inline void fetch_int4(const char* at) {
    if constexpr (lanes == 16) fetch_later(at);
    else prefetch(at);
}

inline int64_t block_of(int64_t group) { return std::min(group, longest_block); }

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

// The largest |x| of a row; a NaN, whose bits are above those of infinity, wins.
template <Type type>
inline float largest(const void* x, int64_t first, int64_t end) {
    Ints most{};
    for (int64_t at = first; at < end; at += lanes) {
        const Ints bits = bits_of<Ints>(floats_before(x, at, end, type)) & 0x7FFFFFFF;
        most = bits > most ? bits : most;
    }
    int32_t best = 0;
    for (int lane = 0; lane < lanes; ++lane) best = std::max(best, most[lane]);
    return bits_of<float>(best);
}

// One row: x = q · scale with |q| at most 127. A row of zeros has scale 0; one with a number that is
// not finite has scale NaN, and so has all that is computed from it.
template <Type type>
void quantize_row(const Rows& job, int64_t row) {
    constexpr float smallest = 1e-30f;
    const int64_t width = padded_inputs(job.inputs, job.group);
    const int64_t first = row * job.inputs, end = first + job.inputs;
    const float most = largest<type>(job.x, first, end);
    const bool finite = most < INFINITY, counts = finite && most > smallest;
    job.scales[row] = !finite ? NAN : counts ? most / 127 : 0;
    const float inverse = counts ? 127 / most : 0;
    const int64_t block = job.group ? block_of(job.group) : width;
    int32_t* start = job.starts + row * (width / block);
    int8_t* q = job.q + row * width;
    for (int64_t begin = 0; begin < width; begin += block, ++start) {
        const int64_t last = std::min(begin + block, width);
        Ints sums{};
        for (int64_t at = begin; at < last; at += lanes) {
            Ints values{};
            if (counts) values = rounded(floats_before(job.x, first + at, end, type) * inverse);
            sums += values;
            const Bytes bytes = bytes_of(values);
            if (at + lanes <= last) store(q + at, bytes);
            else std::memcpy(q + at, &bytes, last - at);
        }
        int32_t pairs[2] = {0, 0};
        for (int lane = 0; lane < lanes; ++lane) pairs[lane / 2 % 2] += sums[lane];
        *start = job.group ? int4_start(pairs[0], pairs[1]) : -128 * (pairs[0] + pairs[1]);
    }
}

void quantize_rows(Pool& pool, const Rows& job) {
    const int64_t block = std::max<int64_t>(1, 16384 / job.inputs);
    pool.run((job.tokens + block - 1) / block, [&](int64_t chunk, int) {
        const int64_t end = std::min(job.tokens, (chunk + 1) * block);
        for (int64_t row = chunk * block; row < end; ++row) {
            if (job.type == Type::f32) quantize_row<Type::f32>(job, row);
            else if (job.type == Type::bf16) quantize_row<Type::bf16>(job, row);
            else quantize_row<Type::f16>(job, row);
        }
    });
}

// ── weights ─────────────────────────────────────────────────────────────────────────────────

// Bytes of one panel.
inline int64_t panel_bytes(int64_t inputs, int64_t group) {
    const int64_t width = padded_inputs(inputs, group);
    if (!group) return width * panel_width;
    return width / group * panel_width * (2 + group / 2);
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

void pack_panel_int8(const int8_t* weight, char* to, int64_t outputs, int64_t inputs,
                     int64_t panel) {
    const int64_t first = panel * panel_width;
    for (int64_t begin = 0; begin < padded_inputs(inputs, 0); begin += 4)
        for (int lane = 0; lane < panel_width; ++lane, to += 4)
            store(to, levels_of<uint32_t>(weight, outputs, inputs, first + lane, begin));
}

void pack_panel_int4(const int8_t* weight, const uint16_t* scales, char* to, int64_t outputs,
                     int64_t inputs, int64_t group, int64_t panel) {
    const int64_t groups = padded_inputs(inputs, group) / group, first = panel * panel_width;
    for (int64_t n = 0; n < groups; ++n) {
        for (int lane = 0; lane < panel_width; ++lane, to += 2) {
            const int64_t output = first + lane;
            const uint16_t scale = output < outputs ? scales[output * groups + n] : uint16_t{0};
            std::memcpy(to, &scale, 2);
        }
        for (int64_t begin = n * group; begin < (n + 1) * group; begin += 8)
            for (int lane = 0; lane < panel_width; ++lane, to += 4) {
                const uint64_t levels =
                    levels_of<uint64_t>(weight, outputs, inputs, first + lane, begin);
                const uint64_t halves = (levels & 0x0F0F0F0F0F0F0F0Fu) ^ 0x0808080808080808u;
                store(to, static_cast<uint32_t>(halves | halves >> 28));
            }
    }
}

void pack_quantized(Pool& pool, const int8_t* weight, const uint16_t* scales, void* packed,
                    int64_t outputs, int64_t inputs, int64_t group) {
    const int64_t bytes = panel_bytes(inputs, group);
    pool.run((outputs + panel_width - 1) / panel_width, [&](int64_t panel, int) {
        char* to = static_cast<char*>(packed) + panel * bytes;
        if (group) pack_panel_int4(weight, scales, to, outputs, inputs, group, panel);
        else pack_panel_int8(weight, to, outputs, inputs, panel);
    });
}

// ── GEMMs ───────────────────────────────────────────────────────────────────────────────────

// An output's number: what was summed up, scaled, and the bias.
template <Type type, class Sum>
inline Floats output_of(const Quantized& job, int64_t row, int64_t output, Sum sum) {
    Floats scale = all(job.scales[row]);
    if (job.weight_scales) scale *= load<Floats>(job.weight_scales + output);
    const Floats found = __builtin_convertvector(sum, Floats) * scale;
    return found + (job.bias ? floats_before(job.bias, output, job.outputs, type) : Floats{});
}

// Stores what a tile of `rows` · `panels` has summed up, [rows][panels][2] vectors of fp32 or of
// integers.
template <Type type, class Sum>
void finish(const Quantized& job, int64_t row, int rows, int64_t panel, int panels,
            const Sum* sums, const Target& to) {
    for (int r = 0; r < rows; ++r)
        for (int p = 0; p < panels; ++p, sums += 2) {
            const int64_t output = (panel + p) * panel_width, left = job.outputs - output;
            const int64_t index = (row + r - to.row) * to.step + output - to.output;
            const Floats low = output_of<type>(job, row + r, output, sums[0]);
            if (left >= panel_width) {
                const Floats high = output_of<type>(job, row + r, output + lanes, sums[1]);
                put_pair(to.y, index, low, high, type, to.past);
                continue;
            }
            put_some<type>(to.y, index, low, left);
            if (left > lanes)
                put_some<type>(to.y, index + lanes,
                               output_of<type>(job, row + r, output + lanes, sums[1]), left - lanes);
        }
}

template <class Sum>
void finish(const Quantized& job, int64_t row, int rows, int64_t panel, int panels,
            const Sum* sums, const Target& to) {
    if (job.type == Type::bf16) finish<Type::bf16>(job, row, rows, panel, panels, sums, to);
    else if (job.type == Type::f16) finish<Type::f16>(job, row, rows, panel, panels, sums, to);
    else finish<Type::f32>(job, row, rows, panel, panels, sums, to);
}

template <class Sum>
void finish(const Quantized& job, int64_t row, int rows, int64_t panel, int panels,
            const Sum* sums) {
    finish(job, row, rows, panel, panels, sums, outputs_of(job));
}

// Calls work(0) … work(count - 1) with constants: an array indexed by these lives in registers.
template <class Work, int... i>
HEADWAY_INLINE inline void each_of(const Work& work, std::integer_sequence<int, i...>) {
    (work(std::integral_constant<int, i>{}), ...);
}

template <int count, class Work>
HEADWAY_INLINE inline void each(const Work& work) {
    each_of(work, std::make_integer_sequence<int, count>{});
}

struct Int8 {
    template <int rows, int panels>
    static void tile(const Quantized& job, int64_t row, int64_t panel) {
        constexpr int halves = 2 * panels;
        constexpr int64_t ahead = ahead_beside(panels);
        const int64_t width = padded_inputs(job.inputs, 0), bytes = panel_bytes(job.inputs, 0);
        const int8_t* q = job.q + row * width;
        const char* at = static_cast<const char*>(job.packed) + panel * bytes;
        Int8Dots::Sum sums[rows * halves];
        each<rows * halves>([&](auto i) HEADWAY_INLINE {
            sums[i] = Int8Dots::start(job.starts[row + i / halves]);
        });
        for (int64_t input = 0; input < width; input += 4, at += 2 * dots_bytes) {
            Int8Dots dots[halves];
            each<halves>([&](auto half) HEADWAY_INLINE {
                const char* here = at + half / 2 * bytes + half % 2 * dots_bytes;
                if (half % 2 == 0 || dots_bytes == line_bytes) prefetch(here + ahead);
                dots[half] = Int8Dots(here);
            });
            each<rows>([&](auto r) HEADWAY_INLINE {
                const Four four = four_of(q + r * width + input);
                each<halves>([&](auto half) HEADWAY_INLINE {
                    dots[half].add(sums[r * halves + half], four);
                });
            });
        }
        Ints found[rows * halves];
        each<rows * halves>([&](auto i) HEADWAY_INLINE { found[i] = Int8Dots::total(sums[i]); });
        finish(job, row, rows, panel, panels, found);
    }
};

// Prefetches some 16 KB ahead while one panel is multiplied alone, line by line from four pages in
// turn: the hardware prefetcher follows each page by itself, and one page is too few for it.
class PlacesAhead {
public:
    PlacesAhead(const char* panel, int64_t bytes) {
        const int64_t windows = std::max<int64_t>(1, (bytes + window / 2) / window);
        part_ = (bytes / windows / line_bytes + places - 1) / places * line_bytes;
        at_ = panel + places * part_;
    }

    void fetch() {
        fetch_later(at_ + place_ * part_ + offset_);
        if (++place_ < places) return;
        place_ = 0;
        if ((offset_ += line_bytes) < part_) return;
        offset_ = 0;
        at_ += places * part_;
    }

private:
    static constexpr int64_t window = 16384, places = 4;
    const char* at_;
    int64_t part_, place_ = 0, offset_ = 0;
};

struct Int4 {
    // Adds one block of inputs to the totals.
    template <int rows, int panels>
    HEADWAY_INLINE static inline void block(Ints* totals, const int8_t* q, int64_t width,
                                            const int32_t* starts, int64_t blocks, const char* at,
                                            int64_t bytes, int64_t length, PlacesAhead& next) {
        constexpr int halves = 2 * panels;
        constexpr int64_t ahead = ahead_beside(panels);
        Int4Dots::Sum sums[rows * halves];
        each<rows * halves>([&](auto i) HEADWAY_INLINE {
            sums[i] = Int4Dots::start(starts[i / halves * blocks]);
        });
        for (const int8_t* end = q + length; q < end; q += 8, at += 2 * dots_bytes) {
            each<2>([&](auto high) HEADWAY_INLINE {
                Int4Dots dots[halves];
                each<halves>([&](auto half) HEADWAY_INLINE {
                    const char* here = at + half / 2 * bytes + half % 2 * dots_bytes;
                    if (high == 0 && (half % 2 == 0 || dots_bytes == line_bytes)) {
                        if constexpr (fetches_places(panels)) next.fetch();
                        else fetch_int4(here + ahead);
                    }
                    dots[half] = Int4Dots(here, 4 * high);
                });
                each<rows>([&](auto r) HEADWAY_INLINE {
                    const Four four = four_of(q + r * width + 4 * high);
                    each<halves>([&](auto half) HEADWAY_INLINE {
                        dots[half].add(sums[r * halves + half], four);
                    });
                });
            });
        }
        each<rows * halves>([&](auto i) HEADWAY_INLINE { totals[i] += Int4Dots::total(sums[i]); });
    }

    template <int rows, int panels>
    static void tile(const Quantized& job, int64_t row, int64_t panel) {
        constexpr int halves = 2 * panels;
        const int64_t group = job.group, width = padded_inputs(job.inputs, group);
        const int64_t length = block_of(group), blocks = width / length;
        const int64_t bytes = panel_bytes(job.inputs, group);
        const int8_t* q = job.q + row * width;
        const int32_t* starts = job.starts + row * blocks;
        const char* at = static_cast<const char*>(job.packed) + panel * bytes;
        PlacesAhead next(at, bytes);
        Floats sums[rows * halves] = {};
        for (int64_t input = 0; input < width;) {
            if constexpr (fetches_places(panels)) next.fetch();
            const char* scales = at;
            at += 2 * panel_width;
            Ints totals[rows * halves] = {};
            const int64_t end = input + group;
            do {
                block<rows, panels>(totals, q + input, width, starts, blocks, at, bytes, length,
                                    next);
                at += length * panel_width / 2;
                input += length;
                ++starts;
            } while (longest_block < longest_group && input < end);
            each<rows * halves>([&](auto i) HEADWAY_INLINE {
                const char* here = scales + i % halves / 2 * bytes;
                const Floats scale = floats_at(here, i % 2 * lanes, Type::f16);
                sums[i] += __builtin_convertvector(totals[i], Floats) * scale;
            });
        }
        finish(job, row, rows, panel, panels, sums);
    }
};

template <class Format, int rows>
void quantized_strip(const Quantized& job, int64_t row, int64_t first, int64_t last) {
    constexpr int together = together_at_once(rows), half = (together + 1) / 2;
    int64_t panel = first;
    if (!reads_alone(rows, panel_bytes(job.inputs, job.group))) {
        for (; panel + together <= last; panel += together)
            Format::template tile<rows, together>(job, row, panel);
        for (; panel + half <= last; panel += half)
            Format::template tile<rows, half>(job, row, panel);
    }
    for (; panel < last; ++panel) Format::template tile<rows, 1>(job, row, panel);
}

template <class Format, int rows = most_rows>
void quantized_rows(const Quantized& job, int64_t row, int64_t end, int64_t first, int64_t last) {
    if constexpr (rows > 0) {
        if (end - row == rows) quantized_strip<Format, rows>(job, row, first, last);
        else quantized_rows<Format, rows - 1>(job, row, end, first, last);
    }
}

template <class Format>
void multiply_quantized(Pool& pool, const Quantized& job) {
    const int64_t panels = (job.outputs + panel_width - 1) / panel_width;
    const int64_t bytes = panel_bytes(job.inputs, job.group);
    const int64_t tiles = (job.tokens + most_rows - 1) / most_rows;
    const bool alone = tiles > 1 || reads_alone(job.tokens, bytes);
    const int together = alone ? 1 : together_at_once(static_cast<int>(job.tokens));
    const int64_t each = panels_of_chunk(panels, bytes, together, pool.threads());
    pool.run((panels + each - 1) / each, [&](int64_t chunk, int) {
        const int64_t first = chunk * each, last = std::min(panels, first + each);
        const int64_t step = tiles == 1 ? last - first : std::max<int64_t>(1, near_bytes / bytes);
        for (int64_t panel = first; panel < last; panel += step)
            for (int64_t n = 0; n < tiles; ++n)
                quantized_rows<Format>(job, job.tokens * n / tiles, job.tokens * (n + 1) / tiles,
                                       panel, std::min(last, panel + step));
        if (goes_past(job)) pass();
    });
}

}  // namespace
}  // namespace headway
