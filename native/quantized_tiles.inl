// Linear layers on int8 and int4 weights in matrix tiles (tiles.inl), and the choice between them and
// vectors.
//
// int8 without groups lies in its panels as tiles want it. The levels of groups are unpacked once for
// all rows, 512 inputs of a panel at a time, to where the L1 cache holds them, behind the scales of
// these groups, and their offsets if there are any:
//
//     [groups][32 scales in fp32]  [groups][32 offsets in fp32]  [inputs / 4][2][16][4]
//
// The integers of a group become fp32 and join the sums with the group's scale, first group to last:
// the same operations in the same order as with vectors, so a row has the same bits either way.
#include "quantized.inl"
#include "tiles.inl"

namespace headway {
namespace {

#if defined(__AMX_INT8__)

// Up to so many rows vectors multiply as fast as memory gives the weights, so tiles gain nothing
// (measured on a Sapphire Rapids: docs/kernels.md).
constexpr int64_t few_rows_int8 = 4, few_rows_groups = 12;

struct GroupTiles {
    const char *rows, *panels;
    int64_t row_bytes, step_bytes, panel_step;
    Layout layout;
    const float* of_rows;  // the sum of each group of each row, where there are offsets
    static constexpr int64_t strip_inputs = 512, least_group = 16;
    static constexpr int64_t scale_bytes = 4 * panel_width, sum_step = 4 * panel_width;

    int64_t offset_bytes() const { return layout.adds() ? scale_bytes : 0; }
    int64_t most_steps(int64_t) const { return strip_inputs / step_bytes; }
    int64_t scratch_bytes(int64_t steps) const {
        return steps * (scale_bytes + offset_bytes() + step_bytes * panel_width);
    }

    const char* packed(int64_t panel, int64_t step) const {
        return panels + panel * panel_step + step * group_bytes(layout);
    }

    const char* open(int64_t panel, int64_t step, int64_t steps, char* scratch) const {
        const char* at = packed(panel, step);
        const Behind behind(layout);
        const char* behind_all = packed(panel, row_bytes / step_bytes);
        char *scales = scratch, *offsets = scratch + steps * scale_bytes;
        char* levels = offsets + steps * offset_bytes();
        for (int64_t n = 0; n < steps; ++n) {
            const char* behind_at = behind_all + behind.of(step + n);
            for (int half = 0; half < 2; ++half) {
                const int64_t lane = half * lanes;
                const Floats scale = group_scales(layout, at, behind_at, lane);
                store(scales + half * sizeof(Floats), scale);
                if (layout.adds())
                    store(offsets + half * sizeof(Floats),
                          group_offsets(layout, at, behind_at, lane, scale));
            }
            scales += scale_bytes;
            offsets += offset_bytes();
            at += head_bytes(layout);
            at = layout.bytes ? copy_bytes(at, levels) : open_halves(at, levels);
            levels += step_bytes * panel_width;
        }
        return scratch;
    }

    // The levels of a group to `levels`; returns what lies behind them.
    const char* copy_bytes(const char* at, char* levels) const {
        for (int64_t byte = 0; byte < step_bytes * panel_width; byte += 64, at += 64) {
            fetch_int4(at + ahead_bytes);
            store(levels + byte, load<Words>(at));
        }
        return at;
    }

    const char* open_halves(const char* at, char* levels) const {
        for (int64_t input = 0; input < step_bytes; input += 8, at += 128, levels += 256) {
            fetch_int4(at + ahead_bytes);
            fetch_int4(at + ahead_bytes + 64);
            for (int half = 0; half < 2; ++half) {
                const Words both = load<Words>(at + 64 * half);
                store(levels + 64 * half, less_eight(both & 0x0F0F0F0Fu));
                store(levels + 64 * half + 128, less_eight(both >> 4 & 0x0F0F0F0Fu));
            }
        }
        return at;
    }

    static __m512i less_eight(Words halves) {
        return _mm512_sub_epi8(bits_of<__m512i>(halves), _mm512_set1_epi8(8));
    }

