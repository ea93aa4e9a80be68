"""Headway: an inference engine and OpenAI-compatible server that maximizes goodput."""

from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headway.core.request import SamplingParams
    from headway.llm import LLM

__all__ = ["LLM", "SamplingParams", "__version__"]

try:
    __version__ = version("headway")
except PackageNotFoundError:
    __version__ = "0+unknown"


def __getattr__(name: str) -> Any:
    """Import late: `import headway` costs milliseconds, the first use of `LLM` loads torch."""
    if name == "LLM":
        from headway.llm import LLM

        return LLM
    if name == "SamplingParams":
        from headway.core.request import SamplingParams

        return SamplingParams
    raise AttributeError(f"module 'headway' has no attribute {name!r}")
