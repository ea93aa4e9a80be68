"""Build an executor from a model folder and settings: kernels, weights, KV memory, drafter.

settings → kernels → Forward (weights, KV) → TransferTable, Sampler, Drafter → executor
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from headway.config.resolve import Settings
from headway.core.machine import Machine
from headway.runtime.attention.int4 import with_open_layers
from headway.runtime.batch import WorkerState
from headway.runtime.checkpoint import Progress
from headway.runtime.drafter import Drafter
from headway.runtime.eagle import Eagle
from headway.runtime.executor import TorchExecutor
from headway.runtime.forward import Forward
from headway.runtime.kernels import choose_kernels
from headway.runtime.kvstore.handover import Exports, PeerStore
from headway.runtime.kvstore.open import default_folder, fingerprint, open_disk
from headway.runtime.kvstore.transfers import PeerTransfers
from headway.runtime.medusa import Medusa
from headway.runtime.native.sampling import NativeSampling
from headway.runtime.paged_drafter import DraftModel
from headway.runtime.parallel.group import RankGroups
from headway.runtime.parallel.stage import Stage
from headway.runtime.probe import DeviceProbe, use_threads
from headway.runtime.sampler import Sampler
from headway.runtime.shared_weights import SharedWeights
from headway.runtime.transfers import TransferTable, make_transfers
from headway.runtime.weight_cache import Lookup
from headway.spec import ModelSpec

Kind = TypeVar("Kind", bound=TorchExecutor)


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightSource:
    """Where the weights of a model and of its draft model come from.

    `lookup` is a search for packed weights in the cache; `shared` is the memory of the weights of
    the model and of its drafter, where several engines share them.
    """

    folder: Path
    progress: Progress | None = None
    lookup: Lookup | None = None
    draft: tuple[Path, ModelSpec] | None = None
    shared: Sequence[SharedWeights] = ()


def build_executor(
    kind: type[Kind],
    source: WeightSource,
    spec: ModelSpec,
    settings: Settings,
    machine: Machine,
    groups: RankGroups = (None, None),
    stage: Stage | None = None,
) -> Kind:
    """Return an executor of this kind; with `groups` of ranks or as a `stage`, a rank's part.

    Raises CapacityError where memory is short, CheckpointError for files that do not fit.
    """
    kernels = choose_kernels(settings, machine)
    use_threads(settings, kernels)
    own, of_drafter = source.shared or (None, None)
    target = Forward(
        source.folder,
        spec,
        settings,
        kernels,
        settings.cache.num_blocks,
        source.progress,
        source.lookup,
        groups,
        stage,
        own,
    )
    kv = with_open_layers(target.kv)
    transfers = TransferTable(
        make_transfers(kv, settings.cache.host_blocks, settings.device),
        open_disk(source.folder, spec, settings, kv),
    )
    state = kind.make_state(spec, settings)
    return kind(
        spec,
        settings,
        target,
        state,
        transfers=transfers,
        sampler=Sampler(None if kernels.library is None else NativeSampling(kernels.library)),
        drafter=make_drafter(source, spec, settings, target, state, of_drafter),
        probe=DeviceProbe(kernels, settings, machine, target.weights),
    )


def make_drafter(
    source: WeightSource,
    spec: ModelSpec,
    settings: Settings,
    target: Forward,
    state: WorkerState,
    shared: SharedWeights | None,
) -> Drafter | None:
    """Return the Medusa heads, the draft layer or the draft model of the settings, or None."""
    medusa, eagle = settings.speculation.medusa, settings.speculation.eagle
    if medusa is not None:
        return Medusa(source.folder, medusa, target, shared)
    if eagle is not None:
        return Eagle(source.folder, eagle, target, state, shared)
    if source.draft is None:
        return None
    kernels = target.kernels.for_draft_model(settings, source.draft[1])
    return DraftModel(
        *source.draft, settings, kernels, state, spec.vocab_size, source.progress, shared
    )


def join_peers(
    executor: TorchExecutor,
    folder: Path,
    address: str,
    secret: bytes = b"",
    root: Path | None = None,
) -> tuple[bytes, str, Callable[[bytes], None]]:
    """Let other engines fetch blocks of `executor` at `address`, and fetch theirs.

    Returns (the fingerprint of compatible blocks, the bound address, a function that releases a
    parcel). Raises OSError.
    """
    spec, settings, kv = executor.spec, executor.settings, executor.kv
    mark = fingerprint(folder, spec, settings, kv, root or default_folder())
    exports = Exports(address, mark, secret=secret)
    groups, store = len(settings.cache.num_blocks), PeerStore(mark, secret=secret)
    executor.transfers.peers = PeerTransfers(kv, groups, store, exports)
    return mark, exports.address, exports.release
