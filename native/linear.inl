// Linear layers on 16- and 32-bit weights.
//
// Weights are packed in panels of 2 · lanes outputs, [O / panel][I][panel], so that one step along
// the inputs is one or two vector loads; inputs are padded with zeros to a multiple of 32. In bf16 a
// panel's step is `lanes` words, output j in the low half of word j and output j + lanes in the high
// half: a shift and a mask widen both. Where the CPU multiplies bf16 it is two inputs of each output,
// for vdpbf16ps, which adds two products to a sum at once, and for matrix tiles (tiles.inl).
//
// Every output is one chain of fused multiply-adds over its inputs, first to last, whatever the
// rows beside it: results do not depend on the batch. Rows are computed several at a time and
// panels several at a time, so that enough chains run at once to hide their latency:
//
//     rows at once     1   2   3   4 … 6        (registers: rows · panels · 2 sums, 16 in all)
//     panels at once   4   3   2   1
#include <algorithm>

#include "pool.h"
#include "simd.h"
#include "tiles.inl"

namespace headway {
namespace {

// Prefetch distance: 4, 8 and 16 KB are equally fast, 1 and 2 KB are slower (lab log, 2026-11-22, a
// line that nobody fetched).
constexpr int64_t ahead_bytes = 4096;
constexpr int64_t input_step = 32;
// At most so many sums of two vectors: AVX-512 has 32 registers, other sets 16, and x and the weights
// need some.
#if defined(__AVX512F__)
constexpr int most_sums = 12, most_rows = 12, most_panels = 6;
#else
constexpr int most_sums = 6, most_rows = 6, most_panels = 4;
#endif

template <Type type>
constexpr int64_t step_bytes() {
    return panel_width * (type == Type::f32 ? 4 : type == Type::f8 ? 1 : 2);
}

inline int64_t padded(int64_t inputs) { return (inputs + input_step - 1) / input_step * input_step; }

// Where a panel keeps a number: which of its numbers, those of all inputs in a row.
template <Type type>
inline int64_t place_of(int64_t input, int lane) {
    if constexpr (type != Type::bf16 && type != Type::f8) return input * panel_width + lane;
    if constexpr (has_pairs) {
        // of f8 quarters of both vectors alternate: a line is widened as it is unpacked (fp8.inl)
        const int64_t word = type == Type::bf16 ? lane : lane / 4 % 4 * 8 + lane / lanes * 4 + lane % 4;
        return input / 2 * 2 * panel_width + 2 * word + input % 2;
    }
    return input * panel_width + (lane < lanes ? 2 * lane : 2 * (lane - lanes) + 1);
}

template <Type type>
inline void widen(const char* at, Floats& low, Floats& high) {
    if constexpr (type == Type::bf16) {
        const Words words = load<Words>(at);
        low = bits_of<Floats>(words << 16);
        high = bits_of<Floats>(words & 0xFFFF0000u);
    } else {
        low = floats_at(at, 0, type);
        high = floats_at(at, lanes, type);
    }
}

template <Type type, class Number>
void pack(Pool& pool, const Number* weight, Number* packed, int64_t outputs, int64_t inputs) {
    const int64_t panels = (outputs + panel_width - 1) / panel_width, width = padded(inputs);
    pool.run(panels, [&](int64_t panel, int) {
        Number* to = packed + panel * width * panel_width;
        for (int64_t input = 0; input < width; ++input)
            for (int lane = 0; lane < panel_width; ++lane) {
                const int64_t output = panel * panel_width + lane;
                const bool inside = output < outputs && input < inputs;
                to[place_of<type>(input, lane)] = inside ? weight[output * inputs + input] : Number{};
            }
    });
}

// One row's outputs of a panel, with the bias; those beyond the last are left out.
inline void put_outputs(const Linear& job, int64_t row, int64_t output, Floats low, Floats high,
                        const Target& to) {
    const int64_t index = (row - to.row) * to.step + output - to.output;
    if (output + panel_width <= job.outputs) {
        if (job.bias) {
            low += floats_at(job.bias, output, job.type);
            high += floats_at(job.bias, output + lanes, job.type);
        }
        put_pair(to.y, index, low, high, job.type, to.past);
        return;
    }
    for (int lane = 0; output + lane < job.outputs; ++lane) {
        float sum = lane < lanes ? low[lane] : high[lane - lanes];
        if (job.bias) sum += number_at(job.bias, output + lane, job.type);
        put_number(to.y, index + lane, sum, job.type);
    }
}

template <int rows, int panels>
inline void put_tile(const Linear& job, int64_t row, int64_t panel,
                     const Floats (&sums)[rows][panels][2]) {
    for (int p = 0; p < panels; ++p)
        for (int r = 0; r < rows; ++r)
            put_outputs(job, row + r, (panel + p) * panel_width, sums[r][p][0], sums[r][p][1],
                        outputs_of(job));
}

// Step s of a panel prefetches the address offset + s · stride behind the panel's begin.
struct PanelsAhead {
    int64_t offset, stride;
};

// Which tile of rows a panel is multiplied by. A single tile prefetches the panel itself, `ahead_bytes`
// ahead. Of several, each prefetches its part of the next panel, so that memory is always read:
//
//     panel 0: tile 0     tile 1     tile 2        panel 1: tile 0
//     fetched: 0 … ⅓      ⅓ … ⅔      ⅔ … 1 of 1             0 … ⅓ of 2
struct RowTile {
    int64_t tile = 0, tiles = 1;

