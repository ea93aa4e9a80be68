// One table of functions for each instruction set; the module picks one at load.
//
// Tensors are raw pointers, row-major unless a layout is named. Letters as in the Python code:
// T tokens, I inputs, O outputs, N query heads, G KV heads, D head size.
#pragma once
#include <cstddef>
#include <cstdint>

namespace headway {

class Pool;

// f8: e4m3. KV memory may be of two kinds, K's and V's: i8i4, i4i8.
enum class Type : int { f32 = 0, bf16 = 1, f16 = 2, i8 = 3, i4 = 4, f8 = 5, i8i4 = 6, i4i8 = 7 };

inline bool has_k_bytes(Type kv) { return kv == Type::i8 || kv == Type::i8i4; }
inline bool has_v_bytes(Type kv) { return kv == Type::i8 || kv == Type::i4i8; }

enum class Activation : int { silu = 0, gelu_tanh = 1 };

// gated[T][O / 2] = activation(y[T][0 … O / 2]) · y[T][O / 2 … O] of a GEMM's y, which need not be
// written then. `to` is null where nothing is gated.
struct Gate {
    void* to = nullptr;
    Activation activation = Activation::silu;
};

// y[T][O] = x[T][I] · weight[O][I]ᵀ + bias[O]; x, bias and y are of `type`, the weight is packed
// by `pack_linear` from `weight_type`. `scratch` holds T · I floats, I rounded up to 32. Rows of y are
// `y_step` numbers apart, 0: `outputs`. Weights of f8 have scales, one for each output and `group` of
// inputs, a multiple of 32 or 0 for all: [O / panel][groups][panel]; x is rounded to bf16 then.
struct Linear {
    const void* x;
    const void* packed;
    const void* bias;  // or null
    void* y;
    float* scratch;
    int64_t tokens, inputs, outputs;
    Type type, weight_type;
    Gate gate;
    int64_t y_step = 0;
    const float* weight_scales = nullptr;
    int64_t group = 0;
};

// y[r][W] = x[r] / sqrt(mean(x[r]²) + eps) · weight, or · (offset + weight) where there is an offset.
// Row r of x begins at r / inner · outer_stride + r % inner · inner_stride; y is dense.
struct Norm {
    const void* x;
    const void* weight;
    void* y;
    int64_t rows, width, inner, outer_stride, inner_stride;
    float eps, offset;
    Type type;
};

// Rotates the pairs (x[i], x[i + half]) of each head, by token; the other dims are copied. Strides
// are in numbers; y may be x.
struct Rope {
    const void* x;
    void* y;
    const float* cosines;  // [T][half], or with positions [position][half]
    const float* sines;
    const int64_t* positions;  // [T], or null
    int64_t tokens, heads, size, half;
    int64_t x_token_stride, x_head_stride, y_token_stride, y_head_stride;
    Type type;
};

// y[T][inner] = activation(x[T][0 … inner]) · x[T][inner … 2 · inner]
struct Gated {
    const void* x;
    void* y;
    int64_t tokens, inner;
    Type type;
    Activation activation;
};

// y[T][W] = x · factor + added, the product rounded to the type first; y may be x or added.
struct Add {
    const void* x;
    const void* added;  // or null: nothing
    void* y;
    int64_t tokens, width;
    float factor;
    Type type;
};

// y[i] = x[i] in fp32.
struct Widen {
    const void* x;
    float* y;
    int64_t count;
    Type type;
};

// What one row is sampled with. Draws are named by seed, index and position; see sampling.inl.
struct Draw {
    const void* logits;
    const uint8_t* allowed;  // one bit a token, or null: every token
    uint64_t seed, index, position;
    float temperature;  // 0: the likeliest
    float log_min_p;    // -inf: none
    float top_p;        // 1: none
    int32_t top_k;      // 0: none
    Type type;          // of the logits
};
static_assert(sizeof(Draw) == 64 && offsetof(Draw, temperature) == 40 && offsetof(Draw, type) == 56,
              "as DRAW of runtime/native/sampling.py");

// How rounded weights lie, as one number: the inputs that share a scale, 0 for int8 with a scale for
// each output, and what else differs from int4 with fp16 scales.
struct Layout {
    static constexpr int64_t in_bytes = 1 << 16, in_fp32 = 1 << 17, with_zeros = 1 << 18,
                             with_offsets = 1 << 19, in_supers = 1 << 20, is_rotated = 1 << 21;
    static constexpr int64_t super_block = 256, longest_rotation = 64;
    int64_t group;
    bool bytes, wide;     // levels are int8; scales are fp32
    bool zeros, offsets;  // weight = level · scale + zero · scale, zeros are int8; or + an fp32 offset
    // GGUF's K formats: scales are int8 times a factor in fp16 for 256 inputs; offsets are middle()
    // times the scale less an int8 minimum times another factor.
    bool supers;
    bool rotated;  // weights and rows are multiplied with a Hadamard matrix before they are rounded

