"""The memory of a step beside weights and KV, counted without a GPU: its layers run on `meta`.

On `meta` every tensor has a size and no memory, so a step of a model of any size runs in a moment,
under a mode that adds up the live tensors. Two steps are counted, the largest prompt with decodes
and the largest decode, each with its logits and its sampling. Layers of one kind take the same
memory, so a few of each kind stand for all. Example, Llama-3.1-8B in bf16 with a prompt of 4,096
tokens:

    a residual of 32 MiB, its norm 32, gate and up 224 and their product 112

On a GPU torch's own counters show what a step took, and `describe` reports it beside this.
"""

import weakref
from collections import Counter
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from headway.config.attention_choice import ON_DEVICE
from headway.config.quantization_choice import experts_at_once
from headway.config.resolve import Settings
from headway.runtime.attention import AttentionRule, KVLayer, allocate_kv
from headway.runtime.attention.flashinfer import workspace_and_plan_bytes
from headway.runtime.batch import Batch
from headway.runtime.cuda.sampling import RowInputs, choose
from headway.runtime.experts import ExpertLinear
from headway.runtime.kernels import Kernels
from headway.runtime.kernels.grouped import GroupedLinear, Visits
from headway.runtime.layers import Build, Linear, Step
from headway.runtime.models import MODELS, Decoder
from headway.spec import ModelSpec

SPLIT_KEYS = 512
"""Keys of one split of a decode's context: `triton.paged_attention.SPLIT`."""
SAMPLE_LAYERS = 3


class DeviceMemory:
    """The memory that torch has allocated on a GPU since this was made."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._allocated_before = self._allocated()

    def _allocated(self) -> int:
        return int(torch.cuda.memory_allocated(self._device))

    def _max_allocated(self) -> int:
        return int(torch.cuda.max_memory_allocated(self._device))

    @property
    def peak(self) -> int:
        """The most that any step has allocated."""
        return self._max_allocated() - self._allocated_before


class LiveBytes(TorchDispatchMode):
    """Adds up the storages that operations make, as long as a tensor refers to them."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = self.peak = 0
        self._counts: Counter[int] = Counter()
        self._sizes: dict[int, int] = {}
        self._outside: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for x in tree_leaves((args, kwargs)):
            if isinstance(x, Tensor) and storage_key(x) not in self._counts:
                self._outside.add(storage_key(x))
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, Tensor) and storage_key(x) not in self._outside:
                self._keep(x)
        return out

    def _keep(self, x: Tensor) -> None:
        key = storage_key(x)
        if not self._counts[key]:
            self._sizes[key] = x.untyped_storage().nbytes()
            self.live += self._sizes[key]
            self.peak = max(self.peak, self.live)
        self._counts[key] += 1
        weakref.finalize(x, self._drop, key)

    def _drop(self, key: int) -> None:
        self._counts[key] -= 1
        if not self._counts[key]:
            del self._counts[key]
            self.live -= self._sizes.pop(key)


def storage_key(x: Tensor) -> int:
    """Return what identifies a live storage."""
    return int(x.untyped_storage()._cdata)


