"""The sizes of published models that a small one can be widened to: a row each, all tied."""

from dataclasses import dataclass

from headway.core.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The sizes under the names of `ModelSpec`; embedding and head are one matrix."""

    architecture: str
    model_type: str
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    qkv_bias: bool

    @property
    def group(self) -> int:
        """Query heads that share a KV head: 14 over 2 → 7."""
        return self.num_heads // self.num_kv_heads


QWEN2 = {"architecture": "Qwen2ForCausalLM", "model_type": "qwen2", "qkv_bias": True}
LLAMA = {"architecture": "LlamaForCausalLM", "model_type": "llama", "qkv_bias": False}
SHAPES = {
    "qwen2.5-0.5b": Shape(
        **QWEN2,  # type: ignore[arg-type]
        hidden_size=896,
        num_layers=24,
        num_heads=14,
        num_kv_heads=2,
        head_dim=64,
        intermediate_size=4864,
        vocab_size=151936,
    ),
    "qwen2.5-1.5b": Shape(
        **QWEN2,  # type: ignore[arg-type]
        hidden_size=1536,
        num_layers=28,
        num_heads=12,
        num_kv_heads=2,
        head_dim=128,
        intermediate_size=8960,
        vocab_size=151936,
    ),
    "qwen2.5-3b": Shape(
        **QWEN2,  # type: ignore[arg-type]
        hidden_size=2048,
        num_layers=36,
        num_heads=16,
        num_kv_heads=2,
        head_dim=128,
        intermediate_size=11008,
        vocab_size=151936,
    ),
    "llama-3.2-1b": Shape(
        **LLAMA,  # type: ignore[arg-type]
        hidden_size=2048,
        num_layers=16,
        num_heads=32,
        num_kv_heads=8,
        head_dim=64,
        intermediate_size=8192,
        vocab_size=128256,
    ),
    "smollm2-135m": Shape(
        **LLAMA,  # type: ignore[arg-type]
        hidden_size=576,
        num_layers=30,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        intermediate_size=1536,
        vocab_size=49152,
    ),
}


def find_shape(name: str) -> Shape:
    """The row called `name`, whatever its case; UsageError names those there are."""
    shape = SHAPES.get(name.lower())
    if shape is None:
        said = f"--like {name}: there is no such shape." if name else "--like is missing."
        raise UsageError(said, f"There are: {', '.join(SHAPES)}.")
    return shape