    explicit Layout(int64_t code)
        : group(code & 0xFFFF),
          bytes(!group || code & in_bytes),
          wide(code & in_fp32),
          zeros(code & with_zeros),
          offsets(code & with_offsets),
          supers(code & in_supers),
          rotated(code & is_rotated) {}

    // Inputs of a row that share a scale, a power of two; the last block may be shorter.
    int64_t block() const { return rotated ? 512 : group && group <= 32 ? 32 : 64; }

    // Inputs whose products are added up as integers: those that share both scales.
    int64_t unit() const { return group && group < block() ? group : block(); }

    float middle() const { return bytes ? 16 : 8; }
    bool adds() const { return zeros || offsets; }
};

// Bytes of a row of `inputs` numbers that are multiplied with rounded weights.
inline int64_t padded_inputs(int64_t inputs, int64_t layout) {
    const int64_t group = Layout(layout).group, unit = group ? group : 64;
    return (inputs + unit - 1) / unit * unit;
}

// How many parts of `size` inputs a padded row has; the last may be shorter.
inline int64_t parts_of_row(int64_t inputs, int64_t layout, int64_t size) {
    return (padded_inputs(inputs, layout) + size - 1) / size;
}

// Rows of x[T][I] as bytes: x = q · scale of its block. Rows of q are padded with zeros; `starts`
// holds what the integer sum of each unit begins with. `sums` holds Σ q · scale of each group, for
// layouts that add something.
struct Rows {
    const void* x;
    int8_t* q;
    float* scales;    // [T][blocks]
    int32_t* starts;  // [T][units]
    int64_t tokens, inputs, layout;
    Type type;
    float* sums;           // [T][groups], or null
    const int32_t* order;  // x[t][order[i]] is number i of a row; or null
};

// weight[O][I] as levels, with scales and offsets [O][groups], for `pack_quantized`.
struct PackWeight {
    const int8_t* levels;
    const void* scales;   // fp32, or the bits of fp16; null for int8 without groups
    const void* offsets;  // zeros in int8, or fp32; or null
                          // in super-blocks: int8 scales, then minima; factors of both in fp16
    void* packed;
    int64_t outputs, inputs, layout;
};

// weight[O][I] as levels and scales in panels, as `Quantized` reads them: int8 by output or int4 in
// groups with fp16 scales.
struct RoundWeight {
    const void* weight;
    void* packed;
    float* scales;  // of int8; null for groups
    int64_t outputs, inputs, layout;
    Type type;
};

// y[T][O] = (q · scales) · weightᵀ + bias. The weight is packed by `pack_quantized` from numbers of
// -128 … 127, or of -8 … 7, with the scales of groups among them; int8 without groups has fp32
// `weight_scales`, padded to whole panels. At most 2^17 inputs. Rows of y are `y_step` numbers apart,
// 0: `outputs`.
struct Quantized {
    const int8_t* q;
    const float* scales;
    const int32_t* starts;
    const void* packed;
    const float* weight_scales;  // or null, with groups
    const void* bias;            // or null
    void* y;
    int64_t tokens, inputs, outputs, layout;
    Type type;
    const float* sums;  // [T][groups] of `Rows`, or null
    Gate gate;
    int64_t y_step = 0;
};

// A layer's KV memory: K is (blocks, G, D, block_size), V (blocks, G, block_size, D), and with int8
// numbers each has a scale for every token and head, (blocks, G, block_size). In pairs K is
// (blocks, G, D / 2, block_size, 2) and V (blocks, G, block_size / 2, D, 2), as matrix tiles read
// numbers of 16 bits: D a multiple of 32 and block_size of 16. With bounds, (blocks, G, 2, D) in bf16,
// writing a block's last token notes the least and the greatest number of its keys in each channel.
struct KVMemory {
    void *k, *v;
    float *k_scale, *v_scale;
    uint16_t* bounds;
    int64_t kv_heads, head_dim, block_size;
    Type type;
    bool paired;
};

// The blocks of 64 tokens that a step fills become int4: those of `from` that open_tables[S][width]
// names, in the blocks of `to` that tables[S][width] names. There K is
// (blocks, G, D / 2, 16) words of 8 levels: level i of word j is that of channel i / 4 of two and token
// i % 4 · 16 + j. V is (blocks, G, D / 32, 8, 32): level i of word j is that of token i % 4 · 2 + i / 4
// of eight and channel j of 32. Level i of 16 words is a vector, and so are levels i and i + 4, in pairs.
// number = offset + scale · level, both in fp16: k_scale is (blocks, G, 2, D), scales before offsets,
// v_scale (blocks, G, D / 32, 2, 64). Of i8i4 and i4i8 K or V is as in int8 memory of such blocks.
struct RoundKV {
    KVMemory from, to;
    const int64_t *tables, *open_tables, *query_lens, *context_lens;
    int64_t sequences, width;
};

// Puts k[T][G][D] and v[T][G][D], whose rows are `k_step` and `v_step` numbers apart, into slots[T].
struct WriteKV {
    const void *k, *v;
    int64_t k_step, v_step;
    const int64_t* slots;
    int64_t tokens;
    Type type;
    KVMemory to;
};

// out[T][N][D] = attention of q[T][N][D], rows `q_step` numbers apart: the tokens of S sequences one
// after the other, of each the last query_lens[s] of its context_lens[s], in the blocks that row s
// of tables[S][width] names. `window` and `softcap` are 0 for none; behind a window the first `sinks`
// tokens are seen, too. `sink_logits`, if any, are one for each head, which takes its share of the
// softmax and gives nothing. With int4 memory a token reads the block that it lies in from `open`, as
// open_tables[S][width] says. Where memory has bounds, token t reads its best reads[t] blocks, 0 for all,
// at least 2 otherwise and fewer than there are; once a token reads fewer, so do those behind it. Tables may
// be of each KV head: tables[S][table_heads][width].
struct Attention {
    const void* q;
    void* out;
    int64_t q_step;
    const int64_t *tables, *query_lens, *context_lens;
    int64_t sequences, width, heads, window, sinks;
    float scale, softcap;
    const void* sink_logits;  // or null, in `type`
    Type type;
    KVMemory kv;
    KVMemory open = {};
    const int64_t* open_tables = nullptr;
    const int64_t* reads = nullptr;  // [T], or null: all
    int64_t table_heads = 1;
};

// A rank's part of an attention whose context lies on `ranks`, see attention_dealt.inl: its own sums go
// to `own`, or where `all` has everybody's these are merged into `out`.
struct Dealt {
    int64_t rank, ranks;
    float* own;
    const float* all;
};

struct Table {
    const char* name;
    int lanes;  // floats of one vector
    void (*pack_linear)(Pool&, const void* weight, void* packed, int64_t outputs, int64_t inputs,
                        Type weight_type);
    void (*linear)(Pool&, const Linear&);
    void (*norm)(Pool&, const Norm&);
    void (*rope)(Pool&, const Rope&);
    void (*gated)(Pool&, const Gated&);
    void (*add)(Pool&, const Add&);
    void (*widen)(Pool&, const Widen&);
    bool (*are_finite)(Pool&, const void* x, int64_t count, Type type);
    uint64_t (*read_words)(Pool&, const void*, int64_t bytes);
    int64_t (*sampling_bytes)(int64_t vocabulary);
    void (*sample)(Pool&, const Draw*, int64_t rows, int64_t vocabulary, int64_t allowed_bytes,
                   void* scratch, int64_t* tokens);
    void (*logprobs)(Pool&, const void* logits, Type type, int64_t rows, int64_t vocabulary,
                     const int64_t* tokens, int64_t count, void* scratch, float* values,
                     int64_t* ranks, int64_t* top_tokens);
    void (*pack_quantized)(Pool&, const PackWeight&);
    void (*round_weight)(Pool&, const RoundWeight&);
    void (*quantize_rows)(Pool&, const Rows&);
    void (*quantized)(Pool&, const Quantized&);
    void (*write_kv)(Pool&, const WriteKV&);
    void (*round_kv)(Pool&, const RoundKV&);
    void (*attention)(Pool&, const Attention&);
    void (*attention_dealt)(Pool&, const Attention&, const Dealt&);
};

extern const Table portable_table, avx2_table, avx512_table, avx512_bf16_table,
    amx_table;

}  // namespace headway
