// Linear layers on int8 and int4 weights, with activations rounded to int8 row by row.
//
// Weights are packed in panels of 2 · lanes outputs. In int8 a step is 4 inputs of every output,
// [O / panel][I / 4][2][lanes][4], and each output has a scale of its own. In groups, a group of
// inputs is one run of bytes: the panel's scales, fp16 or fp32, fp32 offsets if there are any, and
// then steps, of int8 as above, of int4 of 8 inputs: byte i of an output holds q + 8 of input i in its
// low half and of input i + 4 in its high half. Zeros, a byte each, stand behind the panel's groups:
// so steps begin at cache lines. In super-blocks a group begins with a byte for each scale and each
// minimum, and their factors, in fp16 for 256 inputs, stand behind the panel's groups.
//
//     int4, AVX2, groups of 64:   [16 scales of 2 bytes][8 steps][2][8 outputs][4 bytes]  = 544 bytes
//
// Inputs are padded with zeros to whole steps or groups. Activations have a scale for each block of a
// row. Inputs that share both scales are a unit: its sum of products is an integer, exact in any order,
// and joins the output's sum with one fused multiply-add for the product of both scales; after a
// group's units one more adds its offset. Units are added first to last: results do not depend on the
// batch. Without groups the output's scale multiplies the whole sum at the end.
// With matrix tiles more than a few rows are multiplied by quantized_tiles.inl, to the same bits.
#pragma once
#include <utility>

#include "quantized_panels.inl"

