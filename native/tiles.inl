// Products in matrix tiles (AMX): 16 rows of 64 bytes times 16 outputs in one instruction.
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
// Rows are taken by 512 and inputs by as many as keep those rows in the second cache. Between such
// blocks of inputs sums lie in memory, in fp32 or as integers, so that they go on as they were.
#pragma once
#include <algorithm>
#include <cstdlib>
#include <memory>
#include <new>

#include "pool.h"
#include "simd.h"

namespace headway {
namespace {

constexpr int panel_width = 2 * lanes;

#if defined(__AMX_TILE__)

constexpr bool has_tiles = true;
constexpr int tile_height = 16, tile_pair = 32;
constexpr int64_t tile_bytes = 64, step_of_panel = 2048;
constexpr int64_t rows_at_once = 512, near_rows_bytes = 1 << 20, far_bytes = 8192;

// One thread's tiles: C 0 … 3, A 4 and 5, B 6 and 7. `depth` bytes of A are one step.
class TileShape {
public:
    ~TileShape() { release(); }

    void set(int rows, int64_t depth = tile_bytes) {
        if (rows == rows_ && depth == depth_) return;
        rows_ = rows;
        depth_ = depth;
        struct alignas(64) {
            uint8_t palette = 1, start = 0, reserved[14] = {};
            uint16_t bytes[16] = {};
            uint8_t rows[16] = {};
        } shape;
        const int first = std::min(rows, tile_height), second = std::max(1, rows - tile_height);
        for (int tile = 0; tile < 8; ++tile) {
            shape.bytes[tile] = static_cast<uint16_t>(tile == 4 || tile == 5 ? depth : tile_bytes);
            shape.rows[tile] = static_cast<uint8_t>(
                tile >= 6 ? depth / 4 : tile == 0 || tile == 1 || tile == 4 ? first : second);
        }
        asm volatile("ldtilecfg %0" : : "m"(shape));
    }

private:
    void release() { if (rows_) asm volatile("tilerelease"); }
    int rows_ = 0;
    int64_t depth_ = 0;
};

#define HEADWAY_LOAD_TILE(tile, at, step) \
    asm volatile("tileloadd (%0,%1,1), %%tmm" #tile : : "r"(at), "r"(step) : "memory")
#define HEADWAY_STORE_TILE(tile, at, step) \
    asm volatile("tilestored %%tmm" #tile ", (%0,%1,1)" : : "r"(at), "r"(step) : "memory")
#define HEADWAY_ZERO_TILE(tile) asm volatile("tilezero %%tmm" #tile : :)
#define HEADWAY_ADD_TILES(sum, a, b)                                                        \
    do {                                                                                    \
        if constexpr (bf16) asm volatile("tdpbf16ps %%tmm" #b ", %%tmm" #a ", %%tmm" #sum : :); \
        else asm volatile("tdpbssd %%tmm" #b ", %%tmm" #a ", %%tmm" #sum : :);               \
    } while (false)

// Adds `steps` steps of up to 32 rows of `a`, `a_step` bytes apart, times a panel to sums[32][32].
template <bool bf16, bool two>
inline void add_tiles(const char* a, int64_t a_step, const char* b, int64_t steps, char* sums,
                      bool fresh, int64_t ahead) {
    constexpr int64_t sum_step = 4 * tile_pair, half = tile_height * sum_step, line = 128;
    if (fresh) {
        HEADWAY_ZERO_TILE(0);
        HEADWAY_ZERO_TILE(1);
        if constexpr (two) HEADWAY_ZERO_TILE(2);
        if constexpr (two) HEADWAY_ZERO_TILE(3);
    } else {
        HEADWAY_LOAD_TILE(0, sums, sum_step);
        HEADWAY_LOAD_TILE(1, sums + 64, sum_step);
        if constexpr (two) HEADWAY_LOAD_TILE(2, sums + half, sum_step);
        if constexpr (two) HEADWAY_LOAD_TILE(3, sums + half + 64, sum_step);
    }
    const char* second = a + tile_height * a_step;
    for (int64_t step = 0; step < steps; ++step, b += step_of_panel) {
        HEADWAY_LOAD_TILE(4, a + step * tile_bytes, a_step);
        if constexpr (two) HEADWAY_LOAD_TILE(5, second + step * tile_bytes, a_step);
        HEADWAY_LOAD_TILE(6, b, line);
        HEADWAY_LOAD_TILE(7, b + 64, line);
        if (ahead)
#pragma GCC unroll 32
            for (int at = 0; at < step_of_panel; at += 64) prefetch(b + ahead + at);
        HEADWAY_ADD_TILES(0, 4, 6);
        HEADWAY_ADD_TILES(1, 4, 7);
        if constexpr (two) HEADWAY_ADD_TILES(2, 5, 6);
        if constexpr (two) HEADWAY_ADD_TILES(3, 5, 7);
    }
    HEADWAY_STORE_TILE(0, sums, sum_step);
    HEADWAY_STORE_TILE(1, sums + 64, sum_step);
    if constexpr (two) HEADWAY_STORE_TILE(2, sums + half, sum_step);
    if constexpr (two) HEADWAY_STORE_TILE(3, sums + half + 64, sum_step);
}

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

// Rows of `row_bytes`, whole steps, times panels of `row_bytes` · 32.
struct TileProduct {
    const char *rows, *panels;
    int64_t row_bytes, num_rows, num_panels;

    int64_t panel_bytes() const { return row_bytes * panel_width; }
};

// Calls finish(row, rows, panel, sums[32][32]) for each tile of the product, once it is complete.
template <bool bf16, class Finish>
void multiply_tiles(Pool& pool, const TileProduct& job, const Finish& finish) {
    if (job.num_rows == 0) return;
    constexpr int64_t sum_bytes = 4 * tile_pair * tile_pair;
    const int64_t block_rows = std::min(job.num_rows, rows_at_once);
    const int64_t steps = job.row_bytes / tile_bytes;
    const int64_t blocks = (block_rows * job.row_bytes + near_rows_bytes - 1) / near_rows_bytes;
    const int64_t block = (steps + blocks - 1) / blocks;
    const int64_t parts = blocks > 1 ? pool.threads() : 4 * pool.threads();
    int64_t each = (job.num_panels + parts - 1) / parts;
    if (job.num_rows <= tile_pair)
        each = std::max<int64_t>(1, std::min(each, (256 << 10) / job.panel_bytes()));
    const int64_t tiles = (block_rows + tile_pair - 1) / tile_pair;
    const int64_t ahead = job.num_rows <= tile_pair ? far_bytes : 0;
    pool.run((job.num_panels + each - 1) / each, [&](int64_t chunk, int) {
        const int64_t begin = chunk * each, end = std::min(job.num_panels, begin + each);
        char* memory = thread_memory(sum_bytes * (blocks > 1 ? (end - begin) * tiles : 1));
        TileShape shape;
        for (int64_t first = 0; first < job.num_rows; first += rows_at_once)
            for (int64_t at = 0; at < steps; at += block)
                for (int64_t panel = begin; panel < end; ++panel)
                    for (int64_t row = first, last = std::min(job.num_rows, first + rows_at_once);
                         row < last; row += tile_pair) {
                        const int rows = static_cast<int>(std::min<int64_t>(tile_pair, last - row));
                        const int64_t index = (panel - begin) * tiles + (row - first) / tile_pair;
                        char* sums = memory + (blocks > 1 ? index * sum_bytes : 0);
                        const char* a = job.rows + row * job.row_bytes + at * tile_bytes;
                        const char* b = job.panels + panel * job.panel_bytes() + at * step_of_panel;
                        const int64_t count = std::min(block, steps - at);
                        shape.set(rows);
                        if (rows > tile_height)
                            add_tiles<bf16, true>(a, job.row_bytes, b, count, sums, at == 0, ahead);
                        else
                            add_tiles<bf16, false>(a, job.row_bytes, b, count, sums, at == 0, ahead);
                        if (at + count == steps) finish(row, rows, panel, sums);
                    }
    });
}

#else

constexpr bool has_tiles = false;

#endif

}  // namespace
}  // namespace headway
