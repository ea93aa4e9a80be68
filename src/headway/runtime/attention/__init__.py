"""Attention over paged KV: one backend per file, chosen by the name that the user types."""

from headway.config.resolve import Settings
from headway.core.errors import UsageError
from headway.runtime.attention.cache import KVLayer, allocate_kv
from headway.runtime.attention.context_parallel import ContextParallelAttention
from headway.runtime.attention.flashinfer import FlashInferAttention
from headway.runtime.attention.native import NativeAttention, NativeKVLayer
from headway.runtime.attention.protocol import AttentionBackend, AttentionRule
from headway.runtime.attention.reference import ReferenceAttention
from headway.runtime.attention.sdpa import SdpaAttention
from headway.runtime.attention.triton import TritonAttention
from headway.runtime.attention.varlen import VarlenAttention
from headway.runtime.native.library import NativeLibrary
from headway.runtime.parallel.group import RankGroup
from headway.spec.kv_format import APART, ROUNDED


def choose_attention(
    settings: Settings, library: NativeLibrary | None, holders: RankGroup | None = None
) -> tuple[AttentionBackend, tuple[str, str]]:
    """Return (backend, (its name, why it was chosen)).

    It is the backend that the settings resolved to, or torch's where the native library did not
    load. `holders` are the ranks that each context is split over, None without context parallelism.
    Raises UsageError where the settings need native kernels that did not load.
    """
    name = settings.attention_backend
    if holders is not None:
        if library is None:
            raise UsageError(
                "--decode-context-parallel-size: the native kernels did not load.",
                "Leave it out, or build them with make install.",
            )
        return ContextParallelAttention(library), (name, f"its splits on {holders.size} ranks")
    if name != "native":
        return BACKENDS[name](), (name, "as resolved")
    if library is not None:
        return NativeAttention(library), (name, f"compiled for {library.instruction_set}")
    if settings.cache.dtype in (*ROUNDED, *APART):
        raise UsageError(
            f"--kv-cache-dtype {settings.cache.dtype}: the native kernels gave a wrong GEMM "
            "on this CPU.",
            "Use --kv-cache-dtype auto.",
        )
    return SdpaAttention(), (SdpaAttention.name, "the native kernels did not load")


BACKENDS: dict[str, type[AttentionBackend]] = {
    "triton": TritonAttention,
    "varlen": VarlenAttention,
    "flashinfer": FlashInferAttention,
    "reference": ReferenceAttention,
    "sdpa": SdpaAttention,
}
"""All but the native backend, which needs its library."""

__all__ = [
    "BACKENDS",
    "AttentionBackend",
    "AttentionRule",
    "KVLayer",
    "NativeAttention",
    "NativeKVLayer",
    "TritonAttention",
    "allocate_kv",
    "choose_attention",
]