    PanelsAhead ahead(int64_t steps, int64_t step_bytes) const {
        if (tiles == 1) return {ahead_bytes, step_bytes};
        const int64_t stride = (step_bytes + tiles - 1) / tiles;
        return {steps * (step_bytes + tile * stride), stride};
    }
};

#if defined(__AVX512BF16__)

// Adds two products of bf16 to each sum. gcc 12 spills the intrinsic at 24 sums, and a sum of an array
// that the instruction changes in place: it goes to the stack and back at each step.
inline void add_pair(Floats& sum, Words weights, Words numbers) {
    Floats held = sum;
    asm("vdpbf16ps %2, %1, %0" : "+v"(held) : "v"(weights), "v"(numbers));
    sum = held;
}

// The sums of `tile` from x in bf16, two inputs at a time.
template <int rows, int panels>
inline HEADWAY_INLINE void add_pairs(const uint16_t* x, const char* const (&at)[panels],
                                     int64_t width, PanelsAhead ahead,
                                     Floats (&sums)[rows][panels][2]) {
    constexpr int64_t step = 2 * step_bytes<Type::bf16>();
    for (int64_t pair = 0; pair < width / 2; ++pair) {
#pragma GCC unroll 8
        for (int p = 0; p < panels; ++p) {
            const char* weights = at[p] + pair * step;
            const char* next = at[p] + ahead.offset + pair * ahead.stride;
            prefetch(next);
            prefetch(next + step / 2);
            const Words low = load<Words>(weights), high = load<Words>(weights + step / 2);
#pragma GCC unroll 12
            for (int r = 0; r < rows; ++r) {
                const Words numbers = Words{} + load<uint32_t>(x + r * width + 2 * pair);
                add_pair(sums[r][p][0], low, numbers);
                add_pair(sums[r][p][1], high, numbers);
            }
        }
    }
}

#endif

// The same on weights of type e4m3 (fp8.inl).
template <int rows, int panels>
void fp8_tile(const Linear& job, const float* x, int64_t row, int64_t panel, RowTile which);

// `rows` rows of x times `panels` panels; x is in fp32, or with `has_pairs` in the weight's bf16.
template <Type type, int rows, int panels>
void tile(const Linear& job, const float* x, int64_t row, int64_t panel, RowTile which) {
    if constexpr (type == Type::f8) return fp8_tile<rows, panels>(job, x, row, panel, which);
    const int64_t inputs = job.inputs;
    Floats sums[rows][panels][2] = {};
    const char* at[panels];
    for (int p = 0; p < panels; ++p)
        at[p] = static_cast<const char*>(job.packed) + (panel + p) * padded(inputs) * step_bytes<type>();
#if defined(__AVX512BF16__)
    if constexpr (type == Type::bf16) {
        const int64_t width = padded(inputs);
        const uint16_t* halves = reinterpret_cast<const uint16_t*>(x) + row * width;
        const PanelsAhead ahead = which.ahead(width / 2, 2 * step_bytes<type>());
        add_pairs<rows, panels>(halves, at, width, ahead, sums);
        return put_tile<rows, panels>(job, row, panel, sums);
    }
#endif
    const PanelsAhead ahead = which.ahead(padded(inputs), step_bytes<type>());
    const float* from = x + row * inputs;
    for (int64_t input = 0; input < inputs; ++input) {
        const int64_t offset = input * step_bytes<type>();
#pragma GCC unroll 8
        for (int p = 0; p < panels; ++p) {
            Floats low, high;
            prefetch(at[p] + ahead.offset + input * ahead.stride);
            widen<type>(at[p] + offset, low, high);
#pragma GCC unroll 12
            for (int r = 0; r < rows; ++r) {
                const float value = from[r * inputs + input];
                sums[r][p][0] += low * value;
                sums[r][p][1] += high * value;
            }
        }
    }
    put_tile<rows, panels>(job, row, panel, sums);
}

// Panels that `rows` rows take at once.
constexpr int panels_at_once(int rows) { return std::clamp(most_sums / rows, 1, most_panels); }

template <Type type, int rows>
void strip(const Linear& job, const float* x, int64_t row, int64_t first, int64_t last,
           RowTile which) {
    constexpr int together = panels_at_once(rows), half = (together + 1) / 2;
    int64_t panel = first;
    for (; panel + together <= last; panel += together)
        tile<type, rows, together>(job, x, row, panel, which);
    for (; panel + half <= last; panel += half) tile<type, rows, half>(job, x, row, panel, which);
    for (; panel < last; ++panel) tile<type, rows, 1>(job, x, row, panel, which);
}

// The rows in tiles of like height: 16 rows of at most 6 are 6 + 5 + 5.
template <Type type, int rows = most_rows>
void by_height(const Linear& job, const float* x, int64_t row, int height, int64_t first,
               int64_t last, RowTile which) {
    if constexpr (rows > 0) {
        if (height == rows) strip<type, rows>(job, x, row, first, last, which);
        else by_height<type, rows - 1>(job, x, row, height, first, last, which);
    }
}

template <Type type>
void multiply(Pool& pool, const Linear& job, const float* x) {
    const int64_t panels = (job.outputs + panel_width - 1) / panel_width;
    const int64_t bytes = padded(job.inputs) * step_bytes<type>();
    const int64_t tiles = (job.tokens + most_rows - 1) / most_rows;
    const int together = tiles == 1 ? panels_at_once(static_cast<int>(job.tokens)) : 1;
    const int64_t each = panels_of_chunk(panels, bytes, together, pool.threads());
    pool.run((panels + each - 1) / each, [&](int64_t chunk, int) {
        const int64_t first = chunk * each, last = std::min(panels, first + each);
        if (tiles == 1) by_height<type>(job, x, 0, static_cast<int>(job.tokens), first, last, {});
        for (int64_t panel = first; tiles > 1 && panel < last; ++panel)
            for (int64_t n = 0; n < tiles; ++n) {
                const int64_t row = job.tokens * n / tiles, end = job.tokens * (n + 1) / tiles;
                by_height<type>(job, x, row, static_cast<int>(end - row), panel, panel + 1,
                                {n, tiles});
            }
        if (goes_past(job)) pass();
    });
}

void pack_linear(Pool& pool, const void* weight, void* packed, int64_t outputs, int64_t inputs,
                 Type type) {
    const auto* halves = static_cast<const uint16_t*>(weight);
    auto* to = static_cast<uint16_t*>(packed);
    if (type == Type::f32)
        pack<Type::f32>(pool, static_cast<const float*>(weight), static_cast<float*>(packed),
                        outputs, inputs);
    else if (type == Type::f8)
        pack<Type::f8>(pool, static_cast<const uint8_t*>(weight), static_cast<uint8_t*>(packed),
                       outputs, inputs);
    else if (type == Type::bf16) pack<Type::bf16>(pool, halves, to, outputs, inputs);
    else pack<Type::f16>(pool, halves, to, outputs, inputs);
}

// Calls convert(first, end) for all numbers of x, in chunks of whole rows.
template <class Convert>
void each_block_of_rows(Pool& pool, const Linear& job, const Convert& convert) {
    const int64_t block = std::max<int64_t>(1, 16384 / job.inputs);
    pool.run((job.tokens + block - 1) / block, [&](int64_t chunk, int) {
        convert(chunk * block, std::min(job.tokens, (chunk + 1) * block));
    });
}

#if defined(__AVX512BF16__)

// Rows of x in bf16, padded to whole tiles: x itself where nothing is to be done.
const uint16_t* rows_in_bf16(Pool& pool, const Linear& job) {
    const int64_t width = padded(job.inputs);
    if (job.type == Type::bf16 && width == job.inputs) return static_cast<const uint16_t*>(job.x);
    uint16_t* rows = reinterpret_cast<uint16_t*>(job.scratch);
    each_block_of_rows(pool, job, [&](int64_t row, int64_t end) {
        for (; row < end; ++row)
            for (int64_t input = 0; input < width; ++input)
                rows[row * width + input] =
                    input < job.inputs
                        ? to_bf16(number_at(job.x, row * job.inputs + input, job.type)) : 0;
    });
    return rows;
}

#endif
#if defined(__AMX_BF16__)

void put_tile(const Linear& job, int64_t row, int rows, int64_t panel, const char* at,
              const Target& to) {
    const float* sums = reinterpret_cast<const float*>(at);
    for (int r = 0; r < rows; ++r, sums += panel_width)
        put_outputs(job, row + r, panel * panel_width, load<Floats>(sums),
                    load<Floats>(sums + lanes), to);
}

// Says whether outputs that are to be gated are.
bool multiply_in_tiles(Pool& pool, const Linear& job, const uint16_t* x) {
    const TileOutputs<Linear> outputs{job, put_tile};
    const PlainTiles<true> format{reinterpret_cast<const char*>(x),
                                  static_cast<const char*>(job.packed), 2 * padded(job.inputs)};
    multiply_tiles(pool, format, job.tokens, outputs);
    return outputs.gated;
}

#endif

bool multiply_fp8(Pool& pool, const Linear& job);  // fp8.inl

// Says whether outputs that are to be gated are.
bool multiply(Pool& pool, const Linear& job) {
    if (job.weight_type == Type::f8) return multiply_fp8(pool, job);
#if defined(__AVX512BF16__)
    if (job.weight_type == Type::bf16) {
        const uint16_t* halves = rows_in_bf16(pool, job);
#if defined(__AMX_BF16__)
        return multiply_in_tiles(pool, job, halves);
#else
        multiply<Type::bf16>(pool, job, reinterpret_cast<const float*>(halves));
        return false;
#endif
    }
#endif
    const float* x = static_cast<const float*>(job.x);
    if (job.type != Type::f32) {
        each_block_of_rows(pool, job, [&](int64_t row, int64_t last) {
            const int64_t end = last * job.inputs;
            int64_t at = row * job.inputs;
            for (; at + lanes <= end; at += lanes)
                store(job.scratch + at, floats_at(job.x, at, job.type));
            for (; at < end; ++at) job.scratch[at] = number_at(job.x, at, job.type);
        });
        x = job.scratch;
    }
    if (job.weight_type == Type::f32) multiply<Type::f32>(pool, job, x);
    else if (job.weight_type == Type::bf16) multiply<Type::bf16>(pool, job, x);
    else multiply<Type::f16>(pool, job, x);
    return false;
}

void linear(Pool& pool, const Linear& job) {
    if (!multiply(pool, job)) gate_outputs(pool, job);
}

}  // namespace
}  // namespace headway
