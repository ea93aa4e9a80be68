"""Which linear layers hold rounded weights, and what those take.

A format is "none" (the type of the model), "int8" (a scale for each output) or "int4" (a scale for
each group of inputs); activations are rounded to int8 for both, token by token. Embeddings are
looked up and norms are vectors: both stay as they are.
"""

from dataclasses import dataclass
from fnmatch import fnmatchcase

from headway.core.model_spec import DTYPE_BYTES, ModelSpec

FORMATS = ("none", "int8", "int4")
GROUPS = (32, 64, 128)
EXCEPTIONS: dict[str, dict[str, str]] = {
    "int8": {"*.router": "none"},
    "int4": {"head": "int8", "*.router": "none"},
}
"""Quantization → pattern of module names → the format of those; the first that fits counts."""


@dataclass(frozen=True, slots=True)
class Quantization:
    """What `--quantization` and `--quantization-group` say.

    Without native kernels torch keeps levels as bytes, int4's too, and scales in fp32: not packed.
    """

    format: str = "none"
    group: int = 64
    packed: bool = True

    def __str__(self) -> str:
        return f"int4 in groups of {self.group}" if self.format == "int4" else self.format

    def format_of(self, module: str) -> str:
        """The format of one linear layer: `layers.0.mlp.down`, `head`."""
        for pattern, exception in EXCEPTIONS.get(self.format, {}).items():
            if fnmatchcase(module, pattern):
                return exception
        return self.format

    def weight_bytes(self, format: str, outputs: int, inputs: int, dtype: str) -> int:
        """Bytes of one matrix: 896 · 896 take 806,400 in int8, 426,496 in int4 by 64."""
        if format == "none":
            return outputs * inputs * DTYPE_BYTES[dtype]
        if format == "int8":
            return outputs * (inputs + 4)
        groups = -(-inputs // self.group)
        if not self.packed:
            return outputs * (inputs + 4 * groups)
        return outputs * groups * (self.group // 2 + 2)


def bytes_per_weight(quantization: Quantization, model: ModelSpec, dtype: str) -> float:
    """Of rounded weights that a step reads, in the mean; 0 without.

    Qwen2.5-0.5B: 1.00 in int8; 0.66 in int4 by 64, where the head, in int8, is 42% of the bytes.
    """
    if quantization.format == "none":
        return 0.0
    embeddings = model.embedding_parameters
    read = planned_bytes(quantization, model, dtype) - embeddings * DTYPE_BYTES[dtype]
    return read / (model.num_parameters - (0 if model.tied else embeddings))


def planned_bytes(quantization: Quantization, model: ModelSpec, dtype: str) -> int:
    """Bytes of all weights of `model` once they are rounded.

    A head tied to the embedding is rounded beside it.
    """
    hidden, size = model.hidden_size, DTYPE_BYTES[dtype]

    def linear(module: str, outputs: int, inputs: int) -> int:
        format = quantization.format_of(module)
        return quantization.weight_bytes(format, outputs, inputs, dtype)

    def gated(inner: int) -> int:
        return linear("mlp.gate_up", 2 * inner, hidden) + linear("mlp.down", hidden, inner)

    attention = linear("attention.qkv", model.q_size + 2 * model.kv_size, hidden)
    attention += linear("attention.out", hidden, model.q_size)
    total = model.embedding_parameters * size + linear("head", model.vocab_size, hidden)
    for layer in model.layers:
        total += attention + model.norm_parameters * size
        if layer.sparse and model.experts is not None:
            total += linear("mlp.router", model.experts.count, hidden)
            total += model.experts.count * gated(model.experts.intermediate_size)
        else:
            total += gated(model.intermediate_size)
    return total
