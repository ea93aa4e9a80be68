// A program: the layers of a model as a list of operations, made once at load and run by one call a
// step. runtime/native/program.py writes it, field by field as below.
//
// A step's numbers lie in buffers, a row for each token, and a `Place` is a part of these rows. The
// attention of a layer of 8 channels with 2 query heads and 1 KV head of 4, its residual in buffer 0:
//
//     code       x            y            second        what else
//     norm       0            1                          width 8, weight, eps in `factor`
//     linear     1            2                          width 8 → count 16, weight, scratch 3
//     rope       2 [0 … 8)    2 [0 … 8)                  2 heads of width 4, in place
//     rope       2 [8 … 12)   2 [8 … 12)                 1 head
//     write_kv   2 [8 … 12)                2 [12 … 16)   into the layer's `kv`
//     attention  2 [0 … 8)    1                          2 heads
//     linear     1            2                          width 8 → count 8
//     add        0            0            2             0 = 0 + 2
//
// Every operation is the one that Python calls alone (table.h), so a program's numbers are those of
// the calls one by one, bit for bit.
#pragma once
#include "table.h"

namespace headway {

class Pool;

enum class Code : int32_t {
    embed, norm, linear, quantized, rope, gated, add, write_kv, attention, round_kv, widen
};
constexpr int num_codes = static_cast<int>(Code::widen) + 1;

// Row t: the numbers `first` … of the row of `step` numbers at t · step of the buffer.
struct Place {
    int32_t buffer, first, step;
};

// Numbers of all places are of `type`, but for those that `widen` gives, which are fp32. `scratch` is
// the index of a buffer too. The outputs of a linear operation that has a `second` place
// are gated into it by `activation`; `y` is then its working memory. What a field is for each code:
//
//              weight   bias     scales    width     count    its own           factor   shift
//     embed    table                       channels  rows
//     norm     weight                      channels  heads                      eps      offset
//     linear   panels   bias     of f8     inputs    outputs  weight_type, of f8 layout: the group
//     quant…   panels   bias     weight's  inputs    outputs  layout, order
//     rope     cosines  sines              channels  heads    pairs
//     gated                                inner
//     add                                  channels                             of x
//     write_kv                                                kv_group
//     attent…           sink_logits                  heads    kv_group, window  scale    softcap
//                                                             sinks
//     round_kv                                                kv_group
//     widen                                channels
//
// Where `kv` is int4 memory, attention and round_kv read the open blocks, too: `open`, of the group
// `open_group`, which write_kv wrote.
struct Operation {
    Code code;
    Type type;
    Place x, y, second;
    int32_t scratch;
    Activation activation;
    Type weight_type;
    const void *weight, *bias, *scales;
    const int32_t* order;
    int64_t width, count, layout, pairs, kv_group, open_group, window, sinks;
    float factor, shift;
    KVMemory kv, open;
};
static_assert(sizeof(Operation) == 304, "as OPERATION of runtime/native/program.py");

// What the sequences of one KV group bring to a step: slots[T], tables[S][width]; context_lens[S] with
// the step's own tokens.
struct KVGroup {
    const int64_t *slots, *tables;
    int64_t width;
    const int64_t* context_lens;
};

struct Step {
    int64_t tokens, sequences;
    const int64_t *token_ids, *positions, *query_lens;  // positions: rows of the rope tables
    const KVGroup* groups;
    char* const* buffers;
    const int64_t* reads = nullptr;  // as of Attention
};

// Throws where a token id is none.
void run(const Table&, Pool&, const Operation*, int64_t count, const Step&);

}  // namespace headway
