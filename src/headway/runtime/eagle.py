"""A layer that drafts from the model's own last states (EAGLE, Li et al. 2024).

The layer reads a token and the model's state before it, and predicts the next state; the model's
output matrix turns that into a draft token, and so on:

    known    t0 … t8 t9        the model's states h0 … h8; t9 was drawn from h8
    entry 9  t9, h8      ▶ g9  head ▶ a, the draft of t10
    entry 10 a,  g9      ▶ g10 head ▶ b
    then     t10 t11           are known, with h9 and h10: entries 10 and 11 are computed again

An entry is x = fc [embedding, state], then a layer of Llama without the norm before its attention:
x + attention(x), x + MLP(norm(x)). States are those behind the model's last norm. This is the
network of EAGLE-1 and EAGLE-2, and their weights fit. Differences:

- An entry has the position of its token, in EAGLE that of its state, one before. So it depends on
no
  later token, like keys and values of the model, and is shared with its block. The first entry has
  a state of zeros; in EAGLE it does not exist.
- Draft tokens are a chain, drawn with the model's random numbers; there is no tree.

Entries, and the model's states of every step, are stored in blocks with the numbers of the model's
blocks (`paged_drafter`): the entries of a prompt are computed when draft tokens are first proposed.
Blocks that were filled from another memory have no states; their entries are computed with zeros.

T tokens, R rows, H hidden size.
"""

from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from headway.config.speculation_config import EagleSpec
from headway.core.plan import BlockCopy
from headway.runtime.attention import NativeAttention, allocate_kv, choose_attention
from headway.runtime.batch import Batch, WorkerState
from headway.runtime.checkpoint import read_tensor
from headway.runtime.checkpoint_files import EAGLE_FILE
from headway.runtime.draft_vocabulary import DraftVocabulary
from headway.runtime.eagle_file import ATTENTION, BIASES, LAYER
from headway.runtime.forward import Forward, wipe_bad
from headway.runtime.layers import Attention, Build, GatedMLP, Linear, RMSNorm, Step
from headway.runtime.native.lower import lower
from headway.runtime.native.program import Program
from headway.runtime.paged_drafter import PagedDrafter
from headway.runtime.shared_weights import SharedWeights
from headway.runtime.sharing import WeightSharing
from headway.runtime.tensor_files import readable
from headway.spec import KVGroupSpec, LayerSpec, ModelSpec, RopeSpec


class EagleLayer(nn.Module):
    """The next state from an embedding and the state before it; fc is split by its inputs."""

    def __init__(self, build: Build, eagle: EagleSpec) -> None:
        super().__init__()
        hidden = build.spec.hidden_size
        self.of_token = Linear(build, hidden, hidden)
        self.of_state = Linear(build, hidden, hidden, bias=eagle.fc_bias)
        self.attention = Attention(build, 0)
        self.mlp_norm = RMSNorm(build)
        self.mlp = GatedMLP(build)

    def forward(self, embedded_TH: Tensor, before_TH: Tensor, step: Step) -> Tensor:
        x_TH = self.of_token(embedded_TH) + self.of_state(before_TH)
        x_TH = x_TH + self.attention(x_TH, step)
        return x_TH + self.mlp(self.mlp_norm(x_TH))


