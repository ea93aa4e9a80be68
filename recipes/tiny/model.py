"""The Llama architecture of `headway-tiny`, written small.

It is given token ids [B, T] and returns hidden states [B, T, C]; logits are a product with the
embedding, which is tied. Its parameter names are those of Hugging Face Llama, so that exporting
is a change of type, and its rotary halves follow the same convention.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# B rows, T tokens, C hidden, H query heads, K key heads, D size of a head


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The sizes of the model, under the names of a Hugging Face `config.json`."""

    vocab_size: int
    hidden_size: int = 192
    intermediate_size: int = 512
    num_hidden_layers: int = 6
    num_attention_heads: int = 3
    num_key_value_heads: int = 1
    head_dim: int = 64
    max_position_embeddings: int = 2048
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-5


def rotary_table(shape: Shape) -> tuple[Tensor, Tensor]:
    """Cosines and sines [max positions, D], each angle written once for either half.

    With D = 4 and theta = 10000 the angles at position 3 are [3.0, 0.03, 3.0, 0.03].
    """
    exponents = torch.arange(0, shape.head_dim, 2).float() / shape.head_dim
    positions = torch.arange(shape.max_position_embeddings).float()
    angles = torch.outer(positions, shape.rope_theta**-exponents).repeat(1, 2)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turns the pairs (x[i], x[i + D/2]) by their angles."""
    low, high = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-high, low), dim=-1) * sin


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        C, D = shape.hidden_size, shape.head_dim
        self.head_dim = D
        self.q_proj = nn.Linear(C, shape.num_attention_heads * D, bias=False)
        self.k_proj = nn.Linear(C, shape.num_key_value_heads * D, bias=False)
        self.v_proj = nn.Linear(C, shape.num_key_value_heads * D, bias=False)
        self.o_proj = nn.Linear(shape.num_attention_heads * D, C, bias=False)

    def forward(self, x_BTC: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        B, T, _ = x_BTC.shape
        projected = (self.q_proj(x_BTC), self.k_proj(x_BTC), self.v_proj(x_BTC))
        q_BHTD, k_BKTD, v_BKTD = (
            y.view(B, T, -1, self.head_dim).transpose(1, 2) for y in projected
        )
        q_BHTD, k_BKTD = rotate(q_BHTD, cos, sin), rotate(k_BKTD, cos, sin)
        y_BHTD = F.scaled_dot_product_attention(
            q_BHTD, k_BKTD, v_BKTD, is_causal=True, enable_gqa=True
        )
        return self.o_proj(y_BHTD.transpose(1, 2).reshape(B, T, -1))


class Mlp(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        C, width = shape.hidden_size, shape.intermediate_size
        self.gate_proj = nn.Linear(C, width, bias=False)
        self.up_proj = nn.Linear(C, width, bias=False)
        self.down_proj = nn.Linear(width, C, bias=False)

    def forward(self, x_BTC: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x_BTC)) * self.up_proj(x_BTC))


class Layer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.mlp = Mlp(shape)

    def forward(self, x_BTC: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x_BTC = x_BTC + self.self_attn(self.input_layernorm(x_BTC), cos, sin)
        return x_BTC + self.mlp(self.post_attention_layernorm(x_BTC))


class Llama(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_hidden_layers))
        self.norm = nn.RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        cos, sin = rotary_table(shape)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        x_BTC = self.embed_tokens(tokens_BT)
        T = tokens_BT.shape[1]
        for layer in self.layers:
            x_BTC = layer(x_BTC, self.cos[:T], self.sin[:T])
        return self.norm(x_BTC)

    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.embed_tokens.weight)
