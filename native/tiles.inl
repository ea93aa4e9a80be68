// GEMMs in matrix tiles (AMX): 16 rows of 64 bytes times 16 outputs in one instruction.
//
// A panel of 32 outputs lies as the instruction reads it: a step is 64 bytes of each of them, in
// 16 lines of 2 · 64 bytes. Rows of x are tiles as they lie. Four sums are held at a time:
//
//     rows 0 … 15    A0 ─┐        outputs 0 … 15   16 … 31
//     rows 16 … 31   A1 ─┤   ×        B0              B1       =  C00 C01 / C10 C11
//
// A row's sums do not depend on the rows beside it: each step adds its 64 bytes to each number of C,
// first step to last. Of bf16 that is (even inputs) + (odd inputs) of a step, rounded as the
// processor does; of int8 it is exact.
//
// Rows are taken by 512 and inputs by as many as keep those rows in the L2 cache. Between such
// blocks of inputs sums lie in memory, in fp32 or as integers, so that they go on as they were.
//
// Before the tiles stands what vectors share with them: how panels are handed to threads, and where
// outputs go.
#pragma once
#include <algorithm>
#include <array>
#include <cstdlib>
#include <memory>
#include <new>

#include "elementwise.inl"
#include "pool.h"

namespace headway {
namespace {

constexpr int panel_width = 2 * lanes;
constexpr int64_t chunk_bytes = 256 * 1024;  // of 86 to 512 KB none is faster (lab log, 2026-11-22)

// Panels that a thread claims at a time: about 256 KB, but so few that each thread can claim four
// times. It is a multiple of the panels that are multiplied `together`, where there are enough.
inline int64_t panels_of_chunk(int64_t panels, int64_t bytes, int together, int threads) {
    const int64_t chunks = 4 * threads;
    int64_t unit = together;
    while (unit > 1 && panels < chunks * unit) unit = (unit + 1) / 2;
    const int64_t share = (panels + chunks - 1) / chunks;
    const int64_t most = std::max<int64_t>(unit, std::min(share, chunk_bytes / bytes) / unit * unit);
    // Smaller chunks where they shorten the busiest thread's work by 5%: 36 panels for 2 threads are
    // 12 chunks of 3, not 9 of 4, of which one thread would have 5.
    const auto of_busiest = [&](int64_t each) {
        return ((panels + each - 1) / each + threads - 1) / threads * each;
    };
    int64_t best = most;
    for (int64_t each = most - unit; each >= unit; each -= unit)
        if (20 * of_busiest(each) < 19 * of_busiest(best)) best = each;
    return best;
}

// Where a tile writes: number 0 of `y` is output `output` of row `row`; rows are `step` numbers apart.
struct Target {
    void* y;
    int64_t step, row = 0, output = 0;
    bool past = false;  // the caches, see `put_pair`
};

// How many numbers rows of outputs are apart.
template <class Job>
int64_t step_of(const Job& job) { return job.y_step ? job.y_step : job.outputs; }

// Whether outputs bypass the caches: the logits of several rows do not stay there until sampling.
template <class Job>
bool goes_past(const Job& job) {
    constexpr int64_t long_row = 1 << 16, many = 1 << 22;
    const int64_t row = step_of(job) * size_of(job.type);
    const bool aligned = (reinterpret_cast<uintptr_t>(job.y) | row) % 64 == 0;
    return lanes == 16 && aligned && row >= long_row && row * job.tokens >= many;
}

template <class Job>
Target outputs_of(const Job& job) { return {job.y, step_of(job), 0, 0, goes_past(job)}; }

// Memory of one thread that begins at a cache line and is kept from call to call.
inline char* thread_memory(int64_t bytes) {
    struct Free { void operator()(char* at) const { std::free(at); } };
    static thread_local std::unique_ptr<char, Free> memory;
    static thread_local int64_t size = 0;
    if (bytes > size) {
        const int64_t whole = (bytes + 4095) / 4096 * 4096;
        memory.reset(static_cast<char*>(std::aligned_alloc(4096, whole)));
        size = memory ? whole : 0;
        if (!memory) throw std::bad_alloc();
    }
    return memory.get();
}

#if defined(__AMX_TILE__)

constexpr int tile_height = 16, tile_pair = 32;
constexpr int64_t tile_bytes = 64, step_of_panel = 2048, lines_of_step = step_of_panel / tile_bytes;
constexpr int64_t rows_at_once = 512, near_rows_bytes = 1 << 20;  // half of a 2 MB L2 cache
constexpr int64_t far_steps = 4, far_bytes = far_steps * step_of_panel;
constexpr int64_t most_kept_panels = 16;  // their sums, 64 KB each, are in memory between blocks

// One thread's tiles, given back at the end.
class Tiles {
public:
    ~Tiles() { if (loaded_) asm volatile("tilerelease"); }

protected:
    // Bytes of a row and rows of each tile.
    void load(const std::array<int64_t, 8>& bytes, const std::array<int64_t, 8>& rows) {
        struct alignas(64) {
            uint8_t palette = 1, start = 0, reserved[14] = {};
            uint16_t bytes[16] = {};
            uint8_t rows[16] = {};
        } shape;
        for (int tile = 0; tile < 8; ++tile) {
            shape.bytes[tile] = static_cast<uint16_t>(bytes[tile]);
            shape.rows[tile] = static_cast<uint8_t>(rows[tile]);
        }
        asm volatile("ldtilecfg %0" : : "m"(shape));
        loaded_ = true;
    }

private:
    bool loaded_ = false;
};

// C 0 … 3, A 4 and 5, B 6 and 7. `depth` bytes of A are one step.
class TileShape : public Tiles {
public:
    // `first` rows in A0, C00 and C01, `second` in A1, C10 and C11; one at least.
    void set(int first, int second, int64_t depth = tile_bytes) {
        if (first == first_ && second == second_ && depth == depth_) return;
        first_ = first;
        second_ = second;
        depth_ = depth;
        constexpr int64_t line = tile_bytes;
        load({line, line, line, line, depth, depth, line, line},
             {first, first, second, second, first, second, depth / 4, depth / 4});
    }

private:
    int first_ = 0, second_ = 0;
    int64_t depth_ = 0;
};

#define HEADWAY_LOAD_TILE(tile, at, step) \
    asm volatile("tileloadd (%0,%1,1), %%tmm" #tile : : "r"(at), "r"(step) : "memory")
#define HEADWAY_STORE_TILE(tile, at, step) \
    asm volatile("tilestored %%tmm" #tile ", (%0,%1,1)" : : "r"(at), "r"(step) : "memory")
#define HEADWAY_ZERO_TILE(tile) asm volatile("tilezero %%tmm" #tile : :)
#define HEADWAY_ADD_BF16(sum, a, b) \
    asm volatile("tdpbf16ps %%tmm" #b ", %%tmm" #a ", %%tmm" #sum : :)
#define HEADWAY_ADD_INT8(sum, a, b) \
    asm volatile("tdpbssd %%tmm" #b ", %%tmm" #a ", %%tmm" #sum : :)
#define HEADWAY_ADD_TILES(sum, a, b)                     \
    do {                                                 \
        if constexpr (bf16) HEADWAY_ADD_BF16(sum, a, b); \
        else HEADWAY_ADD_INT8(sum, a, b);                \
    } while (false)

inline int64_t parts_of(int64_t whole, int64_t most) { return (whole + most - 1) / most; }

// What is fetched from memory beside a step: `lines` cache lines, from step `turn` on of `next`.
struct PanelAhead {
    const char *at, *next;
    int64_t lines, turn;

    inline void fetch(int64_t step) {
        if (step == turn) at = next;
        for (int64_t line = 0; line < lines; ++line, at += tile_bytes) prefetch(at);
    }
};

// Numbers of sums[32][32], and where the tiles of the second 16 rows are.
constexpr int64_t sum_step = 4 * tile_pair, sum_bytes = sum_step * tile_pair;
constexpr int64_t second_sums = tile_height * sum_step;

// The tiles C hold zeros, or `sums`; with `two` those of 32 rows, else of 16.
template <bool two>
inline HEADWAY_INLINE void open_sums(const char* sums, bool fresh) {
    if (fresh) {
        HEADWAY_ZERO_TILE(0);
        HEADWAY_ZERO_TILE(1);
        if constexpr (two) HEADWAY_ZERO_TILE(2);
        if constexpr (two) HEADWAY_ZERO_TILE(3);
    } else {
        HEADWAY_LOAD_TILE(0, sums, sum_step);
        HEADWAY_LOAD_TILE(1, sums + 64, sum_step);
        if constexpr (two) HEADWAY_LOAD_TILE(2, sums + second_sums, sum_step);
        if constexpr (two) HEADWAY_LOAD_TILE(3, sums + second_sums + 64, sum_step);
    }
}

template <bool two>
inline HEADWAY_INLINE void close_sums(char* sums) {
    HEADWAY_STORE_TILE(0, sums, sum_step);
    HEADWAY_STORE_TILE(1, sums + 64, sum_step);
    if constexpr (two) HEADWAY_STORE_TILE(2, sums + second_sums, sum_step);
    if constexpr (two) HEADWAY_STORE_TILE(3, sums + second_sums + 64, sum_step);
}

// One step of rows, `a_step` bytes apart, times the step of a panel at `b`.
template <bool bf16, bool two>
inline HEADWAY_INLINE void add_step(const char* a, int64_t a_step, const char* b) {
    constexpr int64_t line = 128;
    HEADWAY_LOAD_TILE(4, a, a_step);
    if constexpr (two) HEADWAY_LOAD_TILE(5, a + tile_height * a_step, a_step);
    HEADWAY_LOAD_TILE(6, b, line);
    HEADWAY_LOAD_TILE(7, b + 64, line);
    HEADWAY_ADD_TILES(0, 4, 6);
    HEADWAY_ADD_TILES(1, 4, 7);
    if constexpr (two) HEADWAY_ADD_TILES(2, 5, 6);
    if constexpr (two) HEADWAY_ADD_TILES(3, 5, 7);
}

// Adds `steps` steps of up to 32 rows of `a`, `a_step` bytes apart, times a panel to sums[32][32].
template <bool bf16, bool two>
inline void add_tiles(const char* a, int64_t a_step, const char* b, int64_t steps, char* sums,
                      bool fresh, PanelAhead ahead) {
    open_sums<two>(sums, fresh);
    for (int64_t step = 0; step < steps; ++step, b += step_of_panel) {
        ahead.fetch(step);
        add_step<bf16, two>(a + step * tile_bytes, a_step, b);
    }
    close_sums<two>(sums);
}

// One tile of a GEMM: up to 32 rows (it is number `tile` of `tiles`) times `steps` steps of a panel.
// Each tile prefetches its part of the steps that come next, of this panel or of another.
struct TilePlace {
    int64_t row, panel, step, steps, next_panel, next_step, tile, tiles;
    int rows;
};

// Rows and panels as they lie, in steps of 64 bytes of each row.
template <bool bf16>
struct PlainTiles {
    const char *rows, *panels;
    int64_t row_bytes;

    static constexpr int64_t step_bytes = tile_bytes, near_steps = 10;
    static int64_t scratch_bytes(int64_t) { return 0; }

    // A panel's steps that several tiles read stay in the L1 cache: 10 are 20 KB.
    static int64_t most_steps(int64_t num_rows) { return num_rows > tile_pair ? near_steps : 1 << 20; }

    const char* packed(int64_t panel, int64_t step) const {
        return panels + panel * row_bytes * panel_width + step * step_of_panel;
    }

    const char* open(int64_t panel, int64_t step, int64_t, char*) const {
        return packed(panel, step);
    }

    void add(TileShape& shape, const TilePlace& at, const char* b, char* sums) const {
        const char* a = rows + at.row * row_bytes + at.step * tile_bytes;
        const char* next = packed(at.next_panel, at.next_step);
        PanelAhead ahead{b + far_bytes, next, lines_of_step, std::max<int64_t>(0, at.steps - far_steps)};
        if (at.tiles > 1) {
            const int64_t lines = parts_of(lines_of_step, at.tiles);
            ahead = {next + at.tile * at.steps * lines * tile_bytes, next, lines, -1};
        }
        shape.set(std::min(at.rows, tile_height), std::max(1, at.rows - tile_height));
        if (at.rows > tile_height)
            add_tiles<bf16, true>(a, row_bytes, b, at.steps, sums, at.step == 0, ahead);
        else add_tiles<bf16, false>(a, row_bytes, b, at.steps, sums, at.step == 0, ahead);
    }
};

// How a GEMM is cut: `block` steps of all rows stay in the L2 cache, `strip` steps of a panel in the
// L1 cache.
struct TileBlocks {
    int64_t rows, tiles, steps, block, strip;

    TileBlocks(int64_t num_rows, int64_t row_bytes, int64_t step_bytes, int64_t most_steps)
        : rows(std::min(num_rows, rows_at_once)),
          tiles(parts_of(rows, tile_pair)),
          steps(parts_of(row_bytes, step_bytes)),
          block(parts_of(steps, parts_of(rows * row_bytes, near_rows_bytes))),
          strip(parts_of(block, parts_of(block, most_steps))) {}

    bool whole() const { return block == steps; }
    int64_t sums_of_panel() const { return strip == steps ? 1 : tiles; }
};

// Panels `begin` … `end` - 1 in the order in which they are multiplied. Where the first `half` of all
// panels gate the others, a chunk holds gates from begin / 2 on and the panels that they gate, `run`
// of each in turn:
//
//     half 10, begin 4, end 10    run 1    2 12 3 13 4 14        run 3    2 3 4 12 13 14
struct PanelTurns {
    int64_t begin, end, half, run;

    // `end` may be asked for too: it is where the next chunk begins.
    int64_t operator[](int64_t turn) const {
        if (!half) return turn;
        const int64_t first = begin / 2 + (turn - begin) / (2 * run) * run;
        return first + place(turn) + (is_gate(turn) ? 0 : half);
    }

    bool is_gate(int64_t turn) const { return (turn - begin) % (2 * run) < run; }
    int64_t place(int64_t turn) const { return (turn - begin) % run; }
};

// Turns the sums of a GEMM's tiles into outputs; `put` writes those of one tile. Where outputs are
// gated, the gates of each row stay in a thread's memory until the panel that they gate is done.
template <class Job>
struct TileOutputs {
    const Job& job;
    void (*put)(const Job&, int64_t row, int rows, int64_t panel, const char* sums, const Target&);
    int64_t panels = parts_of(job.outputs, panel_width);
    bool gated = job.gate.to && panels % 2 == 0 && panels * panel_width == job.outputs;

    // With few rows all gates come first, so panels are read in the order of memory. With many rows
    // gates and gated panels alternate, for the gates of one panel are 32 KB already.
    PanelTurns turns(int64_t begin, int64_t end, bool few) const {
        return {begin, end, gated ? panels / 2 : 0, few ? (end - begin) / 2 : 1};
    }

    int64_t near_bytes(int64_t rows, const PanelTurns& turns) const {
        return gated ? (turns.run * rows + tile_pair) * panel_width * size_of(job.type) : 0;
    }

    // Writes `rows` rows from `row` on of the panel of this turn. The block of rows begins at `first`
    // and has `height`. `near` holds this tile's gated outputs, then the gates of the block's rows.
    void finish(const PanelTurns& turns, int64_t turn, int64_t first, int64_t height, int64_t row,
                int rows, const char* sums, char* near) const {
        const int64_t panel = turns[turn];
        if (!gated) return put(job, row, rows, panel, sums, outputs_of(job));
        char* up = near;
        char* gates = near + (tile_pair + turns.place(turn) * height + row - first) * panel_width *
                                 size_of(job.type);
        const bool gate = turns.is_gate(turn);
        put(job, row, rows, panel, sums,
            {gate ? gates : up, panel_width, row, panel * panel_width});
        if (gate) return;
        if (job.type == Type::bf16) close<Type::bf16>(row, rows, panel, gates, up);
        else if (job.type == Type::f16) close<Type::f16>(row, rows, panel, gates, up);
        else close<Type::f32>(row, rows, panel, gates, up);
    }

    template <Type type>
    void close(int64_t row, int rows, int64_t panel, const char* gates, const char* up) const {
        const int64_t width = job.outputs / 2, first = (panel - panels / 2) * panel_width;
        for (int r = 0; r < rows; ++r) {
            const int64_t to = (row + r) * width + first, at = r * panel_width;
            if (job.gate.activation == Activation::silu)
                gate_row<type, Activation::silu>(gates, up, at, job.gate.to, to, panel_width);
            else
                gate_row<type, Activation::gelu_tanh>(gates, up, at, job.gate.to, to, panel_width);
        }
    }
};

// Multiplies `num_rows` rows by all panels, and hands the sums[32][32] of each tile to `outputs`.
template <class Format, class Outputs>
void multiply_tiles(Pool& pool, const Format& format, int64_t num_rows, const Outputs& outputs) {
    if (num_rows == 0) return;
    const int64_t num_panels = outputs.panels;
    const TileBlocks cut(num_rows, format.row_bytes, format.step_bytes,
                         format.most_steps(num_rows));
    const bool few = num_rows <= tile_pair, later = few && cut.whole();
    int64_t each = parts_of(num_panels, 4 * pool.threads());
    if (!cut.whole()) each = std::min(parts_of(num_panels, pool.threads()), most_kept_panels);
    if (few) each = std::clamp<int64_t>(chunk_bytes / (format.row_bytes * panel_width), 1, each);
    if (outputs.gated) each += each % 2;
    pool.run(parts_of(num_panels, each), [&](int64_t chunk, int) {
        const int64_t begin = chunk * each, end = std::min(num_panels, begin + each);
        const PanelTurns turns = outputs.turns(begin, end, few);
        const int64_t of_panel = cut.sums_of_panel() * sum_bytes;
        const int64_t kept = of_panel * (later ? 2 : cut.whole() ? 1 : end - begin);
        const int64_t near_bytes = outputs.near_bytes(cut.rows, turns);
        char* near = thread_memory(near_bytes + kept + format.scratch_bytes(cut.strip));
        char* memory = near + near_bytes;
        TileShape shape;
        // Of few rows a panel's outputs are written while the next panel is on its way from memory.
        int64_t waiting = begin;
        const auto finish_until = [&](int64_t turn) {
            for (; later && waiting < turn; ++waiting)
                outputs.finish(turns, waiting, 0, cut.rows, 0, static_cast<int>(num_rows),
                               memory + waiting % 2 * of_panel, near);
        };
        const auto add = [&](int64_t first, int64_t block, int64_t turn) {
            const int64_t last = std::min(num_rows, first + rows_at_once), panel = turns[turn];
            const int64_t end_of_block = std::min(cut.steps, block + cut.block);
            for (int64_t step = block, next; step < end_of_block; step = next) {
                next = std::min(end_of_block, step + cut.strip);
                const bool goes_on = next < end_of_block;
                const int64_t next_panel = goes_on ? panel : turns[turn + 1];
                const char* b = format.open(panel, step, next - step, memory + kept);
                char* sums = memory + (later ? turn % 2 : cut.whole() ? 0 : turn - begin) * of_panel;
                for (int64_t row = first; row < last; row += tile_pair) {
                    const int rows = static_cast<int>(std::min<int64_t>(tile_pair, last - row));
                    format.add(shape, {row, panel, step, next - step, next_panel,
                                       goes_on ? next : block, (row - first) / tile_pair, cut.tiles,
                                       rows}, b, sums);
                    if (!later && next == cut.steps)
                        outputs.finish(turns, turn, first, cut.rows, row, rows, sums, near);
                    if (of_panel > sum_bytes) sums += sum_bytes;
                }
            }
        };
        for (int64_t first = 0; first < num_rows; first += rows_at_once)
            for (int64_t block = 0; block < cut.steps; block += cut.block)
                for (int64_t turn = begin; turn < end; finish_until(turn++)) add(first, block, turn);
        finish_until(end);
        if (goes_past(outputs.job)) pass();
    });
}

#endif

}  // namespace
}  // namespace headway