class ShapeAttention:
    """An attention backend that allocates what ours allocate, and computes nothing.

    `split` counts the keys of one split of a decode's context; 0 makes no splits.
    """

    name = "shapes"
    kv_layer: type[KVLayer] = KVLayer

    def __init__(self, split: int = SPLIT_KEYS) -> None:
        self.split = split

    def attend(
        self,
        q_TND: Tensor,
        k_TGD: Tensor | None,
        v_TGD: Tensor | None,
        layer: KVLayer,
        batch: Batch,
        rule: AttentionRule,
    ) -> Tensor:
        if k_TGD is not None and v_TGD is not None:
            layer.write(k_TGD, v_TGD, batch.slots_GT[layer.group])
        size = q_TND.shape[-1] if v_TGD is None else v_TGD.shape[-1]
        out = q_TND.new_empty(*q_TND.shape[:2], size)
        if batch.num_decodes and self.split:
            splits = -(-max(batch.context_lens) // self.split)
            shape = splits, batch.num_decodes, *out.shape[1:]
            parts = torch.empty(shape, dtype=torch.float32, device=q_TND.device)
            torch.empty(2, *parts.shape[:3], dtype=torch.float32, device=q_TND.device)
        return out


class ShapeLinear(GroupedLinear):
    """Products with unquantized weights, dense and of experts, that compute nothing."""

    def prepare(self, weight_OH: Tensor) -> Tensor:
        return weight_OH

    def __call__(self, x_TH: Tensor, weight_OH: Tensor, bias_O: Tensor | None) -> Tensor:
        return x_TH.new_empty(len(x_TH), len(weight_OH))

    def stack(self, prepared: list[Tensor]) -> Tensor:
        raise AssertionError("the matrices lie behind each other already")

    def grouped(
        self, x_VH: Tensor, weight: Tensor, bias_EO: Tensor | None, visits: Visits
    ) -> Tensor:
        return x_VH.new_empty(len(x_VH), weight.shape[1])


def sample_layers(spec: ModelSpec) -> ModelSpec:
    """Return the model with a few layers of each kind, none of which reads another's KV."""
    few, rest = spec.layers[:SAMPLE_LAYERS], spec.layers[SAMPLE_LAYERS:]
    if not any(layer.sparse for layer in few):
        few += tuple(layer for layer in rest if layer.sparse)[:1]
    return replace(spec, layers=few)


def step_bytes(spec: ModelSpec, settings: Settings) -> int | None:
    """Return the most bytes that steps take beside weights and KV, on a GPU with our kernels.

    Graphs have a pool of their own, as large as a decode; FlashInfer keeps its workspace and its
    plans. None for a model whose layers read numbers of the device, which `meta` does not have.
    """
    at_once = experts_at_once(settings.quantization, settings.kernels, spec)
    gathers = spec.latent is not None and settings.attention_backend not in ON_DEVICE
    if spec.altup is not None or spec.states is not None or gathers or not at_once:
        return None
    max_tokens = settings.max_num_batched_tokens
    prompt = count_step_bytes(spec, settings, max_tokens, min(settings.max_num_seqs, max_tokens))
    decode = count_step_bytes(spec, settings, settings.max_num_seqs, settings.max_num_seqs)
    library_bytes = (
        workspace_and_plan_bytes(spec, settings)
        if settings.attention_backend == "flashinfer"
        else 0
    )
    return max(prompt, decode) + decode * settings.graphs + library_bytes


@torch.inference_mode()
def count_step_bytes(spec: ModelSpec, settings: Settings, tokens: int, rows: int) -> int:
    """Return the bytes of a step of `tokens` tokens of `rows` sequences, each of which is sampled;
    all are decodes except one chunk of the remaining tokens."""
    spec = sample_layers(spec)
    dtype = getattr(torch, settings.dtype)
    kernels = Kernels(linear=ShapeLinear())
    attention = ShapeAttention(0 if settings.attention_backend == "flashinfer" else SPLIT_KEYS)
    build = Build(spec=spec, kernels=kernels, attention=attention, dtype=dtype, device="meta")
    architecture = MODELS[spec.architecture]
    model = (architecture.decoder or Decoder)(build, architecture)
    for module in model.modules():
        if isinstance(module, Linear | ExpertLinear):
            module.prepare()
    groups = len(spec.kv_groups)
    kv = allocate_kv(spec.kv_groups, (2,) * groups, settings.cache.block_size, dtype, "meta")
    half = spec.rope_dim // 2
    angles = [(torch.empty(tokens, 1, half, device="meta"),) * 2 for _ in spec.ropes]
    batch = meta_batch(tokens, rows, groups, settings.max_model_len if rows > 1 else tokens)
    with LiveBytes() as alive:
        hidden_TH = model(batch.token_ids_T, Step(batch=batch, kv=kv, angles=angles))
        logits_RV = model.logits(hidden_TH[:rows])
        choose(logits_RV, meta_row_inputs(rows), lambda logits, _: logits.new_empty(rows))
    return alive.peak


def meta_batch(tokens: int, rows: int, groups: int, context: int) -> Batch:
    """Return the inputs of a step on `meta`."""
    ids = torch.empty(tokens, dtype=torch.int64, device="meta")
    chunk = tokens - rows + 1
    return Batch(
        token_ids_T=ids,
        positions_T=ids,
        slots_GT=[ids] * groups,
        block_tables_GSB=[ids] * groups,
        query_lens=[1] * (rows - 1) + [chunk],
        context_lens=[context] * rows,
        num_decodes=rows if chunk == 1 else rows - 1,
        sampled_rows=[],
        sampled_sequences=[],
    )


def meta_row_inputs(rows: int) -> RowInputs:
    """Return sampling inputs that edit every logit, so that logits are copied, and sample."""
    column = torch.empty(rows, 1, device="meta")
    return RowInputs(
        tokens_R=column,
        state_R=column,
        allowed_RW=None,
        bias=None,
        banned=torch.empty(rows, dtype=torch.int64, device="meta"),
        repeated=None,
        penalties=None,
        greedy_R=column,
        temperature_R1=column,
        min_p_R1=column,
        top_k_R1=column,
        top_p_R1=column,
        u_R1=column,
        any_drawn=True,
        any_filter=True,
    )
