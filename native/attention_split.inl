// Attention of one unit of rows over one split of the context, strip by strip, see attention.inl.
#pragma once
#include <algorithm>

#include "attention_levels.inl"
#include "attention_matrix.inl"

namespace headway {
namespace {

constexpr int split_tokens = 512;
constexpr int64_t unit_rows = 128;

// Rows of the tokens `token` … of one sequence, for each of the KV heads `head` …. `partial` is where
// the splits' sums are left, if each is a task. Where rows see sinks behind their window, those are a
// split before the others, and a unit `at_sinks` is the same rows while they read just them.
struct Unit {
    int64_t sequence, token, tokens, position, head, heads, first_split, num_splits;
    bool has_sinks;
    float* partial;
    bool at_sinks = false;

    int64_t part_size(const Shape& shape) const {
        return heads * tokens * shape.group * shape.record;
    }

    // Its rows of one of the heads.
    Unit of_head(int64_t which) const {
        Unit one = *this;
        one.head += which;
        one.heads = 1;
        return one;
    }
};

// One thread's memory. Sums of a row are [weighted V][highest score][sum of weights].
struct Room {
    float *q, *staged, *scores, *weights, *part, *sums, *matrix;
    int64_t q_step;
    bool begun = false;  // whether the first strip of the task was fetched

