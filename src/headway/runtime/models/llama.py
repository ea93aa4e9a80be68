"""Llama 2 and 3.x (Touvron et al. 2023), and Qwen2 and 2.5, which differ by a bias.

             ┌──────────────┐            ┌────────┐
x ──┬─ norm ─┤ attention    ├─ + ─┬─ norm ┤ MLP    ├─ + ──▶ next layer … norm ─▶ head
    └────────┴──────────────┴──┘  └───────┴────────┴──┘
"""

from torch import Tensor, nn

from headway.runtime.layers import Attention, Build, GatedMLP, Linear, RMSNorm, Step

LAYER = "model.layers.{i}."
WEIGHTS = {
    "model.embed_tokens": ("embedding", None),
    LAYER + "input_layernorm": ("layers.{i}.attention_norm", None),
    LAYER + "self_attn.q_proj": ("layers.{i}.attention.qkv", "q"),
    LAYER + "self_attn.k_proj": ("layers.{i}.attention.qkv", "k"),
    LAYER + "self_attn.v_proj": ("layers.{i}.attention.qkv", "v"),
    LAYER + "self_attn.o_proj": ("layers.{i}.attention.out", None),
    LAYER + "post_attention_layernorm": ("layers.{i}.mlp_norm", None),
    LAYER + "mlp.gate_proj": ("layers.{i}.mlp.gate_up", "gate"),
    LAYER + "mlp.up_proj": ("layers.{i}.mlp.gate_up", "up"),
    LAYER + "mlp.down_proj": ("layers.{i}.mlp.down", None),
    "model.norm": ("norm", None),
    "lm_head": ("head", None),
}
"""Checkpoint module → (our module, its part of the rows there); `.weight` and `.bias` follow."""


class LlamaLayer(nn.Module):
    def __init__(self, build: Build, index: int) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(build)
        self.attention = Attention(build, index)
        self.mlp_norm = RMSNorm(build)
        self.mlp = GatedMLP(build)

    def forward(self, x_TH: Tensor, step: Step) -> Tensor:
        x_TH = x_TH + self.attention(self.attention_norm(x_TH), step)
        return x_TH + self.mlp(self.mlp_norm(x_TH))


class Llama(nn.Module):
    """Token ids in, hidden states out; `logits` applies the head to the rows that need it."""

    weights = WEIGHTS

    def __init__(self, build: Build) -> None:
        super().__init__()
        spec = build.spec
        self.embedding = nn.Embedding(
            spec.vocab_size,
            spec.hidden_size,
            _weight=build.weight(spec.vocab_size, spec.hidden_size),
            _freeze=True,
        )
        self.layers = nn.ModuleList(LlamaLayer(build, i) for i in range(spec.num_layers))
        self.norm = RMSNorm(build)
        self.head = Linear(build, spec.hidden_size, spec.vocab_size)
        if spec.tied:
            self.head.weight = self.embedding.weight

    def forward(self, token_ids_T: Tensor, step: Step) -> Tensor:
        x_TH = self.embedding(token_ids_T)
        for layer in self.layers:
            x_TH = layer(x_TH, step)
        return x_TH

    def logits(self, x_RH: Tensor) -> Tensor:
        """fp32 logits of these rows, (R, vocab)."""
        return self.head(self.norm(x_RH)).float()
