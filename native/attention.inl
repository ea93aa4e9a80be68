// Attention over paged KV, prefill chunks and decodes in one job, softmax computed on the way.
//
// The context is cut at fixed positions, into splits of 512 tokens and those into strips of 64. A
// row (one query head of one token) takes each strip in turn: scores, weights, weighted sum of V;
// then the splits' sums are merged in order. What a row computes is fixed by its position alone:
//
//     context 600, window 0     split 0: strips 0 … 7   split 1: strips 8, 9 (of that 24 tokens)
//
// so neither the chunk it comes in, nor rows beside it, nor who computed a split change a bit.
// Strips that only some rows of a chunk see have weight 0 for the others, which changes nothing.
//
// A task is a unit, up to 128 rows that share a KV head (18 tokens · 7 heads), over its splits,
// or over one of them where there are fewer units than would keep the threads busy. Rows of a unit
// run in tiles of up to 6, and a tile reads K and V once: lanes are tokens for the scores and
// channels for the sum.
#include <algorithm>
#include <iterator>
#include <vector>

#include "attention_matrix.inl"
#include "kv.inl"

namespace headway {
namespace {

constexpr int split_tokens = 512;
constexpr int64_t unit_rows = 128, most_partial = 1 << 18;

// Rows of the tokens `token` … of one sequence, and of one KV head. `partial` is where the splits'
// sums are left, if each is a task.
struct Unit {
    int64_t sequence, token, tokens, position, head, first_split, num_splits;
    float* partial;
};

// One thread's memory. Sums of a row are [weighted V][highest score][sum of weights].
struct Room {
    float *q, *staged, *scores, *weights, *part, *sums, *matrix;
};

inline int64_t first_seen(const Attention& job, int64_t position) {
    return job.window ? std::max<int64_t>(0, position - job.window + 1) : 0;
}

// ── one unit over one split ─────────────────────────────────────────────────────────────────

// visit(block, token, offset in the block, count) for each block of the tokens begin … end - 1.
template <class Visit>
inline void each_block(const Attention& job, int64_t sequence, int64_t begin, int64_t end,
                       const Visit& visit) {
    const int64_t size = job.kv.block_size;
    const int64_t* block = job.tables + sequence * job.width + begin / size;
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
    strip.k_step = direct ? size * width : strip_tokens * 4;
    strip.begin = static_cast<int>(begin - start);
    strip.end = static_cast<int>(end - start);
    for (int v = 0; v < strip_vectors && !direct; ++v)
        strip.k[v] = reinterpret_cast<const char*>(staged + v * lanes);
    const int64_t from = direct ? begin / lanes * lanes : begin;
    each_block(job, unit.sequence, from, end, [&](int64_t block, int64_t token,
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
                               inside(first_seen(job, position) - start),
                               inside(position + 1 - start), shape.highest(sums),
                               room.weights + row * lanes);
    if (worth != 1) multiply_row(sums, worth, shape.channels);
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
    return {static_cast<int>(std::max<int64_t>(0, first_seen(job, early) - start)),
            static_cast<int>(std::min<int64_t>(strip_tokens, late + 1 - start))};
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
        with_type(job.kv.type, [&](auto type) {
            sum<type(), height(), ahead>(strip, next, room.scores, sums, shape, lo, hi);
        });
    });
}

#if defined(__AMX_BF16__)

// All rows of the unit over the strip at `start`.
void attend_in_tiles(const Attention& job, const Unit& unit, const Shape& shape, const Strip& strip,
                     const Strip& next, bool ahead, int64_t start, Room& room, float* part,
                     TileShape& tiles) {
    const int64_t rows = unit.tokens * shape.group;
    const MatrixRoom matrix(room.matrix, std::max(unit_rows, shape.group), job.kv.head_dim);
    const int64_t v_bytes = shape.channels * size_of(job.kv.type);
    const auto seen = [&](int64_t row, int64_t end, const auto& work) {
        const auto [lo, hi] = seen_by(job, unit, shape, start, row, end);
        if (lo < hi) work(lo / lanes, (hi + lanes - 1) / lanes);
    };
    seen(0, rows, [&](int first, int last) {
        with_type(strip.k_type, [&](auto type) {
            read_k<type()>(strip, next, ahead, job.kv.head_dim, first, last, matrix);
        });
        with_type(job.kv.type, [&](auto type) {
            read_v<type()>(strip, shape.channels, first, last, matrix);
        });
    });
    for (int64_t row = 0; row < rows; row += tile_height) {
        const int height = static_cast<int>(std::min<int64_t>(tile_height, rows - row));
        seen(row, row + height, [&](int first, int last) {
            float* sums = part + row * shape.record;
            tiles.set(height, height);
            score_in_tiles(matrix, matrix.q + 2 * row * matrix.depth, first, last);
            for (int r = 0; r < height; ++r) {
                if (ahead && row == 0) fetch_v(next, v_bytes, r, height);
                float* scores = matrix.scores + r * strip_tokens;
                soften_row(job, unit, shape, strip, start, row + r, scores, score_factor(job), first,
                           last, room, sums + r * shape.record);
                for (int v = first / 2 * 2; v < (last + 1) / 2 * 2; ++v) {
                    const bool inside = v >= first && v < last;
                    put_floats(matrix.weights, r * strip_tokens + v * lanes,
                               inside ? load<Floats>(scores + v * lanes) : Floats{}, Type::bf16);
                }
            }
            sum_in_tiles(matrix, reinterpret_cast<char*>(sums), 4 * shape.record, shape.channels,
                         first, last);
        });
    }
}

// The unit's queries as they are, with zeros to whole steps.
void read_queries_in_bf16(const Attention& job, const Unit& unit, const Shape& shape, Room& room) {
    const int64_t dim = job.kv.head_dim;
    const MatrixRoom matrix(room.matrix, std::max(unit_rows, shape.group), dim);
    const char* q = static_cast<const char*>(job.q);
    for (int64_t row = 0; row < unit.tokens * shape.group; ++row) {
        const int64_t head = unit.head * shape.group + row % shape.group;
        const int64_t at = (unit.token + row / shape.group) * job.q_step + head * dim;
        char* to = matrix.q + 2 * row * matrix.depth;
        std::memcpy(to, q + 2 * at, 2 * dim);
        std::memset(to + 2 * dim, 0, 2 * (matrix.depth - dim));
    }
}

#endif

void attend_split(const Attention& job, const Unit& unit, const Shape& shape, int64_t split,
                  Room& room, float* part) {
    const int64_t rows = unit.tokens * shape.group, last = unit.position + unit.tokens;
    const int64_t begin = std::max(split * split_tokens, first_seen(job, unit.position));
    const int64_t end = std::min((split + 1) * split_tokens, last);
    const int64_t tiles = (rows + tile_rows - 1) / tile_rows;
    const int64_t staged_size = job.kv.head_dim * strip_tokens;
    const bool direct = job.kv.block_size % lanes == 0;
    std::fill_n(part, rows * shape.record, 0.0f);
    std::fill_n(room.weights, rows * lanes, 0.0f);
    for (int64_t row = 0; row < rows; ++row) shape.highest(part + row * shape.record) = nothing;
    Strip strips[2];
    for (Strip& strip : strips) {  // fetched ahead before they are found: any address will do
        std::fill_n(strip.k, strip_vectors, static_cast<const char*>(job.kv.k));
        std::fill_n(strip.v, strip_tokens, static_cast<const char*>(job.kv.v));
    }
    int64_t start = begin / strip_tokens * strip_tokens;
    find_strip(job, unit, start, begin, std::min(start + strip_tokens, end), room.staged,
               strips[0]);
#if defined(__AMX_BF16__)
    TileShape shape_of_tiles;
    const bool in_tiles = fits_tiles(job);
#endif
    for (int now = 0; start < end; start += strip_tokens, now = 1 - now) {
        const int64_t following = start + strip_tokens;
        const bool more = following < (direct ? last : end);
        const Strip &strip = strips[now], &next = strips[more ? 1 - now : now];
        if (more)
            find_strip(job, unit, following, following, std::min(following + strip_tokens, last),
                       room.staged + (1 - now) * staged_size, strips[1 - now]);
#if defined(__AMX_BF16__)
        if (in_tiles) {
            attend_in_tiles(job, unit, shape, strip, next, more, start, room, part, shape_of_tiles);
            continue;
        }
#endif
        for (int64_t tile = 0; tile < tiles; ++tile) {
            const int64_t row = rows * tile / tiles;
            const int height = static_cast<int>(rows * (tile + 1) / tiles - row);
            const auto attend = tile == 0 ? attend_tile<true> : attend_tile<false>;
            attend(job, unit, shape, strip, next, start, row, height, room, part);
        }
    }
    for (int64_t row = 0; row < rows; ++row)
        shape.total(part + row * shape.record) = total_of(room.weights + row * lanes);
}

// ── units ───────────────────────────────────────────────────────────────────────────────────

constexpr int64_t line_floats = 16;  // of a cache line

inline float* at_a_line(float* memory) {
    const auto at = reinterpret_cast<uintptr_t>(memory);
    return memory + (at + 63) / 64 * 16 - at / 4;
}

inline float* of_this_thread(int64_t count) {
    static thread_local std::vector<float> memory;
    const auto size = static_cast<size_t>(count + line_floats);
    if (memory.size() < size) memory.resize(size);
    return at_a_line(memory.data());
}

Room take_room(const Attention& job, const Shape& shape) {
    const int64_t rows = std::max(unit_rows, shape.group), dim = job.kv.head_dim;
    const int64_t sizes[] = {rows * dim, rows * lanes, rows * shape.record, rows * shape.record,
                             tile_rows * strip_tokens, 2 * dim * strip_tokens, matrix_size(rows, dim)};
    Room room;
    float** places[] = {&room.q, &room.weights, &room.part, &room.sums, &room.scores, &room.staged,
                        &room.matrix};
    int64_t total = 0;
    for (int64_t size : sizes) total += (size + line_floats - 1) / line_floats * line_floats;
    float* at = of_this_thread(total);
    for (size_t i = 0; i < std::size(sizes); ++i) {
        *places[i] = at;
        at += (sizes[i] + line_floats - 1) / line_floats * line_floats;
    }
    return room;
}

// The unit's queries in fp32, times `score_factor`, or as tiles want them.
void read_queries(const Attention& job, const Unit& unit, const Shape& shape, Room& room) {
#if defined(__AMX_BF16__)
    if (fits_tiles(job)) return read_queries_in_bf16(job, unit, shape, room);
#endif
    float* q = room.q;
    const float factor = score_factor(job);
    const int64_t count = shape.group * job.kv.head_dim;
    for (int64_t token = 0; token < unit.tokens; ++token) {
        const int64_t at = (unit.token + token) * job.q_step + unit.head * count;
        int64_t i = 0;
        for (; i + lanes <= count; i += lanes)
            store(q + token * count + i, floats_at(job.q, at + i, job.type) * factor);
        for (; i < count; ++i) q[token * count + i] = number_at(job.q, at + i, job.type) * factor;
    }
}

void write_rows(const Attention& job, const Unit& unit, const Shape& shape, const float* sums) {
    const int64_t dim = job.kv.head_dim;
    for (int64_t row = 0; row < unit.tokens * shape.group; ++row, sums += shape.record) {
        const int64_t head = unit.head * shape.group + row % shape.group;
        const int64_t at = ((unit.token + row / shape.group) * job.heads + head) * dim;
        const float inverse = 1 / sums[shape.channels + 1];
        int64_t d = 0;
        for (; d + lanes <= dim; d += lanes)
            put_floats(job.out, at + d, load<Floats>(sums + d) * inverse, job.type);
        for (; d < dim; ++d) put_number(job.out, at + d, sums[d] * inverse, job.type);
    }
}

// Merges the parts of all splits, which `part_of` computes or finds, and writes the rows.
template <class PartOf>
void finish(const Attention& job, const Unit& unit, const Shape& shape, float* sums,
            const PartOf& part_of) {
    const int64_t rows = unit.tokens * shape.group;
    for (int64_t split = 0; split < unit.num_splits; ++split) {
        const float* part = part_of(split);
        if (split == 0) std::copy_n(part, rows * shape.record, sums);
        else
            for (int64_t row = 0; row < rows * shape.record; row += shape.record)
                merge_row(shape, sums + row, part + row);
    }
    write_rows(job, unit, shape, sums);
}

// The units, those of long contexts first where tokens of one sequence fill several.
std::vector<Unit> find_units(const Attention& job, const Shape& shape) {
    const int64_t most = std::max<int64_t>(1, unit_rows / shape.group);
    std::vector<Unit> units;
    int64_t start = 0;
    for (int64_t s = 0; s < job.sequences; start += job.query_lens[s++]) {
        const int64_t length = job.query_lens[s], before = job.context_lens[s] - length;
        for (int64_t end = length; end > 0;) {
            const int64_t begin = std::max<int64_t>(0, end - most);
            const int64_t split = first_seen(job, before + begin) / split_tokens;
            const int64_t splits = (before + end - 1) / split_tokens - split + 1;
            for (int64_t head = 0; head < job.kv.kv_heads; ++head)
                units.push_back({s, start + begin, end - begin, before + begin, head, split,
                                 splits, nullptr});
            end = begin;
        }
    }
    return units;
}

void attend_unit(const Attention& job, const Unit& unit, const Shape& shape) {
    Room room = take_room(job, shape);
    read_queries(job, unit, shape, room);
    finish(job, unit, shape, room.sums, [&](int64_t split) {
        attend_split(job, unit, shape, unit.first_split + split, room, room.part);
        return room.part;
    });
}

struct Task {
    Unit* unit;
    int64_t split;
};

// A task for each unit, or for each split of it where there are few units: then those that are
// not long chunks are given room in `memory` for the parts.
std::vector<Task> find_tasks(std::vector<Unit>& units, const Shape& shape, int threads,
                             std::vector<float>& memory) {
    const bool few = threads > 1 && units.size() < size_t(4) * threads;
    std::vector<Task> tasks;
    std::vector<int64_t> sizes(units.size());
    int64_t total = 0;
    for (size_t i = 0; i < units.size(); ++i) {
        const int64_t size = units[i].num_splits * units[i].tokens * shape.group * shape.record;
        if (few && units[i].num_splits > 1 && size <= most_partial) total += sizes[i] = size;
    }
    const auto wanted = static_cast<size_t>(total + line_floats);
    if (memory.size() < wanted) memory.resize(wanted);
    float* next = at_a_line(memory.data());
    for (size_t i = 0; i < units.size(); next += sizes[i++]) {
        if (sizes[i]) units[i].partial = next;
        for (int64_t split = 0; split < (sizes[i] ? units[i].num_splits : 1); ++split)
            tasks.push_back({&units[i], split});
    }
    return tasks;
}

void attention(Pool& pool, const Attention& job) {
    static thread_local std::vector<float> memory;
    const Shape shape(job);
    std::vector<Unit> units = find_units(job, shape);
    const std::vector<Task> tasks = find_tasks(units, shape, pool.threads(), memory);
    const auto part_of = [&](const Unit& unit, int64_t split) {
        return unit.partial + split * unit.tokens * shape.group * shape.record;
    };
    pool.run(static_cast<int64_t>(tasks.size()), [&](int64_t task, int) {
        const auto& [unit, split] = tasks[task];
        if (!unit->partial) return attend_unit(job, *unit, shape);
        Room room = take_room(job, shape);
        read_queries(job, *unit, shape, room);
        attend_split(job, *unit, shape, unit->first_split + split, room, part_of(*unit, split));
    });
    if (tasks.size() == units.size()) return;
    pool.run(static_cast<int64_t>(units.size()), [&](int64_t i, int) {
        if (units[i].partial)
            finish(job, units[i], shape, take_room(job, shape).sums,
                   [&](int64_t split) { return part_of(units[i], split); });
    });
}

}  // namespace
}  // namespace headway
