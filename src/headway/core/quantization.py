"""Which linear layers hold rounded weights, and what those take.

A map from modules to formats says it: "none" (the type of the model), "int8" (a scale for each
output) or "int4" (a scale for each group of inputs); activations are rounded to int8 for both,
token by token. Embeddings are looked up and norms are vectors: both stay as they are.
"""

from dataclasses import dataclass
from fnmatch import fnmatchcase

from headway.core.model_spec import DTYPE_BYTES, ModelSpec

FORMATS = ("none", "int8", "int4")
GROUPS = (32, 64, 128)


@dataclass(frozen=True, slots=True)
class Format:
    """How one linear layer holds its weights: one of FORMATS, and the inputs that share a scale.

    `group` 0: all inputs of an output share one.
    """

    kind: str = "none"
    group: int = 0

    def __str__(self) -> str:
        return f"{self.kind} in groups of {self.group}" if self.group else self.kind


PLAIN, INT8 = Format(), Format("int8")


@dataclass(frozen=True, slots=True)
class Quantization:
    """Pattern of module names → the format of those; the first that fits counts.

    Without native kernels torch keeps levels as bytes, int4's too, and scales in fp32: not packed.
    """

    formats: tuple[tuple[str, Format], ...] = (("*", PLAIN),)
    packed: bool = True

    @staticmethod
    def of(kind: str, group: int = 64, packed: bool = True) -> "Quantization":
        """What `--quantization` and `--quantization-group` say."""
        if kind == "none":
            return Quantization()
        formats: list[tuple[str, Format]] = [("*.router", PLAIN)]
        if kind == "int4":
            formats += [("head", INT8), ("*", Format("int4", group))]
        else:
            formats.append(("*", Format(kind)))
        return Quantization(tuple(formats), packed)

    def __str__(self) -> str:
        return str(self.main)

    @property
    def rounded(self) -> tuple[Format, ...]:
        """The formats of rounded weights, each once."""
        return tuple(dict.fromkeys(format for _, format in self.formats if format != PLAIN))

    @property
    def main(self) -> Format:
        """The last of those, which is that of all modules without an exception; or plain."""
        return self.rounded[-1] if self.rounded else PLAIN

    def format_of(self, module: str) -> Format:
        """The format of one linear layer: `layers.0.mlp.down`, `head`."""
        for pattern, format in self.formats:
            if fnmatchcase(module, pattern):
                return format
        return PLAIN

    def weight_bytes(self, format: Format, outputs: int, inputs: int, dtype: str) -> int:
        """Bytes of one matrix: 896 · 896 take 806,400 in int8, 426,496 in int4 by 64."""
        if format == PLAIN:
            return outputs * inputs * DTYPE_BYTES[dtype]
        if format == INT8:
            return outputs * (inputs + 4)
        groups = -(-inputs // format.group)
        if not self.packed:
            return outputs * (inputs + 4 * groups)
        return outputs * groups * (format.group // 2 + 2)


def bytes_per_weight(quantization: Quantization, model: ModelSpec, dtype: str) -> float:
    """Of rounded weights that a step reads, in the mean; 0 without.

    Qwen2.5-0.5B: 1.00 in int8; 0.66 in int4 by 64, where the head, in int8, is 42% of the bytes.
    """
    if not quantization.rounded:
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

    def gated(mlp: str, inner: int) -> int:
        gate_up = linear(f"{mlp}.gate_up", 2 * inner, hidden)
        return gate_up + linear(f"{mlp}.down", hidden, inner)

    total = model.embedding_parameters * size + linear("head", model.vocab_size, hidden)
    for i, layer in enumerate(model.layers):
        attention, mlp = f"layers.{i}.attention", f"layers.{i}.mlp"
        total += linear(f"{attention}.qkv", model.q_size + 2 * model.kv_size, hidden)
        total += linear(f"{attention}.out", hidden, model.q_size)
        total += model.norm_parameters * size
        if layer.sparse and model.experts is not None:
            total += linear(f"{mlp}.router", model.experts.count, hidden)
            total += model.experts.count * gated(mlp, model.experts.intermediate_size)
        else:
            total += gated(mlp, model.intermediate_size)
    return total