    void add(TileShape& shape, const TilePlace& at, const char* b, char* sums) const {
        if (at.tiles > 1) {
            const char* next = packed(at.next_panel, at.next_step);
            const int64_t lines = parts_of(at.steps * group_bytes(layout), at.tiles * tile_bytes);
            PanelAhead{next + at.tile * lines * tile_bytes, next, lines, -1}.fetch(0);
        }
        const char* a = rows + at.row * row_bytes + at.step * step_bytes;
        for (int first = 0; first < at.rows; first += tile_height) {
            const int height = std::min(tile_height, at.rows - first);
            shape.set(height, height, std::min(step_bytes, tile_bytes));
            const char* from = a + first * row_bytes;
            char* to = sums + first * sum_step;
            const int64_t groups = row_bytes / step_bytes;
            const float* of_group =
                of_rows ? of_rows + (at.row + first) * groups + at.step : nullptr;
            if (step_bytes > tile_bytes)
                add_some<2>(height, from, at.steps, b, to, at.step == 0, of_group);
            else add_some<1>(height, from, at.steps, b, to, at.step == 0, of_group);
        }
    }

    template <int parts>
    void add_some(int height, const char* a, int64_t steps, const char* b, char* sums,
                  bool fresh, const float* of_group) const {
        if (height > 12) add_rows<parts, 16>(height, a, steps, b, sums, fresh, of_group);
        else if (height > 8) add_rows<parts, 12>(height, a, steps, b, sums, fresh, of_group);
        else if (height > 4) add_rows<parts, 8>(height, a, steps, b, sums, fresh, of_group);
        else add_rows<parts, 4>(height, a, steps, b, sums, fresh, of_group);
    }

    // The sums of `steps` groups of each row, group by group; rows beyond `height` are the last again.
    void gather_sums(int height, int64_t steps, const float* of_group,
                     float (*inputs)[tile_height]) const {
        const int32_t groups = static_cast<int32_t>(row_bytes / step_bytes);
        const __m512i row = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
        const __m512i last = _mm512_min_epi32(row, _mm512_set1_epi32(height - 1));
        const __m512i places = _mm512_mullo_epi32(last, _mm512_set1_epi32(groups));
        for (int64_t n = 0; n < steps; ++n)
            store(inputs[n], _mm512_i32gather_ps(places, of_group + n, 4));
    }

    // Group `n` of one half in tile `sum`, and from there to whole[place].
#define HEADWAY_MULTIPLY_GROUP(n, sum, a_tile, b_tile)                                \
    do {                                                                              \
        HEADWAY_ZERO_TILE(sum);                                                       \
        HEADWAY_LOAD_TILE(a_tile, a + (n) * depth, row_bytes);                        \
        HEADWAY_LOAD_TILE(b_tile, levels + (n) * depth * panel_width, line);          \
        HEADWAY_ADD_INT8(sum, a_tile, b_tile);                                        \
        if constexpr (parts == 2) {                                                   \
            HEADWAY_LOAD_TILE(a_tile, a + (n) * depth + tile_bytes, row_bytes);       \
            HEADWAY_LOAD_TILE(b_tile, levels + ((n) * depth + tile_bytes) * panel_width, line); \
            HEADWAY_ADD_INT8(sum, a_tile, b_tile);                                    \
        }                                                                             \
    } while (false)

