// Attention over paged KV, prefill chunks and decodes in one job, softmax computed on the way.
//
// The context is cut at fixed positions, into splits of 512 tokens and those into strips of 64. A
// row (one query head of one token) takes each strip in turn: scores, weights, weighted sum of V;
// then the splits' sums are merged in order. What a row computes is fixed by its position alone:
//
//     context 600, window 0     split 0: strips 0 … 7   split 1: strips 8, 9 (of that 24 tokens)
//
// so neither the chunk it comes in, nor rows beside it, nor who computed a split change a bit.
// Strips that only some rows of a chunk see have weight 0 for the others, which changes nothing. Sinks
// that lie before a row's window are a split of their own, merged first.
//
// A task is a unit, up to 128 rows, over its splits, or over one of them where there are fewer
// units than would keep the threads busy. The rows of long chunks share a KV head (18 tokens · 7
// heads); those of few tokens are of several KV heads, which lie side by side in a block and take
// each strip in turn: one stream of memory. Rows of a head run in tiles of up to 6, and a tile reads
// K and V once: lanes are tokens for the scores and channels for the sum.
#include <algorithm>
#include <cmath>
#include <iterator>
#include <vector>

#include "attention_best.inl"
#include "attention_matrix_split.inl"

namespace headway {
namespace {

constexpr int64_t most_partial = 1 << 18;  // floats, 1 MB: a unit with more is not split
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
    const int64_t q_step = std::max(dim, query_step(dim));
    const int64_t sizes[] = {rows * q_step, rows * lanes, rows * shape.record, rows * shape.record,
                             level_rows * strip_tokens, 2 * dim * strip_tokens, matrix_size(dim)};
    Room room;
    room.q_step = q_step;
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

// The queries of one head in fp32, times `score_factor`, or as tiles want them.
void read_head_queries(const Attention& job, const Unit& unit, const Shape& shape, Room& room) {
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

void read_queries(const Attention& job, const Unit& unit, const Shape& shape, Room& room) {
    for (int64_t head = 0; head < unit.heads; ++head) {
        Room own = room.beyond(head * unit.tokens * shape.group);
        read_head_queries(job, unit.of_head(head), shape, own);
    }
}

void write_rows(const Attention& job, const Unit& unit, const Shape& shape, const float* sums) {
    const int64_t dim = job.kv.head_dim;
    const int64_t of_head = unit.tokens * shape.group;
    for (int64_t row = 0; row < unit.heads * of_head; ++row, sums += shape.record) {
        const int64_t head = (unit.head + row / of_head) * shape.group + row % shape.group;
        const int64_t token = unit.token + row % of_head / shape.group;
        const int64_t at = (token * job.heads + head) * dim;
        float total = shape.total(sums);
        if (job.sink_logits) {
            const float logit = number_at(job.sink_logits, head, job.type) * log2_e;
            total += std::exp2(logit - shape.highest(sums));
        }
        const float inverse = 1 / total;
        int64_t d = 0;
        for (; d + lanes <= dim; d += lanes)
            put_floats(job.out, at + d, load<Floats>(sums + d) * inverse, job.type);
        for (; d < dim; ++d) put_number(job.out, at + d, sums[d] * inverse, job.type);
    }
}

// Merges the partial sums of all splits and writes the rows; `part_of` computes them or finds them.
template <class PartOf>
void finish(const Attention& job, const Unit& unit, const Shape& shape, float* sums,
            const PartOf& part_of) {
    const int64_t rows = unit.heads * unit.tokens * shape.group;
    for (int64_t split = 0; split < unit.num_splits; ++split) {
        const float* part = part_of(split);
        if (split == 0) std::copy_n(part, rows * shape.record, sums);
        else
            for (int64_t row = 0; row < rows * shape.record; row += shape.record)
                merge_row(shape, sums + row, part + row);
    }
    write_rows(job, unit, shape, sums);
}

// The number of splits of all contexts together.
int64_t count_splits(const Attention& job) {
    int64_t count = 0;
    for (int64_t s = 0; s < job.sequences; ++s)
        count += (job.context_lens[s] + split_tokens - 1) / split_tokens;
    return count;
}

// All units. Where one sequence fills several, those of the longest contexts come first. A unit takes
// as many KV heads `together` as its rows allow; otherwise one, so that no thread is without work.
std::vector<Unit> find_units(const Attention& job, const Shape& shape, bool together) {
    const int64_t most = std::max<int64_t>(1, unit_rows / shape.group);
    std::vector<Unit> units;
    int64_t start = 0;
    for (int64_t s = 0; s < job.sequences; start += job.query_lens[s++]) {
        const int64_t length = job.query_lens[s], before = job.context_lens[s] - length;
        const int64_t fitting = std::max<int64_t>(1, most / std::max<int64_t>(1, length));
        const int64_t heads = together ? std::min(fitting, job.kv.kv_heads) : 1;
        for (int64_t end = length; end > 0;) {
            const int64_t begin = std::max<int64_t>(0, end - most);
            const bool sinks = job.sinks > 0 && window_begin(job, before + end - 1) > 0;
            const int64_t split = window_begin(job, before + begin) / split_tokens;
            const int64_t splits = (before + end - 1) / split_tokens - split + 1 + sinks;
            for (int64_t head = 0; head < job.kv.kv_heads; head += heads)
                units.push_back({s, start + begin, end - begin, before + begin, head,
                                 std::min(heads, job.kv.kv_heads - head), split, splits, sinks,
                                 nullptr});
            end = begin;
        }
    }
    return units;
}

void attend_tokens(const Attention& job, const Unit& unit, const Shape& shape, int64_t split,
                   Room& room, float* part) {
#if defined(__AMX_BF16__)
    if (fits_tiles(job)) return attend_split_in_tiles(job, unit, shape, split, room, part);
#endif
    if (job.open_tables) return attend_rounded_split(job, unit, shape, split, room, part);
    attend_split(job, unit, shape, split, room, part);
}

// The split of this number of a unit, counted from its first.
void attend(const Attention& job, const Unit& unit, const Shape& shape, int64_t number, Room& room,
            float* part) {
    const int64_t split = unit.first_split + number - unit.has_sinks;
    if (number > 0 || !unit.has_sinks) return attend_tokens(job, unit, shape, split, room, part);
    Unit sinks = unit;
    sinks.at_sinks = true;
    attend_tokens(job, sinks, shape, 0, room, part);
    room.begun = false;  // nobody fetches ahead from the sinks to the window
}

void attend_unit(const Attention& job, const Unit& unit, const Shape& shape) {
    Room room = take_room(job, shape);
    read_queries(job, unit, shape, room);
    finish(job, unit, shape, room.sums, [&](int64_t split) {
        attend(job, unit, shape, split, room, room.part);
        return room.part;
    });
}

// Splits `begin` … `end` - 1 of a unit, counted from its first.
struct Task {
    Unit* unit;
    int64_t begin, end;
};

// One task for each unit. Where there are fewer units than `busy`, a unit becomes several tasks, each a
// run of its splits, and gets room in `memory` for their partial sums, unless it is a long chunk. More
// than `busy` tasks gain nothing: each begins by waiting for the first tokens that it reads.
std::vector<Task> find_tasks(std::vector<Unit>& units, const Shape& shape, int64_t busy,
                             std::vector<float>& memory) {
    std::vector<Task> tasks;
    std::vector<int64_t> sizes(units.size());
    int64_t total = 0, splits = 0;
    for (size_t i = 0; i < units.size() && static_cast<int64_t>(units.size()) < busy; ++i) {
        const int64_t size = units[i].num_splits * units[i].part_size(shape);
        if (units[i].num_splits == 1 || size > most_partial) continue;
        total += sizes[i] = size;
        splits += units[i].num_splits;
    }
    const auto wanted = static_cast<size_t>(total + line_floats);
    if (memory.size() < wanted) memory.resize(wanted);
    float* next = at_a_line(memory.data());
    const int64_t each = std::max<int64_t>(1, splits / std::max<int64_t>(1, busy));
    for (size_t i = 0; i < units.size(); next += sizes[i++]) {
        const int64_t count = units[i].num_splits, step = sizes[i] ? each : count;
        if (sizes[i]) units[i].partial = next;
        for (int64_t split = 0; split < count; split += step)
            tasks.push_back({&units[i], split, std::min(count, split + step)});
    }
    return tasks;
}

void attend_all(Pool& pool, const Attention& job) {
    static thread_local std::vector<float> memory;
    const Shape shape(job);
    const int64_t busy = pool.threads() > 1 ? 4 * pool.threads() : 0;
    std::vector<Unit> units = find_units(job, shape, count_splits(job) >= busy);
    const std::vector<Task> tasks = find_tasks(units, shape, busy, memory);
    const auto part_of = [&](const Unit& unit, int64_t split) {
        return unit.partial + split * unit.part_size(shape);
    };
    pool.run(static_cast<int64_t>(tasks.size()), [&](int64_t task, int) {
        const auto& [unit, begin, end] = tasks[task];
        if (!unit->partial) return attend_unit(job, *unit, shape);
        Room room = take_room(job, shape);
        read_queries(job, *unit, shape, room);
        for (int64_t split = begin; split < end; ++split)
            attend(job, *unit, shape, split, room, part_of(*unit, split));
    });
    if (std::none_of(units.begin(), units.end(), [](const Unit& unit) { return unit.partial; }))
        return;
    pool.run(static_cast<int64_t>(units.size()), [&](int64_t i, int) {
        if (units[i].partial)
            finish(job, units[i], shape, take_room(job, shape).sums,
                   [&](int64_t split) { return part_of(units[i], split); });
    });
}

void attention(Pool& pool, const Attention& job) {
    if (!job.reads || !job.kv.bounds) return attend_all(pool, job);
    const Chosen chosen(pool, job);
    attend_all(pool, chosen.job);
}

}  // namespace
}  // namespace headway
