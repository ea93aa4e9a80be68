"""The executor of an accelerator where there is none: on the CPU, and on `meta`, without data."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from headway.config.options import EngineOptions
from headway.planning import plan_settings, read_draft
from headway.runtime.attention import BACKENDS, AttentionRule, KVLayer
from headway.runtime.batch import Batch
from headway.runtime.build import WeightSource, build_executor
from headway.runtime.cuda.executor import CudaExecutor
from headway.runtime.kernels import reference
from headway.runtime.kernels.grouped import GroupedLinear, Visits
from parity.cobatch import MAX_LEN, VOCABULARY, write_letters
from parity.tiny import save, tiny_model

SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_LEN,
}


def small_model(folder: Path) -> Path:
    """A tiny Llama in `folder`, with a tokenizer of letters for grammars."""
    save(tiny_model("llama", **SMALL), folder)
    write_letters(folder)
    return folder


def cuda_executor(
    folder: Path, spec: Any, settings: Any, machine: Any, draft: Any = None
) -> CudaExecutor:
    """What a GPU would run, on the device of the settings."""
    files = WeightSource(folder=folder, draft=draft)
    return build_executor(CudaExecutor, files, spec, settings, machine)


def on_cpu(
    folder: Path, options: EngineOptions, spec: Any, settings: Any, machine: Any, _: Any
) -> CudaExecutor:
    """A `make` of `drive.engine_for`: what a GPU would run, on the CPU."""
    draft = read_draft(folder, options, spec)
    return cuda_executor(folder, spec, settings, machine, draft)


def on_meta(folder: Path, **options: object) -> CudaExecutor:
    """The same over memory without numbers, so that no number can be asked for."""
    table = EngineOptions(
        device="cpu", kv_memory=2**20, threads=1, kernels="torch", load_format="dummy", **options
    )
    spec, settings, _, machine = plan_settings(folder, table)
    with patch("headway.runtime.loading.fill_randomly"), gathered():  # there are no numbers to draw
        return cuda_executor(folder, spec, replace(settings, device="meta"), machine)


def with_triton(kv_dtype: str = "auto", **more: object) -> Callable[..., CudaExecutor]:
    """A `make` of `drive.engine_for`: our own kernels, which run in Triton's interpreter here."""

    def make(folder: Path, _: Any, spec: Any, settings: Any, machine: Any, __: Any) -> CudaExecutor:
        dtype = settings.cache.dtype if kv_dtype == "auto" else kv_dtype
        cache = replace(settings.cache, dtype=dtype)
        own = replace(settings, kernels="cuda", attention_backend="triton", cache=cache, **more)
        return cuda_executor(folder, spec, own, machine)

    return make


class DenseAttention:
    """Attention of plain torch that asks the host for nothing but shapes: a graph may hold it."""

    name = "dense"
    kv_layer: type[KVLayer] = KVLayer

    def attend(
        self,
        q_TND: Tensor,
        k_TGD: Tensor | None,
        v_TGD: Tensor | None,
        layer: KVLayer,
        batch: Batch,
        rule: AttentionRule,
    ) -> Tensor:
        assert k_TGD is not None and v_TGD is not None and batch.lens is not None
        layer.write(k_TGD, v_TGD, batch.slots_GT[layer.group])
        tokens = torch.arange(len(q_TND))
        of_T = torch.searchsorted(batch.lens.query_starts_S1[1:].long(), tokens, right=True)
        table_TB = batch.lens.tables_GSB[layer.group].index_select(0, of_T).long()
        repeats = q_TND.shape[1] // k_TGD.shape[1]
        sinks = rule.sink_logits
        k, v = (x.repeat_interleave(repeats, 2) for x in layer.gather(table_TB))
        scores = torch.einsum("tnd,tknd->tnk", q_TND.float(), k.float()) * rule.scale
        seen = rule.visibility_mask(batch.positions_T[:, None], torch.arange(k.shape[1])[None])
        scores = scores.masked_fill(~seen[:, None], -torch.inf)
        if sinks is not None:
            column = sinks.float()[None, :, None].expand(len(scores), -1, 1)
            scores = torch.cat([scores, column], -1)
        weights = scores.softmax(-1)[..., : k.shape[1]]
        return torch.einsum("tnk,tknd->tnd", weights, v.float()).to(q_TND.dtype)


