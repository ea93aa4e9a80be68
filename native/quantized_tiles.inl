// Linear layers on int8 and int4 weights in matrix tiles (tiles.inl), and the choice between them and
// vectors.
//
// int8 without groups lies in its panels as tiles want it. The levels of groups are unpacked once for
// all rows, 512 inputs of a panel at a time, to where the L1 cache holds them, behind the scales of
// these groups, and their offsets if there are any:
//
//     [groups][32 scales in fp32]  [groups][32 offsets in fp32]  [inputs / 4][2][16][4]
//
// The integers of a unit become fp32 and join the sums with both scales, first unit to last: the same
// operations in the same order as with vectors, so a row has the same bits either way.
#include "quantized.inl"
#include "tiles.inl"

namespace headway {
namespace {

#if defined(__AMX_INT8__)

// Up to so many rows vectors multiply as fast as memory gives the weights, so tiles gain nothing
// (measured on a Sapphire Rapids: docs/kernels.md).
constexpr int64_t few_rows_int8 = 4, few_rows_groups = 12;

// A step is a group or, without groups, a block of inputs; a row's last block may be shorter.
template <bool whole>
struct LevelTiles {
    const Quantized& job;
    const char *rows, *panels;
    int64_t row_bytes, step_bytes, panel_step;
    Layout layout;
    static constexpr int64_t strip_inputs = 512, scale_bytes = 4 * panel_width;
    int64_t blocks, groups;
    int units_of_block, units_of_group;  // as powers of two
    const float *row_scales, *row_sums;

    explicit LevelTiles(const Quantized& of)
        : job(of),
          rows(reinterpret_cast<const char*>(of.q)),
          panels(static_cast<const char*>(of.packed)),
          row_bytes(padded_inputs(of.inputs, of.layout)),
          step_bytes(whole ? Layout(of.layout).block() : Layout(of.layout).group),
          panel_step(panel_bytes(of.inputs, of.layout)),
          layout(of.layout),
          blocks(parts_of(row_bytes, layout.block())),
          groups(whole ? 0 : parts_of(row_bytes, layout.group)),
          units_of_block(__builtin_ctzll(layout.block() / layout.unit())),
          units_of_group(whole ? 0 : __builtin_ctzll(layout.group / layout.unit())) {
        thread_local std::vector<float> scales, sums;
        row_scales = by_tile(of.scales, blocks, scales);
        row_sums = layout.adds() ? by_tile(of.sums, groups, sums) : nullptr;
    }

    // [rows][count] → [rows / 16][count][16], numbers beyond the last row are that row's: what lies
    // beside each other is read with each panel.
    const float* by_tile(const float* numbers, int64_t count, std::vector<float>& to) const {
        const int64_t tiles = parts_of(job.tokens, tile_height);
        to.resize(tiles * count * tile_height);
        const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
        for (int64_t tile = 0; tile < tiles; ++tile) {
            const int64_t row = tile * tile_height;
            const int last = static_cast<int>(std::min<int64_t>(tile_height, job.tokens - row)) - 1;
            const __m512i places = _mm512_mullo_epi32(_mm512_min_epi32(lane, _mm512_set1_epi32(last)),
                                                      _mm512_set1_epi32(static_cast<int32_t>(count)));
            for (int64_t n = 0; n < count; ++n)
                store(to.data() + (tile * count + n) * tile_height,
                      _mm512_i32gather_ps(places, numbers + row * count + n, 4));
        }
        return to.data();
    }

    int64_t offset_bytes() const { return layout.adds() ? scale_bytes : 0; }
    int64_t most_steps(int64_t) const { return strip_inputs / step_bytes; }
    int64_t scratch_bytes(int64_t steps) const {
        return whole ? 0 : steps * (scale_bytes + offset_bytes() + step_bytes * panel_width);
    }

    const char* packed(int64_t panel, int64_t step) const {
        return panels + panel * panel_step +
               step * (whole ? step_bytes * panel_width : group_bytes(layout));
    }

