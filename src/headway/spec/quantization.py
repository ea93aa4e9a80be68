"""Which linear layers hold rounded weights, and what those take.

A map from modules to formats says it: "none" (the type of the model), "int8" (a scale for each
output), "int4" (a scale for each group of inputs), or what a checkpoint holds already. Activations
are rounded to int8 beside integers, block by block (`Format.block`). Embeddings are looked up and
norms are vectors: both stay as they are.
"""

from collections import Counter
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import groupby
from math import lcm

from headway.spec import DTYPE_BYTES, ModelSpec
from headway.spec.formats import PARTS, PLAIN, ROTATED_INT8, Format

ALWAYS_PLAIN = tuple((name, PLAIN) for name in ("*.router", "*.kv_up", "*beside.*"))
"""What a sum of few numbers decides, what is multiplied with queries and not with rows, and the
small matrices beside attention and MLP."""


@dataclass(frozen=True, slots=True)
class Quantization:
    """Pattern of module names → the format of those; the first that fits counts.

    A pattern may name a part of a layer, `layers.0.attention.qkv.v`: see `formats_of`. Without
    native kernels torch keeps levels as bytes, int4's too, and scales in fp32: not packed. `fp8` is
    what `--fp8` makes of checkpoints: "exact", "int8" or "scaled".
    """

    formats: tuple[tuple[str, Format], ...] = (("*", PLAIN),)
    packed: bool = True
    fp8: str = "exact"
    int8: Format = ROTATED_INT8
    """What int8 of our own making is: rotated for the CPU's kernels."""
    profile: str = ""
    """The path of the profile by which int4 was chosen and is rounded, if it was."""

    @staticmethod
    def of(
        kind: str,
        group: int = 64,
        packed: bool = True,
        checkpoint: tuple[tuple[str, Format], ...] = (),
        head: str = "int8",
        fp8: str = "exact",
        int8: Format = ROTATED_INT8,
    ) -> "Quantization":
        """What `--quantization`, `-group` and `-head` of that name say of all that is plain.

        What a checkpoint holds rounded, by name, stays as it is, but for FP8 with `fp8` int8.
        """
        formats = [*formats_held(checkpoint, fp8, int8)]
        if kind == "none":
            return Quantization((*formats, ("*", PLAIN)), packed, fp8, int8)
        formats += ALWAYS_PLAIN
        if kind == "int4":
            int4 = Format("int4", group)
            formats += [("head", int4 if head == "int4" else int8), ("*", int4)]
        elif kind == "fp8":  # 3 bits of mantissa: a head in it costs more than one in int8
            formats += [("head", PLAIN), ("*", Format("fp8"))]
        else:
            formats.append(("*", int8))
        return Quantization(tuple(formats), packed, fp8, int8)

    def of_draft(self, checkpoint: tuple[tuple[str, Format], ...]) -> "Quantization":
        """The formats of a drafting model: its checkpoint's, the rest rounded as the model's is."""
        head, main = self.format_of("head").at_load, self.main.at_load
        rest = (*ALWAYS_PLAIN, ("head", head), ("*", main))
        held = formats_held(checkpoint, self.fp8, self.int8)
        return Quantization((*held, *rest), self.packed, self.fp8, self.int8)

    def __str__(self) -> str:
        return str(self.main)

    @property
    def rounded(self) -> tuple[Format, ...]:
        """The formats of rounded weights, each once."""
        return tuple(dict.fromkeys(format for _, format in self.formats if format != PLAIN))

    @property
    def unit(self) -> int:
        """Inputs that no cut between inputs may part: whole groups, and super-blocks, of all."""
        return lcm(*(format.super_block or format.group or 1 for format in self.rounded))

    @property
    def main(self) -> Format:
        """That of all modules without a pattern of their own, else the commonest; or plain."""
        last = self.formats[-1][1]
        if last != PLAIN:
            return last
        counts = Counter(format for _, format in self.formats if format != PLAIN)
        return max(counts, key=counts.__getitem__, default=PLAIN)

    def format_of(self, module: str) -> Format:
        """The format of one linear layer, or of a part: `layers.0.mlp.down`, `head`."""
        whole, _, part = module.rpartition(".")
        names = (module, whole) if part in PARTS.get(whole.rpartition(".")[2], ()) else (module,)
        for pattern, format in self.formats:
            if any(fnmatchcase(name, pattern) for name in names):
                return format
        return PLAIN

    def formats_of(self, module: str) -> list[tuple[Format, int]]:
        """(format, how many parts) of a layer, from its first rows to its last.

        `qkv` with q and k in int4 and v in int8: [(int4, 2), (int8, 1)]. Parts with inputs in an
        order of their own stay apart.
        """
        parts = PARTS.get(module.rpartition(".")[2], ())
        if not parts:
            return [(self.format_of(module), 1)]
        formats = [self.format_of(f"{module}.{part}") for part in parts]
        keys = [(format, at if format.permuted else 0) for at, format in enumerate(formats)]
        return [(format, len(list(same))) for (format, _), same in groupby(keys)]

    def weight_bytes(self, format: Format, outputs: int, inputs: int, dtype: str) -> int:
        """Bytes of one matrix: 896 · 896 take 806,400 in int8, 426,496 in int4 by 64."""
        if format == PLAIN:
            return outputs * inputs * DTYPE_BYTES[dtype]
        return format.num_bytes(outputs, inputs, self.packed)


def formats_held(
    checkpoint: tuple[tuple[str, Format], ...], fp8: str, int8: Format
) -> tuple[tuple[str, Format], ...]:
    """The formats in which a checkpoint's rounded matrices are kept: its own, FP8 as asked."""
    if fp8 != "int8":
        return checkpoint
    return tuple((name, int8 if one.kind == "fp8" else one) for name, one in checkpoint)


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

    def linear(module: str, parts: list[int], inputs: int) -> int:
        left, total = iter(parts), 0
        for format, count in quantization.formats_of(module):
            outputs = sum(next(left) for _ in range(count))
            total += quantization.weight_bytes(format, outputs, inputs, dtype)
        return total

    def gated(mlp: str, inner: int) -> int:
        gate_up = linear(f"{mlp}.gate_up", [inner, inner], hidden)
        return gate_up + linear(f"{mlp}.down", [hidden], inner)

    total = model.embedding_parameters * size + linear("head", [model.vocab_size], hidden)
    total += (model.beside_parameters + model.table_parameters) * size
    for i, layer in enumerate(model.layers):
        attention, mlp = f"layers.{i}.attention", f"layers.{i}.mlp"
        if layer.state and model.states is not None:
            matrices = model.states.matrices(hidden)
            total += sum(
                linear(f"layers.{i}.state.{name}", [out], of) for name, out, of in matrices
            )
            beside = model.states.parameters(hidden) - model.states.matrix_parameters(hidden)
            total += beside * size
        for name, parts, inputs in [] if layer.state else model.attention_matrices:
            if name == "qkv" and layer.kv_from is not None:
                parts = [model.q_size, 0, 0]
            total += linear(f"{attention}.{name}", parts, inputs)
        total += (model.norms * hidden + (0 if layer.state else model.norm_parameters)) * size
        if layer.sparse and model.experts is not None:
            total += linear(f"{mlp}.router", [model.experts.count], hidden)
            total += model.experts.count * gated(mlp, model.experts.intermediate_size)
            total += gated(f"{mlp}.shared", model.experts.shared_size)
        else:
            total += gated(mlp, model.intermediate_size)
    return total