    // Where the rows after the first `rows` lie.
    Room beyond(int64_t rows) const {
        Room rest = *this;
        rest.q += rows * q_step;
        rest.weights += rows * lanes;
        return rest;
    }
};

inline int64_t window_begin(const Attention& job, int64_t position) {
    return job.window ? std::max<int64_t>(0, position - job.window + 1) : 0;
}

// The token at `position` sees first_seen … end_seen - 1: its window, or the sinks before that.
inline int64_t first_seen(const Attention& job, const Unit& unit, int64_t position) {
    return unit.at_sinks ? 0 : window_begin(job, position);
}

inline int64_t end_seen(const Attention& job, const Unit& unit, int64_t position) {
    return unit.at_sinks ? std::min(job.sinks, window_begin(job, position)) : position + 1;
}

// visit(block, token, offset in the block, count) for each block of the tokens begin … end - 1.
template <class Visit>
inline void each_block(const Attention& job, const Unit& unit, int64_t begin, int64_t end,
                       const Visit& visit) {
    const int64_t size = job.kv.block_size, head = job.table_heads > 1 ? unit.head : 0;
    const int64_t table = unit.sequence * job.table_heads + head;
    const int64_t* block = job.tables + table * job.width + begin / size;
    for (int64_t token = begin, offset = begin % size; token < end; offset = 0, ++block) {
        const int64_t count = std::min(size - offset, end - token);
        visit(*block, token, offset, count);
        token += count;
    }
}

// Finds the tokens begin … end - 1 of the strip at `start`. Blocks that are no whole vectors have
// their K copied, channel by channel, into `staged`.
void find_strip(const Attention& job, const Unit& unit, int64_t start, int64_t begin, int64_t end,
                float* staged, Strip& strip) {
    const KVMemory& kv = job.kv;
    const int64_t width = size_of(kv.type), size = kv.block_size, dim = kv.head_dim;
    const bool direct = size % lanes == 0;
    strip.k_type = direct ? kv.type : Type::f32;
    strip.v_type = kv.type;
    strip.k_step = direct ? size * width : strip_tokens * 4;
    strip.begin = static_cast<int>(begin - start);
    strip.end = static_cast<int>(end - start);
    for (int v = 0; v < strip_vectors && !direct; ++v)
        strip.k[v] = reinterpret_cast<const char*>(staged + v * lanes);
    const int64_t from = direct ? begin / lanes * lanes : begin;
    each_block(job, unit, from, end, [&](int64_t block, int64_t token,
                                                                   int64_t offset, int64_t count) {
        const int64_t at = block * kv.kv_heads + unit.head, place = token - start;
        const char* k = static_cast<const char*>(kv.k) + at * dim * size * width;
        const char* v = static_cast<const char*>(kv.v) + (at * size + offset) * dim * width;
        for (int64_t i = 0; i < count; ++i) strip.v[place + i] = v + i * dim * width;
        for (int64_t i = 0; i < count && direct; i += lanes)
            strip.k[(place + i) / lanes] = k + (offset + i) * width;
        if (!direct)
            for (int64_t d = 0; d < dim; ++d)
                for (int64_t i = 0; i < count; ++i)
                    staged[d * strip_tokens + place + i] =
                        number_at(k, d * size + offset + i, kv.type);
        if (kv.type != Type::i8) return;
        std::copy_n(kv.k_scale + at * size + offset, count, strip.k_scale + place);
        std::copy_n(kv.v_scale + at * size + offset, count, strip.v_scale + place);
    });
}

// One row's scores of the strip at `start` become weights, and its sums are brought to their scale.
inline void soften_row(const Attention& job, const Unit& unit, const Shape& shape,
                       const Strip& strip, int64_t start, int64_t row, float* scores, float factor,
                       int first, int last, Room& room, float* sums) {
    const auto inside = [](int64_t token) {
        return static_cast<int>(std::clamp<int64_t>(token, 0, strip_tokens));
    };
    const int64_t position = unit.position + row / shape.group;
    const float worth = soften(job, strip, scores, factor, first, last,
                               inside(first_seen(job, unit, position) - start),
                               inside(end_seen(job, unit, position) - start), shape.highest(sums),
                               room.weights + row * lanes);
    if (worth != 1) multiply_row(sums, worth, shape.sums);
}

// What turns a product into a power of two's exponent.
inline float score_factor(const Attention& job) {
    return job.softcap > 0 ? job.scale * (2 * log2_e / job.softcap) : job.scale * log2_e;
}

// Tokens lo … hi - 1 of the strip at `start` are seen by some of the rows `row` … end - 1.
struct Seen {
    int lo, hi;
};

inline Seen seen_by(const Attention& job, const Unit& unit, const Shape& shape, int64_t start,
                    int64_t row, int64_t end) {
    const int64_t early = unit.position + row / shape.group;
    const int64_t late = unit.position + (end - 1) / shape.group;
    return {static_cast<int>(std::max<int64_t>(0, first_seen(job, unit, early) - start)),
            static_cast<int>(std::min<int64_t>(strip_tokens, end_seen(job, unit, late) - start))};
}

// Rows `row` … of the unit over the strip at `start`, fetching the next one if `ahead`.
template <bool ahead>
void attend_tile(const Attention& job, const Unit& unit, const Shape& shape, const Strip& strip,
                 const Strip& next, int64_t start, int64_t row, int rows, Room& room, float* part) {
    const Seen seen = seen_by(job, unit, shape, start, row, row + rows);
    const int lo = seen.lo, hi = seen.hi;
    if (lo >= hi) return;
    const int first = lo / lanes, last = (hi + lanes - 1) / lanes;
    const float* q = room.q + row * job.kv.head_dim;
    float* sums = part + row * shape.record;
    with_rows<tile_rows>(rows, [&](auto height) {
        with_type(strip.k_type, [&](auto type) {
            score<type(), height(), ahead>(strip, next, q, job.kv.head_dim, first, last, room.scores);
        });
        for (int r = 0; r < height(); ++r)
            soften_row(job, unit, shape, strip, start, row + r, room.scores + r * strip_tokens, 1,
                       first, last, room, sums + r * shape.record);
        with_type(strip.v_type, [&](auto type) {
            sum<type(), height(), ahead>(strip, next, room.scores, sums, shape, lo, hi);
        });
    });
}

// Rows of one head over one strip, fetching the next one.
void attend_strip(const Attention& job, const Unit& unit, const Shape& shape, const Strip& strip,
                  const Strip& next, int64_t start, Room& room, float* part) {
    const int64_t rows = unit.tokens * shape.group, tiles = (rows + tile_rows - 1) / tile_rows;
    for (int64_t tile = 0; tile < tiles; ++tile) {
        const int64_t row = rows * tile / tiles;
        const int height = static_cast<int>(rows * (tile + 1) / tiles - row);
        const auto attend = tile == 0 ? attend_tile<true> : attend_tile<false>;
        attend(job, unit, shape, strip, next, start, row, height, room, part);
    }
}

// The tokens of a split that a unit sees, begin … end - 1, of its own up to `last` - 1.
struct SplitTokens {
    int64_t begin, end, last;

    SplitTokens(const Attention& job, const Unit& unit, int64_t split)
        : begin(std::max(split * split_tokens, first_seen(job, unit, unit.position))),
          end(0),
          last(end_seen(job, unit, unit.position + unit.tokens - 1)) {
        end = unit.at_sinks ? last : std::min((split + 1) * split_tokens, last);
    }