namespace headway {
namespace {

constexpr int64_t dots_bytes = 4 * lanes, line_bytes = 64;
constexpr int64_t near_bytes = 96 * 1024;  // panels that stay in the L2 cache for all rows
constexpr int64_t short_bytes = 32 * 1024;  // a panel of few pages

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
    return lanes == 16 && rows > 2 && bytes <= short_bytes;
}

// Prefetch distance of a panel that is read beside others: with several, 2 KB is faster than 4 (the
// same entry).
constexpr int64_t ahead_beside(int panels) {
    return lanes == 16 && panels > 1 ? ahead_bytes / 2 : ahead_bytes;
}

// Whether prefetches are interleaved across pages of the same panel, see `PlacesAhead`.
constexpr bool fetches_places(int panels) { return lanes == 16 && panels == 1; }

// Whether several panels of int4 in groups are prefetched as they are read: long ones, and those of one
// row, are read faster by the processor's own fetching alone (lab log, 2026-11-26).
constexpr bool fetches_beside(int rows, int64_t bytes) {
    return rows > 1 && (lanes == 8 || bytes <= short_bytes);
}

// With int4, AVX-512 is so fast that the 16 line-fill buffers of the L1 cache limit it: its weights
// are prefetched into L2.
HEADWAY_INLINE inline void fetch_int4(const char* at) {
    if constexpr (lanes == 16) fetch_later(at);
    else prefetch(at);
}

// An output's number: the sum, its scale where groups have none, and the bias.
template <Type type>
inline Floats output_of(const Quantized& job, int64_t output, Floats sum) {
    const Floats bias = job.bias ? floats_before(job.bias, output, job.outputs, type) : Floats{};
    return job.weight_scales ? sum * load<Floats>(job.weight_scales + output) + bias : sum + bias;
}

// Stores what a tile of `rows` · `panels` has summed up, [rows][panels][2] vectors.
template <Type type>
void finish(const Quantized& job, int64_t row, int rows, int64_t panel, int panels,
            const Floats* sums, const Target& to) {
    for (int r = 0; r < rows; ++r)
        for (int p = 0; p < panels; ++p, sums += 2) {
            const int64_t output = (panel + p) * panel_width, left = job.outputs - output;
            const int64_t index = (row + r - to.row) * to.step + output - to.output;
            const Floats low = output_of<type>(job, output, sums[0]);
            if (left >= panel_width) {
                const Floats high = output_of<type>(job, output + lanes, sums[1]);
                put_pair(to.y, index, low, high, type, to.past);
                continue;
            }
            put_some<type>(to.y, index, low, left);
            if (left > lanes)
                put_some<type>(to.y, index + lanes, output_of<type>(job, output + lanes, sums[1]),
                               left - lanes);
        }
}

void finish(const Quantized& job, int64_t row, int rows, int64_t panel, int panels,
            const Floats* sums, const Target& to) {
    if (job.type == Type::bf16) finish<Type::bf16>(job, row, rows, panel, panels, sums, to);
    else if (job.type == Type::f16) finish<Type::f16>(job, row, rows, panel, panels, sums, to);
    else finish<Type::f32>(job, row, rows, panel, panels, sums, to);
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

// What every tile of a product needs, computed once: the divisions take as long as a join.
struct Sizes {
    Layout layout;
    int64_t width, bytes, group, groups, unit, units, blocks, head, step;
    int block_shift;
    Behind behind;

    explicit Sizes(const Quantized& job)
        : layout(job.layout),
          width(padded_inputs(job.inputs, job.layout)),
          bytes(panel_bytes(job.inputs, job.layout)),
          group(layout.group ? layout.group : width),
          groups(width / group),
          unit(layout.unit()),
          units((width + unit - 1) / unit),
          blocks((width + layout.block() - 1) / layout.block()),
          head(layout.group ? head_bytes(layout) : 0),
          step(layout.group ? group_bytes(layout) : bytes),
          block_shift(__builtin_ctzll(layout.block())),
          behind(layout) {}
};

// Weights of int4 or int8, in groups with scales of their own or, `whole`, without: int8 by output.
template <bool in_bytes, bool whole = false>
struct PackedLevels {
    static_assert(in_bytes || !whole);
    using Dots = std::conditional_t<in_bytes, Int8Dots, Int4Dots>;
    static constexpr int parts = in_bytes ? 1 : 2;  // inputs of a step, by four
    static constexpr int64_t step_inputs = 4 * parts;

    static Dots dots_of(const char* at, int part) {
        if constexpr (in_bytes) return Dots(at);
        else return Dots(at, 4 * part);
    }

    // The integer sums of one unit of inputs.
    template <int rows, int panels, bool fetches>
    HEADWAY_INLINE static inline void unit(Ints* totals, const int8_t* q, int64_t width,
                                           const int32_t* starts, int64_t units, const char* at,
                                           int64_t bytes, int64_t length, PlacesAhead& next) {
        constexpr int halves = 2 * panels;
        constexpr int64_t ahead = ahead_beside(panels);
        typename Dots::Sum sums[rows * halves];
        each<rows * halves>([&](auto i) HEADWAY_INLINE {
            sums[i] = Dots::start(starts[i / halves * units]);
        });
        for (const int8_t* end = q + length; q < end; q += step_inputs, at += 2 * dots_bytes) {
            each<parts>([&](auto part) HEADWAY_INLINE {
                Dots dots[halves];
                each<halves>([&](auto half) HEADWAY_INLINE {
                    const char* here = at + half / 2 * bytes + half % 2 * dots_bytes;
                    if (fetches && part == 0 && (half % 2 == 0 || dots_bytes == line_bytes)) {
                        if constexpr (in_bytes) prefetch(here + ahead);
                        else if constexpr (fetches_places(panels)) next.fetch();
                        else fetch_int4(here + ahead);
                    }
                    dots[half] = dots_of(here, part);
                });
                each<rows>([&](auto r) HEADWAY_INLINE {
                    const Four four = four_of(q + r * width + 4 * part);
                    each<halves>([&](auto half) HEADWAY_INLINE {
                        dots[half].add(sums[r * halves + half], four);
                    });
                });
            });
        }
        each<rows * halves>([&](auto i) HEADWAY_INLINE { totals[i] = Dots::total(sums[i]); });
    }

    // Prefetches `count` bytes of each panel as `unit` does: scales, offsets and zeros.
    template <int panels>
    HEADWAY_INLINE static inline void fetch_head(const char* at, int64_t bytes, int64_t count,
                                                 PlacesAhead& next) {
        for (int64_t line = 0; line < count; line += line_bytes) {
            if constexpr (!in_bytes && fetches_places(panels)) next.fetch();
            else
                for (int panel = 0; panel < panels; ++panel)
                    fetch_int4(at + panel * bytes + line + ahead_beside(panels));
        }
    }

    // Prefetches `count` bytes of what stands behind the groups. It is read a line now and then, which
    // no processor foresees: so of several panels that of the next ones is fetched, at the same place.
    template <int panels>
    HEADWAY_INLINE static inline void fetch_behind(const char* at, int64_t bytes, int64_t count,
                                                   PlacesAhead& next) {
        for (int64_t line = 0; line < count; line += line_bytes) {
            if constexpr (!in_bytes && fetches_places(panels)) next.fetch();
            else
                for (int panel = 0; panel < panels; ++panel)
                    fetch_int4(at + (panels + panel) * bytes + line);
        }
    }

    // Calls work with the group's layout in constants, asked once and not for each half of a panel.
    template <class Work>
    HEADWAY_INLINE static inline void with_layout(const Layout& layout, const Work& work) {
        constexpr int64_t levels = 32 | (in_bytes ? Layout::in_bytes : 0);
        if (layout.supers) work(Layout(levels | Layout::in_supers));
        else if (layout.zeros && !layout.wide) work(Layout(levels | Layout::with_zeros));
        else if (layout.zeros) work(Layout(levels | Layout::with_zeros | Layout::in_fp32));
        else if (layout.wide) work(Layout(levels | Layout::in_fp32));
        else work(Layout(levels));
    }

    // Adds the integers of a unit, each times the scale of its block of the row, `scales[r · blocks]`,
    // and that of its group at `at`, with what that has behind at `behind`; then with `adds` the
    // group's offset times the sum of the row's inputs. One half of a panel after the other: the
    // scales of all would not stay in registers.
    template <bool adds, int rows, int panels>
    HEADWAY_INLINE static inline void join(const Layout& layout, const char* at, const char* behind,
                                           int64_t bytes, const Ints* totals, const float* scales,
                                           int64_t blocks, const float* of_rows, int64_t groups,
                                           Floats* sums) {
        constexpr int halves = 2 * panels;
        if constexpr (whole) {
            each<rows * halves>([&](auto i) HEADWAY_INLINE {
                sums[i] += __builtin_convertvector(totals[i], Floats) * all(scales[i / halves * blocks]);
            });
            return;
        }
        with_layout(layout, [&](const Layout& known) HEADWAY_INLINE {
            each<halves>([&](auto half) HEADWAY_INLINE {
                const int64_t lane = half % 2 * lanes;
                const char *head = at + half / 2 * bytes, *shared = behind + half / 2 * bytes;
                const Floats scale = group_scales(known, head, shared, lane);
                Floats offset{};
                if constexpr (adds) offset = group_offsets(known, head, shared, lane, scale);
                each<rows>([&](auto r) HEADWAY_INLINE {
                    constexpr int i = r * halves + half;
                    const Floats both = scale * all(scales[r * blocks]);
                    sums[i] += __builtin_convertvector(totals[i], Floats) * both;
                    if constexpr (adds) sums[i] += offset * all(of_rows[r * groups]);
                });
            });
        });
    }

    template <int rows, int panels>
    static void tile(const Quantized& job, const Sizes& sizes, int64_t row, int64_t panel) {
        constexpr int halves = 2 * panels;
        const Layout& layout = sizes.layout;
        const Behind& behind = sizes.behind;
        const int64_t width = sizes.width, bytes = sizes.bytes, units = sizes.units;
        const int64_t groups = sizes.groups, blocks = sizes.blocks;
        const int8_t* q = job.q + row * width;
        const int32_t* starts = job.starts + row * units;
        const float* scales = job.scales + row * blocks;
        const float* of_rows = layout.adds() ? job.sums + row * groups : nullptr;
        const char* at = static_cast<const char*>(job.packed) + panel * bytes;
        const char* behind_at = at + groups * sizes.step;
        PlacesAhead next(at, bytes);
        Floats sums[rows * halves] = {};
        const bool fetches_behind = behind.bytes && (panels == 1 || bytes <= short_bytes);
        int64_t fetched = 0;  // of what stands behind
        const bool fetches = panels == 1 || whole || (!in_bytes && fetches_beside(rows, bytes));
        constexpr bool may_fetch = panels == 1 || whole || (!in_bytes && rows > 1);
        for (int64_t input = 0, n = 0; input < width; ++n) {
            if (!whole && fetches) fetch_head<panels>(at, bytes, sizes.head, next);
            const int64_t shared = behind.of(n);
            if (fetches_behind && shared >= fetched) {
                const int64_t count = std::max(behind.bytes, line_bytes);
                fetch_behind<panels>(behind_at + shared, bytes, count, next);
                fetched = shared + count;
            }
            const char* head_at = at;
            at += sizes.head;
            const int64_t end = input + sizes.group;
            while (input < end) {
                const int64_t inputs = whole ? std::min(sizes.unit, end - input) : sizes.unit;
                Ints totals[rows * halves];
                const auto add = [&](auto ahead) HEADWAY_INLINE {
                    unit<rows, panels, ahead>(totals, q + input, width, starts, units, at, bytes,
                                              inputs, next);
                };
                if (fetches) add(std::bool_constant<may_fetch>{});
                else add(std::bool_constant<panels == 1 || whole>{});
                const float* of_block = scales + (input >> sizes.block_shift);
                at += inputs * panel_width / (in_bytes ? 1 : 2);
                input += inputs;
                ++starts;
                if (of_rows && input == end)
                    join<true, rows, panels>(layout, head_at, behind_at + shared, bytes, totals,
                                             of_block, blocks, of_rows++, groups, sums);
                else
                    join<false, rows, panels>(layout, head_at, behind_at + shared, bytes, totals,
                                              of_block, blocks, nullptr, groups, sums);
            }
        }
        finish(job, row, rows, panel, panels, sums, outputs_of(job));
    }
};

template <class Format, int rows>
void quantized_strip(const Quantized& job, const Sizes& sizes, int64_t row, int64_t first,
                     int64_t last) {
    constexpr int together = together_at_once(rows), half = (together + 1) / 2;
    int64_t panel = first;
    if (!reads_alone(rows, sizes.bytes)) {
        for (; panel + together <= last; panel += together)
            Format::template tile<rows, together>(job, sizes, row, panel);
        for (; panel + half <= last; panel += half)
            Format::template tile<rows, half>(job, sizes, row, panel);
    }
    for (; panel < last; ++panel) Format::template tile<rows, 1>(job, sizes, row, panel);
}

template <class Format, int rows = most_rows>
void quantized_rows(const Quantized& job, const Sizes& sizes, int64_t row, int64_t end,
                    int64_t first, int64_t last) {
    if constexpr (rows > 0) {
        if (end - row == rows) quantized_strip<Format, rows>(job, sizes, row, first, last);
        else quantized_rows<Format, rows - 1>(job, sizes, row, end, first, last);
    }
}

template <class Format>
void multiply_quantized(Pool& pool, const Quantized& job) {
    const int64_t panels = (job.outputs + panel_width - 1) / panel_width;
    const Sizes sizes(job);
    const int64_t bytes = sizes.bytes, tiles = (job.tokens + most_rows - 1) / most_rows;
    const bool alone = tiles != 1 || reads_alone(job.tokens, bytes);
    const int together = alone ? 1 : together_at_once(static_cast<int>(job.tokens));
    const int64_t each = panels_of_chunk(panels, bytes, together, pool.threads());
    pool.run((panels + each - 1) / each, [&](int64_t chunk, int) {
        const int64_t first = chunk * each, last = std::min(panels, first + each);
        const int64_t step = tiles == 1 ? last - first : std::max<int64_t>(1, near_bytes / bytes);
        for (int64_t panel = first; panel < last; panel += step)
            for (int64_t n = 0; n < tiles; ++n)
                quantized_rows<Format>(job, sizes, job.tokens * n / tiles,
                                       job.tokens * (n + 1) / tiles, panel,
                                       std::min(last, panel + step));
        if (goes_past(job)) pass();
    });
}

}  // namespace
}  // namespace headway