class EagleForward:
    """The layer of `folder` on the model of `target`, with its KV memory; a `DraftForward`."""

    def __init__(
        self,
        folder: Path,
        eagle: EagleSpec,
        target: Forward,
        num_blocks: int,
        shared: SharedWeights | None = None,
    ) -> None:
        settings, self.kernels, self.model = target.settings, target.kernels, target.model
        rope, spec = spec_of(eagle, target.spec)
        attention, _ = choose_attention(settings, self.kernels.library)
        like = {"dtype": target.dtype, "device": settings.device}
        build = Build(spec=spec, kernels=self.kernels, attention=attention, **like)
        self.layer = EagleLayer(build, eagle)
        self._rope = target.ropes[rope]
        named = self.layer.named_modules()
        linears = {name: part for name, part in named if isinstance(part, Linear)}
        self._linears = list(linears.values())
        for linear in self._linears:
            linear.kernel = self.kernels.drafter_linear
        sharing = WeightSharing.of(self.layer, linears, shared)
        if sharing is not None and sharing.is_whole:
            sharing.load()
        else:
            read_layer(self.layer, folder / EAGLE_FILE, eagle)
            for name, linear in linears.items():
                linear.prepare()
                if sharing is not None:
                    sharing.store(name)
            if sharing is not None:
                sharing.seal()
        own = KVGroupSpec(layers=(0,), num_kv_heads=spec.num_kv_heads, head_dim=spec.head_dim)
        kv_dtype = torch.int8 if settings.cache.dtype == "int8" else target.dtype
        size, device = settings.cache.block_size, settings.device
        self.kv = allocate_kv((own,), (num_blocks,), size, kv_dtype, device, attention.kv_layer)
        self._program, self._head = self._lower(isinstance(attention, NativeAttention), target)

    def _lower(self, attends: bool, target: Forward) -> tuple[Program | None, Program | None]:
        """Return (the layer, the head) as native calls; None where an operation is not native."""
        library, hidden = self.kernels.library, target.spec.hidden_size
        if library is None or not attends:
            return None, None
        unknown: Any = None
        step = Step(batch=unknown, kv=self.kv, angles=[(self._rope.cos, self._rope.sin)])

        def entries(token_ids: Any, before: Any) -> Any:
            return self.layer(self.model.embedding(token_ids), before, step)

        program, _ = lower(entries, library, target.dtype, hidden, embeds=True)
        head, _ = lower(self.model.logits_of, library, target.dtype, hidden)
        return program, head

    def __call__(self, batch: Batch, before_TH: Tensor) -> Tensor:
        """Return the predicted states, (T, H); valid until the next call."""
        self._rope.fill(batch.rope_prompt)
        if self._program is not None:
            return self._program(batch, before_TH)
        step = Step(batch=batch, kv=self.kv, angles=[self._rope.at(batch.rope_rows)])
        hidden_TH: Tensor = self.layer(self.model.embedding(batch.token_ids_T), before_TH, step)
        return hidden_TH

    def logits(self, hidden_RH: Tensor) -> Tensor:
        """Return the logits of the model's output matrix for these states, (R, vocabulary)."""
        return (
            self.model.logits_of(hidden_RH)
            if self._head is None
            else self._head.run_rows(hidden_RH)
        )

    def wipe_bad(self, hidden_TH: Tensor, batch: Batch) -> Tensor | None:
        """Clear what tokens that are not finite wrote; see `Forward.wipe_bad`."""
        return wipe_bad(self.kernels, self.kv, hidden_TH, batch)

    @property
    def weight_bytes(self) -> int:
        """Bytes of the layer, in addition to the model's weights."""
        plain = sum(part.nbytes for part in self.layer.parameters())
        return plain + sum(linear.prepared_bytes for linear in self._linears)

    @property
    def kv_bytes(self) -> int:
        """Bytes of keys and values."""
        return sum(part.nbytes for layer in self.kv for part in layer.parts)


class Eagle(PagedDrafter):
    """The drafter with the EAGLE layer of `folder`; a `drafter.Drafter`."""

    name = "EAGLE"

    def __init__(
        self,
        folder: Path,
        eagle: EagleSpec,
        target: Forward,
        state: WorkerState,
        shared: SharedWeights | None = None,
    ) -> None:
        settings, spec = target.settings, target.spec
        num_blocks = settings.cache.num_blocks[settings.speculation.draft_group]
        self.forward = EagleForward(folder, eagle, target, num_blocks, shared)
        self._norm = target.model.norm
        self.states_BSH = torch.zeros(
            *(num_blocks, settings.cache.block_size, spec.hidden_size),
            dtype=target.dtype,
            device=settings.device,
        )
        """The model's states by block and slot; those of block 0 are zeros."""
        size = settings.speculation.draft_vocab_size
        vocabulary = DraftVocabulary(target, size, normed=True) if size else None
        super().__init__(self.forward, vocabulary, settings, state, spec.max_len, spec.vocab_size)

    def observe(self, batch: Batch, hidden_TH: Tensor) -> None:
        """Store the model's states of all tokens of a step."""
        states = self.states_BSH.flatten(0, 1)
        states.index_copy_(0, batch.slots_GT[self.group], self._norm(hidden_TH))

    def copy(self, copies: list[BlockCopy]) -> None:
        """Copy entries and states of blocks that the model copied."""
        super().copy(copies)
        for copy in copies:
            self.states_BSH[copy.target].copy_(self.states_BSH[copy.source])

    def invalidate(self, blocks: list[int]) -> None:
        """Reset entries and states of blocks that were filled from another memory."""
        super().invalidate(blocks)
        self.states_BSH[blocks] = 0

    def compute_known(self, batch: Batch) -> Tensor:
        """Compute the entries of known tokens from the model's states before them."""
        before_TH = self.states_BSH.flatten(0, 1)[slots_before(batch, self._block_size)]
        return self._mark_valid(self.forward(batch, before_TH), batch)

    def compute_drafts(self, batch: Batch, hidden_RH: Tensor) -> Tensor:
        """Compute the entries of draft tokens from predicted states; they stay invalid."""
        next_RH = self.forward(batch, hidden_RH)
        self.forward.wipe_bad(next_RH, batch)
        return next_RH

    @property
    def kv_bytes(self) -> int:
        """Bytes of keys, values and states."""
        return super().kv_bytes + self.states_BSH.nbytes


