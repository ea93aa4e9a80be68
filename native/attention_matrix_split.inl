// Attention of one unit of rows over one split of the context in matrix tiles, see attention.inl.
#pragma once
#include "attention_split.inl"

namespace headway {
namespace {

#if defined(__AMX_BF16__)

// The unit's queries as they are, with zeros to whole steps.
void read_queries_in_bf16(const Attention& job, const Unit& unit, const Shape& shape, Room& room) {
    const int64_t dim = job.kv.head_dim;
    const int64_t depth = MatrixRoom::depth_of(dim);
    const char* q = static_cast<const char*>(job.q);
    for (int64_t row = 0; row < unit.tokens * shape.group; ++row) {
        const int64_t head = unit.head * shape.group + row % shape.group;
        const int64_t at = (unit.token + row / shape.group) * job.q_step + head * dim;
        char* to = reinterpret_cast<char*>(room.q) + 2 * row * depth;
        std::memcpy(to, q + 2 * at, 2 * dim);
        std::memset(to + 2 * dim, 0, 2 * (depth - dim));
    }
}

// A strip that is being computed: its tokens `begin` … `end` - 1 from `start` on, of which some rows
// see the vectors `first` … `last` - 1.
struct StripPart {
    int64_t start, begin, end;
    int first, last;
};

// The tiles of a strip in memory that lies in pairs.
void find_tiles(const Attention& job, const Unit& unit, const StripPart& piece, const MatrixRoom& room,
                TileStrip& tiles) {
    const KVMemory& kv = job.kv;
    const int64_t dim = kv.head_dim, size = kv.block_size;
    tiles.k_step = 4 * size;
    tiles.v_step = 4 * dim;
    each_block(job, unit, piece.begin / lanes * lanes, piece.end,
               [&](int64_t block, int64_t token, int64_t offset, int64_t count) {
        const int64_t at = (block * kv.kv_heads + unit.head) * dim * size * 2;
        const char* k = static_cast<const char*>(kv.k) + at + 4 * offset;
        const char* v = static_cast<const char*>(kv.v) + at + 2 * dim * offset;
        for (int64_t i = 0; i < count; i += lanes) {
            const int64_t at = token + i, place = (at - piece.start) / lanes;
            tiles.k[place] = k + 4 * i;
            tiles.v[place] = v + 2 * dim * i;
            if (at >= piece.begin && at + lanes <= piece.end) continue;
            char* copy = room.v + place * lanes * 2 * dim;
            copy_v(tiles.v[place], copy, dim, piece.begin - at, piece.end - at);
            tiles.v[place] = copy;
        }
    });
}

// The tiles of a strip in other memory, brought into `room`.
void read_tiles(const Attention& job, const Unit& unit, const Shape& shape, const StripPart& piece,
                float* staged, const MatrixRoom& room, Ahead& ahead, Strip& strip,
                TileStrip& tiles) {
    find_strip(job, unit, piece.start, piece.begin, piece.end, staged, strip);
    with_type(strip.k_type, [&](auto type) {
        read_k<type()>(strip, job.kv.head_dim, piece.first, piece.last, room, ahead);
    });
    with_type(job.kv.type, [&](auto type) {
        read_v<type()>(strip, shape.channels, piece.first, piece.last, room, ahead);
    });
    tiles.k_step = tile_bytes;
    tiles.v_step = 4 * shape.channels;
    for (int v = 0; v < strip_vectors; ++v) {
        tiles.k[v] = room.k + v * room.depth / 2 * tile_bytes;
        tiles.v[v] = room.v + v * lanes * 2 * shape.channels;
    }
}

// Rows `row` … of one head, `height` of them, over a strip.
void attend_tile_rows(const Attention& job, const Unit& unit, const Shape& shape,
                      const Strip& strip, const TileStrip& tiles, const MatrixRoom& matrix,
                      int64_t start, int64_t row, int height, Room& room, float* sums,
                      Ahead& ahead) {
    const auto [lo, hi] = seen_by(job, unit, shape, start, row, row + height);
    if (lo >= hi) return;
    const int first = lo / lanes, last = (hi + lanes - 1) / lanes;
    const char* q = reinterpret_cast<const char*>(room.q) + 2 * row * matrix.depth;
    score_in_tiles(tiles, matrix, q, first, last, ahead);
    for (int r = 0; r < height; ++r) {
        for (int i = 0; i < row_fetches; ++i) ahead.fetch();
        float* scores = matrix.scores + r * strip_tokens;
        soften_row(job, unit, shape, strip, start, row + r, scores, score_factor(job), first, last,
                   room, sums + r * shape.record);
        for (int v = first; v < last; ++v)
            put_floats(matrix.weights, r * strip_tokens + v * lanes,
                       load<Floats>(scores + v * lanes), Type::bf16);
    }
    sum_in_tiles(tiles, matrix, reinterpret_cast<char*>(sums), 4 * shape.record, shape.channels,
                 first, last, ahead);
}

// Lists what a unit's one head reads of the tokens begin … end - 1: its memory of each block, or the
// strip's part of a block that is longer.
void fetch_strip(const Attention& job, const Unit& unit, const Shape& shape, int64_t begin,
                 int64_t end, Ahead& ahead) {
    const KVMemory& kv = job.kv;
    const int64_t width = size_of(kv.type), bytes = kv.head_dim * kv.block_size * width;
    const int64_t step = kv.paired ? 2 : 1;  // channels of K side by side
    ahead.clear();
    each_block(job, unit, begin, end,
               [&](int64_t block, int64_t, int64_t offset, int64_t count) {
        const int64_t at = (block * kv.kv_heads + unit.head) * bytes;
        const char* k = static_cast<const char*>(kv.k) + at;
        const char* v = static_cast<const char*>(kv.v) + at;
        if (kv.block_size <= strip_tokens) {
            ahead.add(k, bytes);
            ahead.add(v, bytes);
            return;
        }
        ahead.add(v + offset * kv.head_dim * width, count * kv.head_dim * width);
        for (int64_t d = 0; d < kv.head_dim; d += step)
            ahead.add(k + (d * kv.block_size + offset * step) * width, count * step * width);
    });
    const int64_t rows = std::min<int64_t>(tile_height, unit.tokens * shape.group);
    int64_t calls = rows * row_fetches + parts_of(kv.head_dim, tile_pair) *
                                             (2 * score_fetches + strip_vectors * sum_fetches);
    if (!kv.paired) calls += strip_vectors * parts_of(kv.head_dim, 32) + strip_tokens / 16;
    ahead.spread(calls);
}

void attend_split_in_tiles(const Attention& job, const Unit& unit, const Shape& shape, int64_t split,
                           Room& room, float* part) {
    const int64_t rows = unit.tokens * shape.group;
    const SplitTokens tokens(job, unit, split);
    const MatrixRoom matrix(room.matrix, job.kv.head_dim);
    begin_part(unit, shape, room, part);
    AttentionTiles registers;
    Ahead ahead(rows > tile_height);
    Strip strip;
    TileStrip tiles;
    const auto fetch = [&](int64_t start, int64_t head) {
        const int64_t end = std::min(start + strip_tokens, tokens.last);
        fetch_strip(job, unit.of_head(head), shape, start, end, ahead);
    };
    if (!room.begun) {  // nobody fetched it ahead: its pages in turn, at once
        fetch(tokens.first_strip(), 0);
        ahead.fetch_all();
        room.begun = true;
    }
    for (int64_t start = tokens.first_strip(); start < tokens.end; start += strip_tokens) {
        const int64_t next = start + strip_tokens;
        for (int64_t head = 0; head < unit.heads; ++head) {
            const Unit one = unit.of_head(head);
            if (head + 1 < unit.heads) fetch(start, head + 1);
            else if (next < tokens.last) fetch(next, 0);
            else ahead.clear();
            const auto [lo, hi] = seen_by(job, one, shape, start, 0, rows);
            const StripPart piece{start, std::max(start, tokens.begin), std::min(next, tokens.last),
                              lo / lanes, (hi + lanes - 1) / lanes};
            Room own = room.beyond(head * rows);
            if (job.kv.paired) find_tiles(job, one, piece, matrix, tiles);
            else read_tiles(job, one, shape, piece, room.staged, matrix, ahead, strip, tiles);
            for (int64_t row = 0; row < rows; row += tile_height) {
                const int height = static_cast<int>(std::min<int64_t>(tile_height, rows - row));
                registers.set(height);
                attend_tile_rows(job, one, shape, strip, tiles, matrix, start, row, height, own,
                                 part + (head * rows + row) * shape.record, ahead);
            }
        }
    }
    end_part(unit, shape, room, part);
}

#endif

}  // namespace
}  // namespace headway
