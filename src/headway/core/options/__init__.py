"""Options, stated once as dataclass fields; flags, YAML, environment and help follow from them."""

from headway.core.options.bench import BenchOptions
from headway.core.options.clients import BatchOptions, LaunchOptions, PullOptions
from headway.core.options.doctor import DoctorOptions
from headway.core.options.evals import EvalOptions
from headway.core.options.field import Bytes, Seconds
from headway.core.options.read import help_text, read_options, to_arguments
from headway.core.options.tables import (
    EngineOptions,
    LogOptions,
    SamplingOptions,
    ServerOptions,
    TraceOptions,
)

__all__ = [
    "BatchOptions",
    "BenchOptions",
    "Bytes",
    "DoctorOptions",
    "EngineOptions",
    "EvalOptions",
    "LogOptions",
    "LaunchOptions",
    "PullOptions",
    "SamplingOptions",
    "Seconds",
    "ServerOptions",
    "TraceOptions",
    "help_text",
    "read_options",
    "to_arguments",
]