class GatheredLinear(GroupedLinear):
    """Products in plain torch, those of experts without asking who was chosen."""

    def prepare(self, weight_OH: Tensor) -> Tensor:
        return weight_OH

    def __call__(self, x_TH: Tensor, weight_OH: Tensor, bias_O: Tensor | None) -> Tensor:
        return reference.linear(x_TH, weight_OH, bias_O)

    def stack(self, prepared: list[Tensor]) -> Tensor:
        raise AssertionError("the matrices lie behind each other already")

    def grouped(
        self, x_VH: Tensor, weight: Tensor, bias_EO: Tensor | None, visits: Visits
    ) -> Tensor:
        return reference.grouped_linear(x_VH, weight, bias_EO, visits.starts_E1)


def gathered() -> Any:
    """Makes every executor that is made meanwhile multiply so."""
    chosen = GatheredLinear(), ("gathered", "as a test asks")
    return patch("headway.runtime.kernels.table.choose_linear", lambda *_: chosen)


def with_graphs(**more: object) -> Callable[..., CudaExecutor]:
    """A `make` of `drive.engine_for`: decode steps are graphs, with a recorder in their place."""

    def make(folder: Path, _: Any, spec: Any, settings: Any, machine: Any, __: Any) -> CudaExecutor:
        own = replace(settings, attention_backend="triton", graphs=True, **more)
        with patch.dict(BACKENDS, triton=DenseAttention), gathered():
            files = WeightSource(folder=folder)
            return build_executor(RecordingExecutor, files, spec, own, machine)

    return make


class RecordingExecutor(CudaExecutor):
    """The executor of an accelerator whose graphs a CPU can replay."""

    make_graph = staticmethod(lambda: Recorder())


class Recorder:
    """A graph that replays by calling, and holds each replay to what was captured.

    The same operations, of the same shapes, on the same addresses: of all that they read and write
    and did not make themselves.
    """

    num_replays = 0

    def capture(self, run: Callable[[], Any]) -> Any:
        with Trace() as trace:
            self.out = run()
        self.run, self.calls = run, trace.calls
        return self.out

    def replay(self) -> None:
        with Trace() as trace:
            out = self.run()
        assert trace.calls == self.calls, "a replay does what was not captured"
        for kept, made in zip(tree_leaves(self.out), tree_leaves(out), strict=True):
            if isinstance(kept, Tensor):
                kept.copy_(made)
        Recorder.num_replays += 1


class NoReadBacks(TorchDispatchMode):
    """Raises where an operation needs a number of the device, or moves one to the host."""

    FORBIDDEN = ("_local_scalar_dense", "nonzero", "is_nonzero", "equal")

    def __init__(self, device: str, *, may_send: bool) -> None:
        super().__init__()
        self.device, self.may_send = device, may_send
        self.num_calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num_calls += 1
        name = func.overloadpacket.__name__
        assert name not in self.FORBIDDEN, f"{name} reads the device"
        for index in args[1] if name in ("index", "index_put", "index_put_") else ():
            assert index is None or index.dtype is not torch.bool, f"{name} counts a mask"
        out = func(*args, **(kwargs or {}))
        if name in ("_to_copy", "copy_"):
            source, target = (args[1], args[0]) if name == "copy_" else (args[0], out)
            if source.device != target.device:
                sends = target.device.type == self.device
                assert sends and self.may_send, f"{name} from {source.device} to {target.device}"
        return out


class Trace(NoReadBacks):
    """Notes each operation, the shapes and types that it reads, and the addresses that come from
    outside; nothing may be read back."""

    def __init__(self) -> None:
        super().__init__("cpu", may_send=False)
        self.calls: list[tuple[object, ...]] = []
        self._outside: set[int] = set()
        self._kept: list[Tensor] = []
        """What was made inside: no address of it is used again meanwhile."""
        self._inside: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        read = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        places = [place_of(x) for x in read]
        if func.overloadpacket.__name__ == "lift_fresh":  # a constant that the code names
            self._inside.update(places)
            self._kept += read
        self._outside.update(place for place in places if place not in self._inside)
        shapes = [(tuple(x.shape), x.dtype, layout_of(x)) for x in read]
        outside = [place if place in self._outside else 0 for place in places]
        numbers = [x for x in tree_leaves((args, kwargs)) if isinstance(x, int | float)]
        self.calls.append((func, shapes, outside, numbers))
        out = super().__torch_dispatch__(func, types, args, kwargs)
        for x in tree_leaves(out):
            if isinstance(x, Tensor) and place_of(x) not in self._outside:
                self._inside.add(place_of(x))
                self._kept.append(x)
        return out


def place_of(x: Tensor) -> int:
    """Where its numbers are; packed weights are known by the object."""
    return id(x) if x.is_mkldnn else x.untyped_storage().data_ptr()


def layout_of(x: Tensor) -> tuple[object, ...]:
    """How they lie there."""
    return () if x.is_mkldnn else (x.stride(), x.storage_offset())
