// Which blocks tokens read where they read fewer than all of them (Quest), see Attention in table.h.
//
// What a block promises to the heads that share a KV head is more than any of its keys gives them:
//
//     Σ_n q_n · k  ≤  Σ_d up_d · most_d - down_d · least_d      up, down: Σ_n of q's positive, negative
//
// A token reads the first block, its own and those between that promise most. Each such token becomes a
// sequence of its own with a table for each KV head, and all else is attention as ever:
//
//     token 70, blocks of 16, reads 3 of 5      head 0: [a c e]   head 1: [a d e]     context 32 + 7
#pragma once
#include <algorithm>
#include <vector>

#include "attention_split.inl"

namespace headway {
namespace {

// The last `tokens` of so many tokens of a sequence; `reads` 0 is all blocks.
struct Run {
    int64_t sequence, token, tokens, context, reads;

    int64_t blocks(int64_t size) const { return reads ? reads : (context + size - 1) / size; }
    int64_t seen(int64_t size) const {
        return reads ? (reads - 1) * size + (context - 1) % size + 1 : context;
    }
};

// The sequences of a step; of one that reads less each token is apart.
std::vector<Run> find_runs(const Attention& job) {
    std::vector<Run> runs;
    int64_t token = 0;
    for (int64_t s = 0; s < job.sequences; ++s) {
        const int64_t end = token + job.query_lens[s], before = job.context_lens[s] - end;
        for (int64_t begin = token; token < end; begin = token) {
            const int64_t reads = job.reads[token++];
            while (!reads && token < end && !job.reads[token]) ++token;
            runs.push_back({s, begin, token - begin, before + token, reads});
        }
    }
    return runs;
}

inline float promise(const KVMemory& kv, int64_t block, int64_t head, const float* up,
                     const float* down) {
    const int64_t dim = kv.head_dim;
    const uint16_t* least = kv.bounds + (block * kv.kv_heads + head) * 2 * dim;
    const uint16_t* most = least + dim;
    Floats sums{};
    int64_t d = 0;
    for (; d + lanes <= dim; d += lanes)
        sums += load<Floats>(up + d) * floats_at(most, d, Type::bf16) -
                load<Floats>(down + d) * floats_at(least, d, Type::bf16);
    float sum = sum_of(sums);
    for (; d < dim; ++d)
        sum += up[d] * number_at(most, d, Type::bf16) - down[d] * number_at(least, d, Type::bf16);
    return sum == sum ? sum : nothing;
}

// The positive and the negative parts of the queries of the heads that share a KV head, summed.
void split_queries(const Attention& job, int64_t token, int64_t head, float* up, float* down) {
    const int64_t dim = job.kv.head_dim, group = job.heads / job.kv.kv_heads;
    std::fill_n(up, 2 * dim, 0.0f);
    for (int64_t i = 0; i < group; ++i)
        for (int64_t d = 0; d < dim; ++d) {
            const int64_t at = token * job.q_step + (head * group + i) * dim + d;
            const float number = number_at(job.q, at, job.type);
            (number > 0 ? up[d] : down[d]) += std::fabs(number);
        }
}

// The blocks that one token reads for one KV head, as they lie in the sequence; of equals the first.
void choose_blocks(const Attention& job, const Run& run, int64_t head, int64_t* chosen) {
    static thread_local std::vector<float> promises;
    static thread_local std::vector<int64_t> order;
    constexpr int64_t ahead = 8;
    const KVMemory& kv = job.kv;
    const int64_t dim = kv.head_dim, last = (run.context - 1) / kv.block_size;
    const int64_t* blocks = job.tables + run.sequence * job.width;
    promises.resize(static_cast<size_t>(2 * dim + last));
    float *up = promises.data() + last, *down = up + dim;
    split_queries(job, run.token, head, up, down);
    order.clear();
    for (int64_t i = 1; i < last; ++i) {
        const int64_t next = blocks[std::min(i + ahead, last)] * kv.kv_heads + head;
        for (int64_t d = 0; d < 2 * dim; d += 32) prefetch(kv.bounds + next * 2 * dim + d);
        promises[i] = promise(kv, blocks[i], head, up, down);
        order.push_back(i);
    }
    const auto better = [&](int64_t a, int64_t b) {
        return promises[a] > promises[b] || (promises[a] == promises[b] && a < b);
    };
    const auto end = order.begin() + (run.reads - 2);
    std::nth_element(order.begin(), end, order.end(), better);
    std::sort(order.begin(), end);
    *chosen++ = blocks[0];
    for (auto i = order.begin(); i < end; ++i) *chosen++ = blocks[*i];
    *chosen = blocks[last];
}

// The same step with what each token reads as its table.
struct Chosen {
    std::vector<int64_t> tables, query_lens, context_lens;
    Attention job;

    Chosen(Pool& pool, const Attention& given) : job(given) {
        const int64_t size = given.kv.block_size, heads = given.kv.kv_heads;
        const std::vector<Run> runs = find_runs(given);
        int64_t width = 0;
        for (const Run& run : runs) {
            query_lens.push_back(run.tokens);
            context_lens.push_back(run.seen(size));
            width = std::max(width, run.blocks(size));
        }
        tables.resize(runs.size() * heads * width);
        pool.run(static_cast<int64_t>(runs.size()) * heads, [&](int64_t task, int) {
            const Run& run = runs[task / heads];
            int64_t* table = tables.data() + task * width;
            if (run.reads) choose_blocks(given, run, task % heads, table);
            else std::copy_n(given.tables + run.sequence * given.width, run.blocks(size), table);
        });
        job.tables = tables.data();
        job.query_lens = query_lens.data();
        job.context_lens = context_lens.data();
        job.sequences = static_cast<int64_t>(runs.size());
        job.width = width;
        job.table_heads = heads;
        job.reads = nullptr;
    }
};

}  // namespace
}  // namespace headway
