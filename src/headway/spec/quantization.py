"""Which linear layers hold rounded weights, and what those take.

A map from modules to formats says it: "none" (the type of the model), "int8" (a scale for each
output), "int4" (a scale for each group of inputs), or what a checkpoint holds already. Activations
are rounded to int8 beside integers, block by block (`Format.block`). Embeddings are looked up and
norms are vectors: both stay as they are.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import groupby, zip_longest
from math import lcm

from headway.spec import DTYPE_BYTES, ModelSpec
from headway.spec.formats import PARTS, PLAIN, ROTATED_INT8, Format

Q5_0, Q8_0, Q4_K, Q6_K = 5.5, 8.5, 4.5, 6.5625
"""Bits a weight of llama.cpp's types."""
SUPER_BLOCK = 256
ALWAYS_PLAIN = tuple((name, PLAIN) for name in ("*.router", "*.kv_up", "*extras.*"))
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
    size = DTYPE_BYTES[dtype]
    total = (model.embedding_parameters + plain_parameters(model)) * size
    for module, parts, inputs, copies in linear_layers(model):
        outputs = iter(parts)
        for format, count in quantization.formats_of(module):
            rows = sum(next(outputs) for _ in range(count))
            total += copies * quantization.weight_bytes(format, rows, inputs, dtype)
    return total


def plain_parameters(model: ModelSpec) -> int:
    """Parameters that no format rounds, without embeddings: norms, states, tables."""
    hidden, total = model.hidden_size, model.side_parameters + model.table_parameters
    for layer in model.layers:
        total += model.norms * hidden + (0 if layer.state else model.norm_parameters)
        if layer.state and model.states is not None:
            total += model.states.parameters(hidden) - model.states.matrix_parameters(hidden)
    return total


def linear_layers(model: ModelSpec) -> Iterator[tuple[str, list[int], int, int]]:
    """Each linear layer: module, outputs by part (q, k, v; gate, up), inputs, copies (experts)."""
    hidden = model.hidden_size
    yield "head", [model.vocab_size], hidden, 1
    for i, layer in enumerate(model.layers):
        if layer.state and model.states is not None:
            for name, outputs, inputs in model.states.matrices(hidden):
                yield f"layers.{i}.state.{name}", [outputs], inputs, 1
        for name, parts, inputs in [] if layer.state else model.attention_matrices:
            own = [model.q_size, 0, 0] if name == "qkv" and layer.kv_from is not None else parts
            yield f"layers.{i}.attention.{name}", own, inputs, 1
        mlps = [(f"layers.{i}.mlp", model.intermediate_size, 1)]
        if layer.sparse and model.experts is not None:
            yield f"layers.{i}.mlp.router", [model.experts.count], hidden, 1
            shared = (f"layers.{i}.mlp.shared", model.experts.shared_size, 1)
            mlps = [(mlps[0][0], model.experts.intermediate_size, model.experts.count), shared]
        for mlp, inner, copies in mlps:
            yield f"{mlp}.gate_up", [inner, inner], hidden, copies
            yield f"{mlp}.down", [hidden], inner, copies


def measured_int4_bytes(model: ModelSpec) -> int:
    """Bytes of the linear layers in int4 with a measured format for each matrix, head in int8.

    Together they take what Q4_K_M takes. Qwen2.5-0.5B: 5.70 bits a weight of its layers.
    """
    matrices = [
        (module, part, (outputs, inputs))
        for module, sizes, inputs, _ in linear_layers(model)
        if module != "head"
        for part, outputs in zip_longest(PARTS.get(module.rpartition(".")[2], ()), sizes)
    ]
    head = ROTATED_INT8.num_bytes(model.vocab_size, model.hidden_size)
    return round(q4_k_m_budget(model, matrices)) + head


def q4_k_m_budget(
    spec: ModelSpec, matrices: Iterable[tuple[str, str | None, tuple[int, int]]]
) -> float:
    """Bytes of the layers such that they and a head in int8 take those of llama.cpp's Q4_K_M.

    Of each matrix: our module, the part of it (`v`) or None, (outputs, inputs).
    """
    total = 0.0
    for module, part, (outputs, inputs) in matrices:
        total += outputs * inputs * q4_k_m_bits(spec, module, part, inputs) / 8
    head = (spec.vocab_size, spec.hidden_size)
    wide = Q6_K if spec.hidden_size % SUPER_BLOCK == 0 else Q8_0
    return total + head[0] * head[1] * wide / 8 - ROTATED_INT8.num_bytes(*head)


def q4_k_m_bits(spec: ModelSpec, module: str, part: str | None, inputs: int) -> float:
    """Bits a weight of one matrix in Q4_K_M: values and half of the downs are wider, and rows that
    super-blocks of 256 do not divide have the next wider type with blocks of 32."""
    index, layers = int(module.split(".")[1]), spec.num_layers
    last = module.rpartition(".")[2]
    inner = index - layers // 8
    more = inner < 0 or index >= 7 * layers // 8 or inner % 3 == 2
    wide = more and (last == "down" or (last == "qkv" and part == "v"))
    if inputs % SUPER_BLOCK:
        return Q8_0 if wide else Q5_0
    return Q6_K if wide else Q4_K
