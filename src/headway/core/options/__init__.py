"""Options, stated once as dataclass fields; flags, YAML, environment and help follow from them."""

from headway.core.options.against import AgainstOptions
from headway.core.options.bench import BenchOptions
from headway.core.options.calibrate import CalibrateOptions
from headway.core.options.clients import (
    BatchOptions,
    KeyOptions,
    LaunchOptions,
    PlaceOptions,
    PullOptions,
    TraceOptions,
)
from headway.core.options.distill import DistillOptions
from headway.core.options.doctor import DoctorOptions
from headway.core.options.drift import DriftOptions
from headway.core.options.evals import EvalOptions
from headway.core.options.field import HALVES, Bytes, Seconds, Stages, flag_name, plain
from headway.core.options.gate import GateOptions
from headway.core.options.gateway import GatewayOptions
from headway.core.options.plan import PlanOptions
from headway.core.options.prune import PruneOptions
from headway.core.options.quantize import QuantizeOptions
from headway.core.options.read import check_environment, help_text, read_options, to_arguments
from headway.core.options.rollout import RolloutOptions
from headway.core.options.simulate import SimulateOptions
from headway.core.options.tables import (
    EngineOptions,
    LogOptions,
    SamplingOptions,
    ServerOptions,
)
from headway.core.options.tune import TuneOptions

__all__ = [
    "HALVES",
    "AgainstOptions",
    "BatchOptions",
    "BenchOptions",
    "CalibrateOptions",
    "Bytes",
    "DistillOptions",
    "DoctorOptions",
    "DriftOptions",
    "EngineOptions",
    "EvalOptions",
    "GateOptions",
    "GatewayOptions",
    "LogOptions",
    "KeyOptions",
    "PlaceOptions",
    "LaunchOptions",
    "PlanOptions",
    "PruneOptions",
    "PullOptions",
    "QuantizeOptions",
    "RolloutOptions",
    "SamplingOptions",
    "Seconds",
    "Stages",
    "ServerOptions",
    "SimulateOptions",
    "TuneOptions",
    "TraceOptions",
    "flag_name",
    "plain",
    "check_environment",
    "help_text",
    "read_options",
    "to_arguments",
]
