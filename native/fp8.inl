// Linear layers on weights of type e4m3, eight bits with four of exponent and three of mantissa.
//
// A panel is one of bf16 (linear.inl) with a byte in the place of each number: every number of e4m3 is
// one of bf16 too, so bytes become what the kernels of bf16 read, without rounding.
//
//     e4m3   s eeee mmm                   0 1010 011 = 1.375 · 2^3
//     bf16   s (eeee + 120) mmm 0000      a shift, and 120 added to the exponent
//            exponent 0: m · 2^-9         one of eight numbers: looked up
//
// Inputs are rounded to bf16. The sum of a group of inputs is one chain, first to last, as in
// linear.inl; groups join an output's sum first to last, each with a fused multiply-add for its scale.
// Up to a few rows bytes are widened as they are multiplied; for more rows once, to memory that stays
// in the L2 cache: the same operations in the same order.
#pragma once
#include "linear.inl"

namespace headway {
namespace {

// Rows from which a panel is widened once for all of them.
constexpr int most_rows_of_bytes = lanes == 16 ? 4 : 2;
// A line of a panel: so many inputs of all its outputs.
constexpr int64_t fp8_line = 64, line_inputs = fp8_line / panel_width;
// Words of such a line once it is bf16.
constexpr int line_words = fp8_line / (2 * lanes);

// 0 … 7 · 2^-9 in bf16.
constexpr uint16_t tiny[8] = {0, 0x3B00, 0x3B80, 0x3BC0, 0x3C00, 0x3C20, 0x3C40, 0x3C60};

// 2 · lanes numbers of type e4m3 as bf16.
inline Words words_of_e4m3(const char* at) {
#if defined(__AVX512F__)
    const __m512i table = _mm512_broadcast_i32x4(load<__m128i>(tiny));
    const __m512i codes = _mm512_cvtepi8_epi16(bits_of<__m256i>(load<Halves>(at)));
    const __m512i shifted = _mm512_slli_epi16(codes, 4);
    const __m512i wide = _mm512_add_epi16(_mm512_and_si512(shifted, _mm512_set1_epi16(0x07F0)),
                                          _mm512_set1_epi16(0x3C00));
    const __mmask32 is_tiny = _mm512_testn_epi16_mask(codes, _mm512_set1_epi16(0x78));
    const __m512i sizes = _mm512_mask_permutexvar_epi16(wide, is_tiny, codes, table);
    return bits_of<Words>(_mm512_ternarylogic_epi32(
        sizes, shifted, _mm512_set1_epi32(static_cast<int>(0x80008000)), 0xF8));  // a | (b & c)
#elif defined(__AVX2__)
    const __m256i table = _mm256_broadcastsi128_si256(load<__m128i>(tiny));
    const __m256i codes = _mm256_cvtepi8_epi16(load<__m128i>(at));
    const __m256i shifted = _mm256_slli_epi16(codes, 4);
    const __m256i wide = _mm256_add_epi16(_mm256_and_si256(shifted, _mm256_set1_epi16(0x07F0)),
                                          _mm256_set1_epi16(0x3C00));
    const __m256i is_tiny = _mm256_cmpeq_epi16(
        _mm256_and_si256(codes, _mm256_set1_epi16(0x78)), _mm256_setzero_si256());
    const __m256i bytes = _mm256_add_epi16(  // 2 · m, 2 · m + 1
        _mm256_mullo_epi16(_mm256_and_si256(codes, _mm256_set1_epi16(7)), _mm256_set1_epi16(0x0202)),
        _mm256_set1_epi16(0x0100));
    const __m256i sizes = _mm256_blendv_epi8(wide, _mm256_shuffle_epi8(table, bytes), is_tiny);
    return bits_of<Words>(_mm256_or_si256(
        sizes, _mm256_and_si256(shifted, _mm256_set1_epi16(static_cast<int16_t>(0x8000)))));
#else
    uint16_t found[2 * lanes];
    for (int i = 0; i < 2 * lanes; ++i) {
        const uint32_t code = static_cast<uint8_t>(at[i]), size = code & 0x7F;
        found[i] = static_cast<uint16_t>(
            (code & 0x80) << 8 | (size < 8 ? uint32_t{tiny[size]} : (size << 4) + 0x3C00));
    }
    return load<Words>(found);
#endif
}

// Word `index` of a line of a panel, in bytes or widened already.
template <bool in_bytes>
inline HEADWAY_INLINE Words line_word(const char* line, int index) {
    if constexpr (in_bytes) return words_of_e4m3(line + index * 2 * lanes);
    else return load<Words>(line + index * 4 * lanes);
}

// Numbers of x as a kernel reads them.
using Input = std::conditional_t<has_pairs, uint16_t, float>;

// Adds inputs `begin` … `end` - 1 of `rows` rows times `panels` panels, whose lines begin at `at`.
template <bool in_bytes, int rows, int panels>
inline HEADWAY_INLINE void add_inputs(const Input* x, int64_t width,
                                      const char* const (&at)[panels], int64_t begin, int64_t end,
                                      Floats (&sums)[rows][panels][2]) {
    constexpr int64_t step = (in_bytes ? 1 : 2) * panel_width;
    for (int64_t input = begin; input < end; input += line_inputs) {
#pragma GCC unroll 8
        for (int p = 0; p < panels; ++p) {
            const char* line = at[p] + input * step;
            if constexpr (in_bytes) prefetch(line + ahead_bytes);
#if defined(__AVX512BF16__)
            const Words low = line_word<in_bytes>(line, 0), high = line_word<in_bytes>(line, 1);
#pragma GCC unroll 12
            for (int r = 0; r < rows; ++r) {
                const Words numbers = Words{} + load<uint32_t>(x + r * width + input);
                add_pair(sums[r][p][0], low, numbers);
                add_pair(sums[r][p][1], high, numbers);
            }
#else
#pragma GCC unroll 4
            for (int i = 0; i < line_words; ++i) {
                const Words words = line_word<in_bytes>(line, i);
                const Floats low = bits_of<Floats>(words << 16);
                const Floats high = bits_of<Floats>(words & 0xFFFF0000u);
#pragma GCC unroll 12
                for (int r = 0; r < rows; ++r) {
                    const float value = x[r * width + input + i];
                    sums[r][p][0] += low * value;
                    sums[r][p][1] += high * value;
                }
            }
#endif
        }
    }
}

// `rows` rows of x times `panels` panels. `wide`: the one panel, widened; null: bytes are.
template <bool in_bytes, int rows, int panels>
void fp8_tile(const Linear& job, const Input* x, int64_t row, int64_t panel, const char* wide) {
    const int64_t width = padded(job.inputs), group = job.group ? job.group : width;
    const int64_t groups = (width + group - 1) / group;
    const char* at[panels];
    for (int p = 0; p < panels; ++p)
        at[p] = in_bytes ? static_cast<const char*>(job.packed) + (panel + p) * width * panel_width
                         : wide;
    const float* scales = job.weight_scales + panel * groups * panel_width;
    Floats totals[rows][panels][2] = {};
    for (int64_t n = 0; n < groups; ++n, scales += panel_width) {
        Floats sums[rows][panels][2] = {};
        add_inputs<in_bytes, rows, panels>(x + row * width, width, at, n * group,
                                           std::min(width, (n + 1) * group), sums);
        for (int p = 0; p < panels; ++p)
            for (int half = 0; half < 2; ++half) {
                const Floats scale =
                    load<Floats>(scales + p * groups * panel_width + half * lanes);
                for (int r = 0; r < rows; ++r) totals[r][p][half] += sums[r][p][half] * scale;
            }
    }
    put_tile<rows, panels>(job, row, panel, totals);
}

template <int rows = most_rows_of_bytes>
void fp8_few_rows(const Linear& job, const Input* x, int64_t first, int64_t last) {
    if constexpr (rows > 0) {
        if (job.tokens != rows) return fp8_few_rows<rows - 1>(job, x, first, last);
        constexpr int together = panels_at_once(rows), half = (together + 1) / 2;
        int64_t panel = first;
        for (; panel + together <= last; panel += together)
            fp8_tile<true, rows, together>(job, x, 0, panel, nullptr);
        for (; panel + half <= last; panel += half)
            fp8_tile<true, rows, half>(job, x, 0, panel, nullptr);
        for (; panel < last; ++panel) fp8_tile<true, rows, 1>(job, x, 0, panel, nullptr);
    }
}

template <int rows = most_rows>
void fp8_many_rows(const Linear& job, const Input* x, int64_t row, int64_t end, int64_t panel,
                   const char* wide) {
    if constexpr (rows > 0) {
        if (end - row == rows) fp8_tile<false, rows, 1>(job, x, row, panel, wide);
        else fp8_many_rows<rows - 1>(job, x, row, end, panel, wide);
    }
}

// The whole panel in bf16.
void widen_panel(const Linear& job, int64_t panel, char* to) {
    const int64_t bytes = padded(job.inputs) * panel_width;
    const char* at = static_cast<const char*>(job.packed) + panel * bytes;
    for (int64_t byte = 0; byte < bytes; byte += 2 * lanes) {
        if (byte % fp8_line == 0) prefetch(at + byte + ahead_bytes);
        store(to + 2 * byte, words_of_e4m3(at + byte));
    }
}

// Rows of x as the kernel reads them, rounded to bf16 and padded with zeros to whole steps.
const Input* fp8_rows(Pool& pool, const Linear& job) {
#if defined(__AVX512BF16__)
    return rows_in_bf16(pool, job);
#else
    const int64_t width = padded(job.inputs);
    each_block_of_rows(pool, job, [&](int64_t row, int64_t end) {
        for (; row < end; ++row) {
            float* to = job.scratch + row * width;
            const int64_t first = row * job.inputs;
            int64_t input = 0;
            for (; input + lanes <= job.inputs; input += lanes) {
                const Words bits = round_to_bf16(floats_at(job.x, first + input, job.type));
                store(to + input, bits & 0xFFFF0000u);
            }
            for (; input < width; ++input)
                to[input] = input < job.inputs
                                ? of_bf16(to_bf16(number_at(job.x, first + input, job.type))) : 0;
        }
    });
    return job.scratch;
#endif
}

void multiply_fp8(Pool& pool, const Linear& job) {
    if (job.tokens == 0) return;
    const Input* x = fp8_rows(pool, job);
    const int64_t panels = (job.outputs + panel_width - 1) / panel_width;
    const int64_t bytes = padded(job.inputs) * panel_width;
    const int64_t tiles = (job.tokens + most_rows - 1) / most_rows;
    const bool few = job.tokens <= most_rows_of_bytes;
    const int together = few ? panels_at_once(static_cast<int>(job.tokens)) : 1;
    const int64_t each = panels_of_chunk(panels, bytes, together, pool.threads());
    pool.run((panels + each - 1) / each, [&](int64_t chunk, int) {
        const int64_t first = chunk * each, last = std::min(panels, first + each);
        if (few) fp8_few_rows(job, x, first, last);
        char* wide = few ? nullptr : thread_memory(2 * bytes);
        for (int64_t panel = first; !few && panel < last; ++panel) {
            widen_panel(job, panel, wide);
            for (int64_t n = 0; n < tiles; ++n)
                fp8_many_rows(job, x, job.tokens * n / tiles, job.tokens * (n + 1) / tiles, panel,
                              wide);
        }
        if (goes_past(job)) pass();
    });
}

}  // namespace
}  // namespace headway
