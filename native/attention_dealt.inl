// Attention over KV that lies on several ranks: split s of a context is on rank s % ranks, which finds the
// sums of all rows over it. Ranks hand these around, and each merges them in the order of the splits,
// so a row has the bits that one rank gives it.
//
// A rank's sums are rows of `heads` records, by sequence, split and token. With contexts of 1,300 and
// 40 tokens on 2 ranks, the last token of the first and two of the second:
//
//     rank 0    split 0 of token 1299 · split 2 of it · split 0 of token 38 · split 0 of token 39
//     rank 1    split 1 of token 1299
#pragma once

namespace headway {
namespace {

// Where the sums of a token over a split are: rank 0's rows come first.
class DealtRows {
public:
    DealtRows(const Attention& job, int64_t ranks) : job_(job), ranks_(ranks) {
        int64_t row = 0;
        for (int64_t rank = 0; rank < ranks; ++rank)
            for (int64_t s = 0; s < job.sequences; ++s) {
                first_.push_back(row);
                const int64_t splits = (job.context_lens[s] + split_tokens - 1) / split_tokens;
                row += (splits - rank + ranks - 1) / ranks * job.query_lens[s];
            }
    }

    int64_t begin(int64_t rank) const { return first_[rank * job_.sequences]; }

    // Of the unit's first token; its others follow.
    int64_t row(const Unit& unit, int64_t split) const {
        const int64_t s = unit.sequence, length = job_.query_lens[s];
        const int64_t token = unit.position - (job_.context_lens[s] - length);
        return first_[split % ranks_ * job_.sequences + s] + split / ranks_ * length + token;
    }

private:
    const Attention& job_;
    int64_t ranks_;
    std::vector<int64_t> first_;
};

// visit(a row of the unit's sums, the record of it among a token's heads), of the tokens from `row` on.
template <class Visit>
void each_record(const Attention& job, const Unit& unit, const Shape& shape, int64_t row,
                 const Visit& visit) {
    int64_t from = 0;
    for (int64_t head = unit.head; head < unit.head + unit.heads; ++head)
        for (int64_t token = 0; token < unit.tokens; ++token)
            for (int64_t i = 0; i < shape.group; ++i, ++from)
                visit(from * shape.record,
                      ((row + token) * job.heads + head * shape.group + i) * shape.record);
}

void attend_own_splits(Pool& pool, const Attention& job, const Dealt& dealt) {
    const Shape shape(job);
    const DealtRows rows(job, dealt.ranks);
    const std::vector<Unit> units = find_units(job, shape, true);
    std::vector<std::pair<const Unit*, int64_t>> tasks;
    for (const Unit& unit : units)
        for (int64_t split = dealt.rank; split < unit.num_splits; split += dealt.ranks)
            tasks.emplace_back(&unit, split);
    pool.run(static_cast<int64_t>(tasks.size()), [&](int64_t task, int) {
        const auto& [unit, split] = tasks[task];
        Room room = take_room(job, shape);
        read_queries(job, *unit, shape, room);
        attend_tokens(job, *unit, shape, split, room, room.part);
        const int64_t row = rows.row(*unit, split) - rows.begin(dealt.rank);
        each_record(job, *unit, shape, row, [&](int64_t from, int64_t to) {
            std::copy_n(room.part + from, shape.record, dealt.own + to);
        });
    });
}

void merge_all_splits(Pool& pool, const Attention& job, const Dealt& dealt) {
    const Shape shape(job);
    const DealtRows rows(job, dealt.ranks);
    const std::vector<Unit> units = find_units(job, shape, true);
    pool.run(static_cast<int64_t>(units.size()), [&](int64_t i, int) {
        Room room = take_room(job, shape);
        finish(job, units[i], shape, room.sums, [&](int64_t split) {
            each_record(job, units[i], shape, rows.row(units[i], split), [&](int64_t to, int64_t from) {
                std::copy_n(dealt.all + from, shape.record, room.part + to);
            });
            return room.part;
        });
    });
}

void attention_dealt(Pool& pool, const Attention& job, const Dealt& dealt) {
    if (dealt.all) return merge_all_splits(pool, job, dealt);
    attend_own_splits(pool, job, dealt);
}

}  // namespace
}  // namespace headway
