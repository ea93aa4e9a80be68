// All operations for one instruction set. Compiled once for each, with HEADWAY_TABLE the name of
// its table; see table.h.
#include "elementwise.inl"
#include "attention.inl"
#include "attention_dealt.inl"
#include "fp8.inl"
#include "sampling.inl"
#include "quantized_tiles.inl"
#include "rounding.inl"

namespace headway {

const Table HEADWAY_TABLE = {
    .name = HEADWAY_NAME,
    .lanes = lanes,
    .pack_linear = pack_linear,
    .linear = linear,
    .norm = norm,
    .rope = rope,
    .gated = gated,
    .add = add,
    .widen = widen,
    .are_finite = are_finite,
    .read_words = read_words,
    .sampling_bytes = sampling_bytes,
    .sample = sample,
    .logprobs = logprobs,
    .pack_quantized = pack_quantized,
    .round_weight = round_weight,
    .quantize_rows = quantize_rows,
    .quantized = quantized,
    .write_kv = write_kv,
    .round_kv = round_kv,
    .attention = attention,
    .attention_dealt = attention_dealt,
};

}  // namespace headway