    const char* open(int64_t panel, int64_t step, int64_t steps, char* scratch) const {
        const char* at = packed(panel, step);
        if (whole) return at;
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

    // What a strip brings to a tile of up to 16 rows: its inputs, what it fetches from memory beside
    // itself, and for each block the rows' scales, for each group the sums of their inputs.
    struct Strip {
        int64_t inputs, unit;
        PanelAhead ahead;
        const float *scales, *sums;
    };

    void add(TileShape& shape, const TilePlace& at, const char* b, char* sums) const {
        const int64_t first = at.step * step_bytes, end = (at.step + at.steps) * step_bytes;
        Strip strip;
        strip.inputs = std::min(end, row_bytes) - first;
        strip.unit = layout.unit();
        const char* next = packed(at.next_panel, at.next_step);
        const int64_t bytes = whole ? strip.inputs * panel_width : at.steps * group_bytes(layout);
        strip.ahead = {next, next, 0, -1};
        if (at.tiles > 1) {
            const int64_t lines = parts_of(bytes, at.tiles * tile_bytes);
            PanelAhead{next + at.tile * lines * tile_bytes, next, lines, -1}.fetch(0);
        } else if (whole) {
            strip.ahead.lines = lines_of_step;
        }
        if constexpr (whole) return add_whole(shape, at, b, sums, strip);
        for (int row = 0; row < at.rows; row += tile_height) {
            const int height = std::min(tile_height, at.rows - row);
            shape.set(height, height, std::min(strip.unit, tile_bytes));
            const int64_t tile = (at.row + row) / tile_height;
            strip.scales = row_scales + (tile * blocks + first / layout.block()) * tile_height;
            if (layout.adds())
                strip.sums = row_sums + (tile * groups + first / layout.group) * tile_height;
            const char* from = rows + (at.row + row) * row_bytes + first;
            add_some(height, from, at.steps, b, sums + row * sum_step, at.step == 0, strip);
            strip.ahead.lines = 0;
        }
    }

    // Adds up to 32 rows of a weight without groups to the sums, in four tiles at a time (tiles.inl).
    void add_whole(TileShape& shape, const TilePlace& at, const char* b, char* sums,
                   Strip& strip) const {
        const int64_t first = at.step * step_bytes, tile = at.row / tile_height;
        const char* from = rows + at.row * row_bytes + first;
        strip.scales = row_scales + (tile * blocks + first / layout.block()) * tile_height;
        shape.set(std::min(at.rows, tile_height), std::max(1, at.rows - tile_height));
        const bool fresh = at.step == 0;
        if (at.rows > tile_height) add_blocks<true, tile_height>(from, b, sums, fresh, strip);
        else if (at.rows > 8) add_blocks<false, tile_height>(from, b, sums, fresh, strip);
        else add_blocks<false, 8>(from, b, sums, fresh, strip);
    }

    // Adds the integers of each block of inputs times the scales of its rows, first block to last.
    template <bool two, int rows>
    void add_blocks(const char* a, const char* b, char* sums, bool fresh, Strip& strip) const {
        constexpr int tiles = two ? 4 : 2, tile_size = tile_height * tile_bytes;
        const int64_t steps = strip.inputs / tile_bytes, steps_of_block = layout.block() / tile_bytes;
        alignas(64) char products[tiles * tile_size];
        for (int64_t block = 0, step = 0; step < steps; ++block) {
            open_sums<two>(nullptr, true);
            for (const int64_t end = std::min(steps, step + steps_of_block); step < end; ++step) {
                strip.ahead.fetch(step);
                add_step<false, two>(a + step * tile_bytes, row_bytes, b + step * step_of_panel);
            }
            HEADWAY_STORE_TILE(0, products, tile_bytes);
            HEADWAY_STORE_TILE(1, products + tile_size, tile_bytes);
            if constexpr (two) HEADWAY_STORE_TILE(2, products + 2 * tile_size, tile_bytes);
            if constexpr (two) HEADWAY_STORE_TILE(3, products + 3 * tile_size, tile_bytes);
            const bool is_first = fresh && block == 0;
            for (int tile = 0; tile < tiles; ++tile) {
                const float* of_rows = strip.scales + (tile / 2 * blocks + block) * tile_height;
                const char* integers = products + tile * tile_size;
                char* to = sums + tile / 2 * second_sums + tile % 2 * tile_bytes;
                each<rows>([&](auto r) HEADWAY_INLINE {
                    const Floats sum = is_first ? Floats{} : load<Floats>(to + r * sum_step);
                    const Ints number = load<Ints>(integers + r * tile_bytes);
                    // fused by name: gcc contracts nothing over a condition
                    store(to + r * sum_step,
                          _mm512_fmadd_ps(__builtin_convertvector(number, Floats), all(of_rows[r]), sum));
                });
            }
        }
    }

    void add_some(int height, const char* a, int64_t steps, const char* b, char* sums, bool fresh,
                  Strip& strip) const {
        if (height > 12) add_rows<16>(a, steps, b, sums, fresh, strip);
        else if (height > 8) add_rows<12>(a, steps, b, sums, fresh, strip);
        else if (height > 4) add_rows<8>(a, steps, b, sums, fresh, strip);
        else add_rows<4>(a, steps, b, sums, fresh, strip);
    }

    // Unit `n` of one half in tile `sum`.
#define HEADWAY_MULTIPLY_UNIT(n, sum, a_tile, b_tile)                                      \
    do {                                                                                   \
        const int64_t begin = (n) * strip.unit;                                            \
        const int64_t end = std::min(begin + strip.unit, strip.inputs);                    \
        HEADWAY_ZERO_TILE(sum);                                                            \
        for (int64_t input = begin; input < end; input += tile_bytes) {                    \
            HEADWAY_LOAD_TILE(a_tile, a + input, row_bytes);                               \
            HEADWAY_LOAD_TILE(b_tile, levels + input * panel_width, line);                 \
            HEADWAY_ADD_INT8(sum, a_tile, b_tile);                                         \
        }                                                                                  \
        if (half == 0) strip.ahead.fetch(n);                                               \
    } while (false)

    // Up to `rows` rows: numbers of those beyond the tile's height are computed and not read. Two units
    // are multiplied while the two before them are added.
    template <int rows>
    void add_rows(const char* a, int64_t steps, const char* b, char* sums, bool fresh,
                  Strip& strip) const {
        constexpr int64_t line = 128;
        const int64_t units = parts_of(strip.inputs, strip.unit);
        alignas(64) char products[4][tile_height * 64];
        for (int half = 0; half < 2; ++half, sums += sizeof(Floats)) {
            Floats found[rows];
            each<rows>([&](auto r) HEADWAY_INLINE {
                found[r] = fresh ? Floats{} : load<Floats>(sums + r * sum_step);
            });
            const char* levels = b + 64 * half;
            const char *scales = b + 64 * half, *offsets = scales + steps * scale_bytes;
            levels += steps * (scale_bytes + offset_bytes());
            const auto join = [&](int64_t n) HEADWAY_INLINE {
                const int64_t group = n >> units_of_group;
                const float* of_rows = strip.scales + (n >> units_of_block) * tile_height;
                const char* integers = products[n % 4];
                const Floats scale = load<Floats>(scales + group * scale_bytes);
                each<rows>([&](auto r) HEADWAY_INLINE {
                    const Ints unit = load<Ints>(integers + 64 * r);
                    const Floats of_row = all(of_rows[r]);
                    found[r] += __builtin_convertvector(unit, Floats) * (scale * of_row);
                });
                if (!layout.adds() || (n + 1) >> units_of_group == group) return;
                const Floats offset = load<Floats>(offsets + group * scale_bytes);
                const float* of_group = strip.sums + group * tile_height;
                each<rows>([&](auto r) HEADWAY_INLINE { found[r] += offset * all(of_group[r]); });
            };
            int64_t n = 0;
            for (; n + 2 <= units; n += 2) {
                HEADWAY_MULTIPLY_UNIT(n, 0, 4, 6);
                if (n > 0) join(n - 2);
                HEADWAY_MULTIPLY_UNIT(n + 1, 1, 5, 7);
                if (n > 0) join(n - 1);
                HEADWAY_STORE_TILE(0, products[n % 4], int64_t{64});
                HEADWAY_STORE_TILE(1, products[n % 4 + 1], int64_t{64});
            }
            if (n > 0) join(n - 2);
            if (n > 0) join(n - 1);
            if (n < units) {
                HEADWAY_MULTIPLY_UNIT(n, 0, 4, 6);
                HEADWAY_STORE_TILE(0, products[n % 4], int64_t{64});
                join(n);
            }
            each<rows>([&](auto r) HEADWAY_INLINE { store(sums + r * sum_step, found[r]); });
        }
    }
#undef HEADWAY_MULTIPLY_UNIT
};

void put_tile(const Quantized& job, int64_t row, int rows, int64_t panel, const char* sums,
              const Target& to) {
    finish(job, row, rows, panel, 1, reinterpret_cast<const Floats*>(sums), to);
}

// Says whether outputs that are to be gated are.
bool multiply_in_tiles(Pool& pool, const Quantized& job) {
    const TileOutputs<Quantized> outputs{job, put_tile};
    if (Layout(job.layout).group) multiply_tiles(pool, LevelTiles<false>(job), job.tokens, outputs);
    else multiply_tiles(pool, LevelTiles<true>(job), job.tokens, outputs);
    return outputs.gated;
}

#endif

// Says whether outputs that are to be gated are.
bool multiply(Pool& pool, const Quantized& job) {
#if defined(__AMX_INT8__)
    const int64_t few = Layout(job.layout).group ? few_rows_groups : few_rows_int8;
    if (job.tokens > few) return multiply_in_tiles(pool, job);
#endif
    const Layout layout(job.layout);
    if (!layout.group) multiply_quantized<PackedLevels<true, true>>(pool, job);
    else if (layout.bytes) multiply_quantized<PackedLevels<true>>(pool, job);
    else multiply_quantized<PackedLevels<false>>(pool, job);
    return false;
}

void quantized(Pool& pool, const Quantized& job) {
    if (!multiply(pool, job)) gate_outputs(pool, job);
}

}  // namespace
}  // namespace headway
