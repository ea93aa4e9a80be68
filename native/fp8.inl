// Linear layers on weights of type e4m3, eight bits with four of exponent and three of mantissa.
//
// A panel is one of bf16 (linear.inl) with a byte in the place of each number: every number of e4m3 is
// one of bf16 too, so bytes become what the kernels of bf16 read, without rounding.
//
//     e4m3   s eeee mmm                   0 1010 011 = 1.375 · 2^3
//     bf16   s (eeee + 120) mmm 0000      a shift, and 120 added to the exponent
//            exponent 0: m · 2^-9         one of eight numbers: looked up
//
// Where the CPU multiplies bf16 both bytes of a number are looked up whole, 64 at a time.
//
// Inputs are rounded to bf16. The sum of a group of inputs is one chain, first to last, as in
// linear.inl; groups join an output's sum first to last, each with a fused multiply-add for its scale.
// Bytes are widened as they are multiplied, by each tile of rows anew: beside 6 rows and more that is
// nearly free, and a panel of bytes stays in nearer caches than one of bf16. For matrix tiles they are
// widened once for all rows, 320 inputs of a panel at a time, to where the L1 cache holds them.
#pragma once
#include "linear.inl"

namespace headway {
namespace {

// A line of a panel: so many inputs of all its outputs.
constexpr int64_t fp8_line = 64, line_inputs = fp8_line / panel_width;

// 0 … 7 · 2^-9 in bf16.
constexpr uint16_t tiny[8] = {0, 0x3B00, 0x3B80, 0x3BC0, 0x3C00, 0x3C20, 0x3C40, 0x3C60};

#if defined(__AVX512BF16__)

// Bytes of the numbers 0 … 127 in bf16: the low one, sign apart the high one.
struct BytesOfE4m3 {
    alignas(64) uint8_t low[128], high[128];
    constexpr BytesOfE4m3() : low(), high() {
        for (int code = 0; code < 128; ++code) {
            const int number = code < 8 ? tiny[code] : (code << 4) + 0x3C00;
            low[code] = static_cast<uint8_t>(number);
            high[code] = static_cast<uint8_t>(number >> 8);
        }
    }
};
constexpr BytesOfE4m3 bytes_of_e4m3;

// A line as bf16: two inputs of 16 outputs, and of the others.
inline HEADWAY_INLINE void widen_line(const char* at, Words& first, Words& second) {
    const __m512i codes = load<__m512i>(at);  // their highest bit, the sign, is not looked at
    const auto look_up = [&](const uint8_t* table) HEADWAY_INLINE {
        const uint8_t* second_half = table + 64;
        asm volatile("" : "+r"(second_half));  // stays in memory: 24 sums need the registers
        return _mm512_permutex2var_epi8(load<__m512i>(table), codes, load<__m512i>(second_half));
    };
    const __m512i low = look_up(bytes_of_e4m3.low);
    const __m512i high = _mm512_ternarylogic_epi32(
        look_up(bytes_of_e4m3.high), codes, _mm512_set1_epi8(static_cast<char>(0x80)),
        0xF8);  // a | (b & c)
    first = bits_of<Words>(_mm512_unpacklo_epi8(low, high));
    second = bits_of<Words>(_mm512_unpackhi_epi8(low, high));
}

#else

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

#endif

// Numbers of x as a kernel reads them.
using Input = std::conditional_t<has_pairs, uint16_t, float>;

// Adds inputs `begin` … `end` - 1 of `rows` rows times `panels` panels, which begin at `at`.
template <int rows, int panels>
inline HEADWAY_INLINE void add_inputs(const Input* x, int64_t width,
                                      const char* const (&at)[panels], int64_t begin, int64_t end,
                                      PanelsAhead ahead, Floats (&sums)[rows][panels][2]) {
    for (int64_t input = begin; input < end; input += line_inputs) {
#pragma GCC unroll 8
        for (int p = 0; p < panels; ++p) {
            const char* line = at[p] + input * panel_width;
            prefetch(at[p] + ahead.offset + input / line_inputs * ahead.stride);
#if defined(__AVX512BF16__)
            Words first, second;
            widen_line(line, first, second);
#pragma GCC unroll 12
            for (int r = 0; r < rows; ++r) {
                const Words numbers = Words{} + load<uint32_t>(x + r * width + input);
                add_pair(sums[r][p][0], first, numbers);
                add_pair(sums[r][p][1], second, numbers);
            }
#else
#pragma GCC unroll 4
            for (int i = 0; i < line_inputs; ++i) {
                const Words words = words_of_e4m3(line + i * panel_width);
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

template <int rows, int panels>
void fp8_tile(const Linear& job, const float* x, int64_t row, int64_t panel, RowTile which) {
    const int64_t width = padded(job.inputs), group = job.group ? job.group : width;
    const int64_t groups = (width + group - 1) / group;
    const Input* from = reinterpret_cast<const Input*>(x) + row * width;
    const PanelsAhead ahead = which.ahead(width / line_inputs, fp8_line);
    const char* at[panels];
    for (int p = 0; p < panels; ++p)
        at[p] = static_cast<const char*>(job.packed) + (panel + p) * width * panel_width;
    const float* scales = job.weight_scales + panel * groups * panel_width;
    Floats totals[rows][panels][2] = {};
    for (int64_t n = 0; n < groups; ++n, scales += panel_width) {
        Floats sums[rows][panels][2] = {};
        add_inputs<rows, panels>(from, width, at, n * group, std::min(width, (n + 1) * group),
                                 ahead, sums);
        for (int p = 0; p < panels; ++p)
            for (int half = 0; half < 2; ++half) {
                const Floats scale =
                    load<Floats>(scales + p * groups * panel_width + half * lanes);
                for (int r = 0; r < rows; ++r) totals[r][p][half] += sums[r][p][half] * scale;
            }
    }
    put_tile<rows, panels>(job, row, panel, totals);
}

#if defined(__AMX_BF16__)

// Bytes that are one step of tiles, 32 inputs of a panel, as bf16 at `to`.
inline HEADWAY_INLINE void widen_step(const char* at, char* to) {
    for (int line = 0; line < step_of_panel / 2; line += fp8_line) {
        Words first, second;
        fetch_later(at + line + far_bytes);
        widen_line(at + line, first, second);
        store(to + 2 * line, first);
        store(to + 2 * line + fp8_line, second);
    }
}

// A step is a group of inputs; without groups, 64 bytes of a row. Of a few rows a panel is widened
// three steps ahead of the tiles, so that both go on at once; of many, a strip before all its tiles.
struct Fp8Tiles {
    const char *rows, *panels;
    int64_t row_bytes, step_bytes;
    const float* scales;  // of each group of each panel; none where an output has one for all inputs
    bool few;
    static constexpr int64_t strip_bytes = 640;  // of a row
    static constexpr int64_t steps_ahead = 3;

    int64_t most_steps(int64_t) const {
        return few ? 1 << 20 : std::max<int64_t>(1, strip_bytes / step_bytes);
    }
    int64_t scratch_bytes(int64_t steps) const {
        return few ? 0 : steps * step_bytes * panel_width;
    }

    const char* packed(int64_t panel, int64_t step) const {
        return panels + (panel * row_bytes + step * step_bytes) * panel_width / 2;
    }

    // Steps of tiles from step `step` on; the last group may be shorter.
    int64_t tile_steps(int64_t step, int64_t steps) const {
        return std::min(row_bytes - step * step_bytes, steps * step_bytes) / tile_bytes;
    }

    const char* open(int64_t panel, int64_t step, int64_t steps, char* scratch) const {
        const char* at = packed(panel, step);
        if (few) return at;
        for (int64_t n = 0; n < tile_steps(step, steps); ++n)
            widen_step(at + n * step_of_panel / 2, scratch + n * step_of_panel);
        return scratch;
    }

    void add(TileShape& shape, const TilePlace& at, const char* b, char* sums) const {
        shape.set(std::min(at.rows, tile_height), std::max(1, at.rows - tile_height));
        if (at.rows > tile_height) add_rows<true>(at, b, sums);
        else add_rows<false>(at, b, sums);
    }

    template <bool two>
    void add_rows(const TilePlace& at, const char* b, char* sums) const {
        if (few) return add_few<two>(at, b, sums);
        const char* next = packed(at.next_panel, at.next_step);
        const int64_t bytes = scratch_bytes(at.steps) / 2;
        const int64_t lines = parts_of(bytes, at.tiles * tile_bytes);
        PanelAhead{next + at.tile * lines * tile_bytes, next, lines, -1}.fetch(0);
        const PanelAhead none{next, next, 0, -1};
        const char* a = rows + at.row * row_bytes;
        if (!scales)
            return add_tiles<true, two>(a + at.step * step_bytes, row_bytes, b, at.steps, sums,
                                        at.step == 0, none);
        alignas(64) char found[sum_bytes];
        for (int64_t step = at.step; step < at.step + at.steps; ++step) {
            add_tiles<true, two>(a + step * step_bytes, row_bytes, b, tile_steps(step, 1), found,
                                 true, none);
            join(at, step, found, sums);
            b += step_bytes * panel_width;
        }
    }

    // The same of a panel's bytes.
    template <bool two>
    void add_few(const TilePlace& at, const char* b, char* sums) const {
        alignas(64) char ring[(steps_ahead + 1) * step_of_panel], found[sum_bytes];
        const int64_t count = tile_steps(at.step, at.steps);
        const int64_t each = scales ? step_bytes / tile_bytes : count;
        const char* a = rows + at.row * row_bytes + at.step * step_bytes;
        const auto widen = [&](int64_t n) HEADWAY_INLINE {
            widen_step(b + n * step_of_panel / 2, place(ring, n));
        };
        for (int64_t n = 0; n < std::min(count, steps_ahead); ++n) widen(n);
        for (int64_t first = 0, group = at.step; first < count; first += each, ++group) {
            open_sums<two>(sums, scales || group == 0);
            const int64_t end = std::min(count, first + each);
            for (int64_t n = first; n < end; ++n) {
                if (n + steps_ahead < count) widen(n + steps_ahead);
                add_step<true, two>(a + n * tile_bytes, row_bytes, place(ring, n));
            }
            close_sums<two>(scales ? found : sums);
            if (scales) join(at, group, found, sums);
        }
    }

    static char* place(char* ring, int64_t n) {
        return ring + n % (steps_ahead + 1) * step_of_panel;
    }

    // Adds what a group's inputs have summed up, each output times its scale.
    void join(const TilePlace& at, int64_t group, const char* found, char* sums) const {
        const int64_t groups = parts_of(row_bytes, step_bytes);
        const float* of_outputs = scales + (at.panel * groups + group) * panel_width;
        const Floats low = load<Floats>(of_outputs), high = load<Floats>(of_outputs + lanes);
        const auto add = [&](int64_t to, Floats scale) HEADWAY_INLINE {
            const Floats before = group ? load<Floats>(sums + to) : Floats{};
            store(sums + to, before + load<Floats>(found + to) * scale);
        };
        for (int64_t to = 0; to < at.rows * 4 * panel_width; to += 4 * panel_width) {
            add(to, low);
            add(to + sizeof(Floats), high);
        }
    }
};

// Sums without groups are still to be multiplied by their outputs' scales.
void put_fp8_tile(const Linear& job, int64_t row, int rows, int64_t panel, const char* at,
                  const Target& to) {
    if (job.group) return put_tile(job, row, rows, panel, at, to);
    const float* scales = job.weight_scales + panel * panel_width;
    const Floats low = load<Floats>(scales), high = load<Floats>(scales + lanes);
    for (int r = 0; r < rows; ++r, at += 4 * panel_width)
        put_outputs(job, row + r, panel * panel_width, load<Floats>(at) * low,
                    load<Floats>(at + sizeof(Floats)) * high, to);
}

// Says whether outputs that are to be gated are.
bool multiply_fp8(Pool& pool, const Linear& job) {
    if (job.tokens == 0) return false;
    const TileOutputs<Linear> outputs{job, put_fp8_tile};
    const Fp8Tiles format{reinterpret_cast<const char*>(rows_in_bf16(pool, job)),
                          static_cast<const char*>(job.packed), 2 * padded(job.inputs),
                          job.group ? 2 * job.group : tile_bytes,
                          job.group ? job.weight_scales : nullptr, job.tokens <= tile_pair};
    multiply_tiles(pool, format, job.tokens, outputs);
    return outputs.gated;
}

#else

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

// Says whether outputs that are to be gated are.
bool multiply_fp8(Pool& pool, const Linear& job) {
    if (job.tokens == 0) return false;
    multiply<Type::f8>(pool, job, reinterpret_cast<const float*>(fp8_rows(pool, job)));
    return false;
}

#endif

}  // namespace
}  // namespace headway