    // Up to `rows` rows: numbers of those beyond `height` are computed and not read. Two groups are
    // multiplied while the two before them are added.
    template <int parts, int rows>
    void add_rows(int height, const char* a, int64_t steps, const char* b, char* sums, bool fresh,
                  const float* of_group) const {
        constexpr int64_t line = 128;
        const int64_t depth = step_bytes;
        alignas(64) char whole[4][tile_height * 64];
        alignas(64) float inputs[strip_inputs / least_group][tile_height];
        if (of_group) gather_sums(height, steps, of_group, inputs);
        for (int half = 0; half < 2; ++half, sums += sizeof(Floats)) {
            Floats found[rows];
            each<rows>([&](auto r) HEADWAY_INLINE {
                found[r] = fresh ? Floats{} : load<Floats>(sums + r * sum_step);
            });
            const char* levels = b + steps * (scale_bytes + offset_bytes()) + 64 * half;
            const char *scales = b + 64 * half, *offsets = scales + steps * scale_bytes;
            const auto join = [&](int64_t n) HEADWAY_INLINE {
                const Floats scale = load<Floats>(scales + n * scale_bytes);
                const char* integers = whole[n % 4];
                each<rows>([&](auto r) HEADWAY_INLINE {
                    const Ints found_here = load<Ints>(integers + 64 * r);
                    found[r] += __builtin_convertvector(found_here, Floats) * scale;
                });
                if (!of_group) return;
                const Floats offset = load<Floats>(offsets + n * scale_bytes);
                each<rows>([&](auto r) HEADWAY_INLINE { found[r] += offset * all(inputs[n][r]); });
            };
            int64_t n = 0;
            for (; n + 2 <= steps; n += 2) {
                HEADWAY_MULTIPLY_GROUP(n, 0, 4, 6);
                if (n > 0) join(n - 2);
                HEADWAY_MULTIPLY_GROUP(n + 1, 1, 5, 7);
                if (n > 0) join(n - 1);
                HEADWAY_STORE_TILE(0, whole[n % 4], int64_t{64});
                HEADWAY_STORE_TILE(1, whole[n % 4 + 1], int64_t{64});
            }
            if (n > 0) join(n - 2);
            if (n > 0) join(n - 1);
            if (n < steps) {
                HEADWAY_MULTIPLY_GROUP(n, 0, 4, 6);
                HEADWAY_STORE_TILE(0, whole[n % 4], int64_t{64});
                join(n);
            }
            each<rows>([&](auto r) HEADWAY_INLINE { store(sums + r * sum_step, found[r]); });
        }
    }
#undef HEADWAY_MULTIPLY_GROUP
};

// Sums of int8 are integers, those of int4 numbers that carry their groups' scales.
void put_tile(const Quantized& job, int64_t row, int rows, int64_t panel, const char* sums,
              const Target& to) {
    if (job.layout) finish(job, row, rows, panel, 1, reinterpret_cast<const Floats*>(sums), to);
    else finish(job, row, rows, panel, 1, reinterpret_cast<const Ints*>(sums), to);
}

// Says whether outputs that are to be gated are.
bool multiply_in_tiles(Pool& pool, const Quantized& job) {
    const char* q = reinterpret_cast<const char*>(job.q);
    const char* packed = static_cast<const char*>(job.packed);
    const int64_t width = padded_inputs(job.inputs, job.layout);
    const TileOutputs<Quantized> outputs{job, put_tile};
    const Layout layout(job.layout);
    const GroupTiles format{q, packed, width, layout.group, panel_bytes(job.inputs, job.layout),
                            layout, layout.adds() ? job.sums : nullptr};
    if (layout.group) multiply_tiles(pool, format, job.tokens, outputs);
    else multiply_tiles(pool, PlainTiles<false>{q, packed, width}, job.tokens, outputs);
    return outputs.gated;
}

#endif

// Says whether outputs that are to be gated are.
bool multiply(Pool& pool, const Quantized& job) {
#if defined(__AMX_INT8__)
    const int64_t few = job.layout ? few_rows_groups : few_rows_int8;
    if (job.tokens > few) return multiply_in_tiles(pool, job);
#endif
    const Layout layout(job.layout);
    if (layout.group && layout.bytes) multiply_quantized<Grouped<true>>(pool, job);
    else if (layout.group) multiply_quantized<Grouped<false>>(pool, job);
    else multiply_quantized<Int8>(pool, job);
    return false;
}

void quantized(Pool& pool, const Quantized& job) {
    if (!multiply(pool, job)) gate_outputs(pool, job);
}

}  // namespace
}  // namespace headway