    int64_t first_strip() const { return begin / strip_tokens * strip_tokens; }
};

// The sums of a unit's rows before a split, and after it.
void begin_part(const Unit& unit, const Shape& shape, Room& room, float* part) {
    const int64_t rows = unit.heads * unit.tokens * shape.group;
    std::fill_n(part, rows * shape.record, 0.0f);
    std::fill_n(room.weights, rows * lanes, 0.0f);
    for (int64_t row = 0; row < rows; ++row) shape.highest(part + row * shape.record) = nothing;
}

void end_part(const Unit& unit, const Shape& shape, const Room& room, float* part) {
    for (int64_t row = 0; row < unit.heads * unit.tokens * shape.group; ++row)
        shape.total(part + row * shape.record) = total_of(room.weights + row * lanes);
}

// What the offsets of V add joins the rows' sums.
void add_offsets(const Unit& unit, const Shape& shape, float* part) {
    for (int64_t row = 0; row < unit.heads * unit.tokens * shape.group; ++row, part += shape.record)
        for (int64_t c = 0; c < shape.channels; c += lanes) {
            const float* offsets = part + shape.channels + c / rounded_channels * lanes;
            store(part + c, load<Floats>(part + c) + sum_of(load<Floats>(offsets)));
        }
}

// Scores of some rows with the keys of a block, as levels or as bytes.
template <bool pairs>
void score_rows(const Levels& block, const Levels& next, const Strip& bytes, const float* q, int64_t dim,
                int height, Room& room) {
    float *folded = room.staged, *added = folded + level_rows * std::max<int64_t>(dim, strip_tokens);
    if (block.k_bytes)
        return with_rows<tile_rows>(height, [&](auto count) {
            score<Type::i8, count(), false>(bytes, bytes, q, dim, 0, strip_vectors, room.scores);
        });
    fold_queries<pairs>(block, q, dim, height, folded, added);
    with_rows<level_rows>(height, [&](auto count) {
        score_block<pairs, count()>(block, next, folded, added, dim, room.scores);
    });
}

// Their sums of its values, where `seen` of its tokens weigh something.
template <bool pairs>
void sum_rows(const Levels& block, const Levels& next, const Strip& bytes, const Shape& shape, int64_t dim,
              int height, Seen seen, Room& room, float* sums) {
    if (block.v_bytes)
        return with_rows<tile_rows>(height, [&](auto count) {
            sum<Type::i8, count(), false>(bytes, bytes, room.scores, sums, shape, seen.lo, seen.hi);
        });
    for (int64_t group = 0; group < dim / rounded_channels; ++group) {
        const int64_t words = group * rounded_channels * rounded_tokens / 8;
        fold_weights<pairs>(block.v_scale + group * 2 * rounded_tokens, room.scores, height, room.staged,
                            sums + shape.channels + group * lanes, shape.record);
        with_rows<level_rows>(height, [&](auto count) {
            for (int c = 0; c < rounded_channels; c += 2 * lanes)
                sum_levels<pairs, count()>(block.v + words + c, next.v + words + c, room.staged,
                                           sums + group * rounded_channels + c, shape.record);
        });
    }
}

// Rows of one head over a block of int4 memory, the strip at `start`, fetching the next one.
template <bool pairs>
void attend_levels(const Attention& job, const Unit& unit, const Shape& shape, const Levels& block,
                   const Levels& next, int64_t start, Room& room, float* part) {
    const int64_t dim = job.kv.head_dim, rows = unit.tokens * shape.group;
    const int most = job.kv.type == Type::i4 ? level_rows : tile_rows;
    const int64_t tiles = (rows + most - 1) / most;
    Strip bytes{};
    block.find(bytes, dim);
    next.fetch_scales(dim);
    for (int64_t tile = 0; tile < tiles; ++tile) {
        const int64_t row = rows * tile / tiles;
        const int height = static_cast<int>(rows * (tile + 1) / tiles - row);
        const Seen seen = seen_by(job, unit, shape, start, row, row + height);
        if (seen.lo >= seen.hi) continue;
        float* sums = part + row * shape.record;
        score_rows<pairs>(block, next, bytes, room.q + row * dim, dim, height, room);
        for (int r = 0; r < height; ++r)
            soften_row(job, unit, shape, bytes, start, row + r, room.scores + r * strip_tokens, 1, 0,
                       strip_vectors, room, sums + r * shape.record);
        sum_rows<pairs>(block, next, bytes, shape, dim, height, seen, room, sums);
    }
}

// The same over int4 memory. Of a strip, which is a block, the rows whose tokens lie in it read the
// open block, those behind it read it rounded:
//
//     rows of the tokens 60 … 70     strip 0 … 63: 60 … 63 as computed, 64 … 70 rounded
void attend_rounded_split(const Attention& job, const Unit& unit, const Shape& shape, int64_t split,
                          Room& room, float* part) {
    const int64_t of_head = unit.tokens * shape.group;
    const SplitTokens tokens(job, unit, split);
    Attention exact = job;
    exact.kv = job.open;
    exact.tables = job.open_tables;
    const auto levels = [&](int64_t start, int64_t head) {
        const int64_t block = job.tables[unit.sequence * job.width + start / strip_tokens];
        return Levels(job.kv, block, unit.head + head);
    };
    begin_part(unit, shape, room, part);
    Strip strip;
    for (int64_t start = tokens.first_strip(); start < tokens.end; start += strip_tokens) {
        const int64_t end = start + strip_tokens;
        const int64_t inside = std::clamp<int64_t>(end - unit.position, 0, unit.tokens);
        for (int64_t head = 0; head < unit.heads; ++head) {
            Unit one = unit.of_head(head);
            Room own = room.beyond(head * of_head);
            float* sums = part + head * of_head * shape.record;
            if (inside) {
                one.tokens = inside;
                std::fill_n(strip.k, strip_vectors, static_cast<const char*>(job.open.k));
                std::fill_n(strip.v, strip_tokens, static_cast<const char*>(job.open.v));
                find_strip(exact, one, start, std::max(start, tokens.begin),
                           std::min(end, one.position + inside), room.staged, strip);
                attend_strip(exact, one, shape, strip, strip, start, own, sums);
            }
            if (inside == unit.tokens) continue;
            one.token += inside;
            one.position += inside;
            one.tokens = unit.tokens - inside;
            own = own.beyond(inside * shape.group);
            const bool last = head + 1 == unit.heads;
            const int64_t then = last && end < tokens.end ? end : start;
            const auto attend = has_level_pairs && job.type == Type::bf16
                                    ? attend_levels<has_level_pairs> : attend_levels<false>;
            attend(job, one, shape, levels(start, head), levels(then, last ? 0 : head + 1), start, own,
                   sums + inside * shape.group * shape.record);
        }
    }
    add_offsets(unit, shape, part);
    end_part(unit, shape, room, part);
}

void attend_split(const Attention& job, const Unit& unit, const Shape& shape, int64_t split,
                  Room& room, float* part) {
    const int64_t of_head = unit.tokens * shape.group;
    const SplitTokens tokens(job, unit, split);
    const bool direct = job.kv.block_size % lanes == 0;
    begin_part(unit, shape, room, part);
    Strip strips[2];
    for (Strip& strip : strips) {  // fetched ahead before they are found: any address will do
        std::fill_n(strip.k, strip_vectors, static_cast<const char*>(job.kv.k));
        std::fill_n(strip.v, strip_tokens, static_cast<const char*>(job.kv.v));
    }
    const auto find = [&](int64_t start, int64_t head, int which) {
        float* staged = room.staged + which * job.kv.head_dim * strip_tokens;
        find_strip(job, unit.of_head(head), start, std::max(start, tokens.begin),
                   std::min(start + strip_tokens, tokens.last), staged, strips[which]);
    };
    int64_t start = tokens.first_strip();
    find(start, 0, 0);
    for (int64_t head = 0, now = 0; start < tokens.end; now = 1 - now) {
        const int64_t next_head = head + 1 < unit.heads ? head + 1 : 0;
        const int64_t following = next_head ? start : start + strip_tokens;
        const bool more = following < (direct ? tokens.last : tokens.end);
        if (more) find(following, next_head, 1 - now);
        Room own = room.beyond(head * of_head);
        attend_strip(job, unit.of_head(head), shape, strips[now], strips[more ? 1 - now : now], start,
                     own, part + head * of_head * shape.record);
        head = next_head;
        start = following;
    }
    end_part(unit, shape, room, part);
}

}  // namespace
}  // namespace headway