def slots_before(batch: Batch, block_size: int) -> Tensor:
    """Return the slot of the token before each token; 0, a slot of zeros, before the first.

    Blocks of 4: of a sequence in blocks 5 and 2, positions 3 and 4 → slots 22 and 23.
    """
    lens = torch.tensor(batch.query_lens)
    before = torch.tensor(batch.context_lens) - lens - 1
    table_SB, slots_T = batch.block_tables_GSB[0], batch.slots_GT[0].roll(1)
    block, offset = before.clamp(min=0) // block_size, before % block_size
    slots = table_SB[torch.arange(len(lens)), block] * block_size + offset
    slots_T[lens.cumsum(0) - lens] = torch.where(before < 0, 0, slots)
    return slots_T


def spec_of(eagle: EagleSpec, model: ModelSpec) -> tuple[int, ModelSpec]:
    """Return (the index of the model's rope that it uses, the spec of a Llama layer of its size).

    The rope is that of the first layer with full attention that has one.
    """
    ropes = [each.rope for each in model.layers if each.rope is not None and not each.window]
    rope = ropes[0] if ropes else 0
    return rope, ModelSpec(
        architecture="LlamaForCausalLM",
        vocab_size=model.vocab_size,
        hidden_size=model.hidden_size,
        num_heads=eagle.num_heads,
        num_kv_heads=eagle.num_kv_heads,
        head_dim=model.head_dim,
        intermediate_size=eagle.intermediate_size,
        max_len=model.max_len,
        rms_norm_eps=model.rms_norm_eps,
        layers=(LayerSpec(rope=0 if ropes else None),),
        ropes=(model.ropes[rope],) if ropes else (RopeSpec(),),
        tied=True,
        qkv_bias=eagle.qkv_bias,
        o_bias=False,
        mlp_bias=False,
        dtype=model.dtype,
        attention_scale=model.head_dim**-0.5,
    )


@torch.no_grad()
def read_layer(layer: EagleLayer, path: Path, eagle: EagleSpec) -> None:
    """Fill the layer from a file that `read_eagle_spec` accepts."""
    with readable(path), safe_open(path, framework="pt") as file:

        def fill(into: Tensor | None, *names: str) -> None:
            put(into, torch.cat([read_tensor(file, path, name) for name in names]))

        of_token_HH, of_state_HH = read_tensor(file, path, "fc.weight").chunk(2, -1)
        put(layer.of_token.weight, of_token_HH)
        put(layer.of_state.weight, of_state_HH)
        if eagle.fc_bias:
            fill(layer.of_state.bias, "fc.bias")
        fill(layer.attention.qkv.weight, *(f"{ATTENTION}{name}_proj.weight" for name in "qkv"))
        if eagle.qkv_bias:
            fill(layer.attention.qkv.bias, *BIASES)
        fill(layer.attention.out.weight, f"{ATTENTION}o_proj.weight")
        fill(layer.mlp_norm.weight, f"{LAYER}post_attention_layernorm.weight")
        fill(layer.mlp.gate_up.weight, f"{LAYER}mlp.gate_proj.weight", f"{LAYER}mlp.up_proj.weight")
        fill(layer.mlp.down.weight, f"{LAYER}mlp.down_proj.weight")


def put(into: Tensor | None, numbers: Tensor) -> None:
    """Fill a weight that is not packed yet."""
    assert into is not None
    into.copy_(numbers)
