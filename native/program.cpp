#include "program.h"

#include <cstring>
#include <stdexcept>

#include "pool.h"

namespace headway {
namespace {

int64_t bytes_of(Type type) { return type == Type::f32 ? 4 : 2; }

void embed(const Operation& it, const Step& step, char* y) {
    const int64_t bytes = it.width * bytes_of(it.type);
    for (int64_t token = 0; token < step.tokens; ++token) {
        const int64_t id = step.token_ids[token];
        if (id < 0 || id >= it.count) throw std::out_of_range("a token id beyond the embedding");
        std::memcpy(y + token * bytes, static_cast<const char*>(it.weight) + id * bytes, bytes);
    }
}

// The scratch of a step's rounded rows: the bytes, then scales, sums and starts.
void multiply_rounded(const Table& table, Pool& pool, const Operation& it, const Step& step,
                      const void* x, void* y, const Gate& gate) {
    const Layout layout(it.layout);
    const int64_t tokens = step.tokens;
    const auto parts = [&](int64_t size) {
        return tokens * parts_of_row(it.width, it.layout, size);
    };
    int8_t* q = reinterpret_cast<int8_t*>(step.buffers[it.scratch]);
    float* scales = reinterpret_cast<float*>(q + tokens * padded_inputs(it.width, it.layout));
    float* behind = scales + parts(layout.block());
    float* sums = layout.adds() ? behind : nullptr;
    int32_t* starts = reinterpret_cast<int32_t*>(behind + (sums ? parts(layout.group) : 0));
    table.quantize_rows(pool, {x, q, scales, starts, tokens, it.width, it.layout, it.type, sums,
                               it.order});
    table.quantized(pool, {q, scales, starts, it.weight, static_cast<const float*>(it.scales),
                           it.bias, y, tokens, it.width, it.count, it.layout, it.type, sums, gate,
                           it.y.step});
}

void attend(const Table& table, Pool& pool, const Operation& it, const Step& step, const void* q,
            void* out) {
    const KVGroup &group = step.groups[it.kv_group], &open = step.groups[it.open_group];
    table.attention(pool, {q, out, it.x.step, group.tables, step.query_lens, group.context_lens,
                           step.sequences, group.width, it.count, it.window, it.sinks, it.factor,
                           it.shift, it.bias, it.type, it.kv, it.open,
                           it.open.k ? open.tables : nullptr, step.reads});
}

void round_filled(const Table& table, Pool& pool, const Operation& it, const Step& step) {
    const KVGroup& group = step.groups[it.kv_group];
    table.round_kv(pool, {it.open, it.kv, group.tables, step.groups[it.open_group].tables,
                          step.query_lens, group.context_lens, step.sequences, group.width});
}

void run_one(const Table& table, Pool& pool, const Operation& it, const Step& step) {
    const auto at = [&](const Place& place) -> char* {
        return place.buffer < 0 ? nullptr
                                : step.buffers[place.buffer] + place.first * bytes_of(it.type);
    };
    char *x = at(it.x), *y = at(it.y), *second = at(it.second);
    const int64_t tokens = step.tokens;
    const Gate gate{second, it.activation};
    switch (it.code) {
    case Code::embed:
        return embed(it, step, y);
    case Code::norm:
        return table.norm(pool, {x, it.weight, y, tokens * it.count, it.width,
                                 it.count, it.x.step, it.width, it.factor, it.shift, it.type});
    case Code::linear:
        return table.linear(pool, {x, it.weight, it.bias, y,
                                   reinterpret_cast<float*>(step.buffers[it.scratch]), tokens,
                                   it.width, it.count, it.type, it.weight_type, gate,
                                   it.y.step, static_cast<const float*>(it.scales), it.layout});
    case Code::quantized:
        return multiply_rounded(table, pool, it, step, x, y, gate);
    case Code::rope:
        return table.rope(pool, {x, y, static_cast<const float*>(it.weight),
                                 static_cast<const float*>(it.bias), step.positions, tokens,
                                 it.count, it.width, it.pairs, it.x.step, it.width, it.y.step,
                                 it.width, it.type});
    case Code::gated:
        return table.gated(pool, {x, y, tokens, it.width, it.type, it.activation});
    case Code::add:
        return table.add(pool, {x, second, y, tokens, it.width, it.factor, it.type});
    case Code::write_kv:
        return table.write_kv(pool, {x, second, it.x.step, it.second.step,
                                     step.groups[it.kv_group].slots, tokens, it.type, it.kv});
    case Code::attention:
        return attend(table, pool, it, step, x, y);
    case Code::round_kv:
        return round_filled(table, pool, it, step);
    case Code::widen:
        return table.widen(pool, {x, reinterpret_cast<float*>(y), tokens * it.width, it.type});
    }
    throw std::invalid_argument("no such operation");
}

}  // namespace

void run(const Table& table, Pool& pool, const Operation* operations, int64_t count,
         const Step& step) {
    for (int64_t i = 0; i < count; ++i) run_one(table, pool, operations[i], step);
}

}  // namespace headway
