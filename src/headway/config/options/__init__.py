"""Options, stated once as dataclass fields; flags, YAML, environment and help follow from them."""

from headway.config.options.against import AgainstOptions
from headway.config.options.bench import BenchOptions
from headway.config.options.calibrate import CalibrateOptions
from headway.config.options.clients import (
    BatchOptions,
    KeyOptions,
    LaunchOptions,
    PlaceOptions,
    PullOptions,
    TraceOptions,
)
from headway.config.options.distill import DistillOptions
from headway.config.options.doctor import DoctorOptions
from headway.config.options.drift import DriftOptions
from headway.config.options.evals import EvalOptions
from headway.config.options.field import HALVES, Bytes, Seconds, Stages, flag_name, plain
from headway.config.options.gate import GateOptions
from headway.config.options.gateway import GatewayOptions, SpendOptions
from headway.config.options.plan import PlanOptions
from headway.config.options.prune import PruneOptions
from headway.config.options.quantize import QuantizeOptions
from headway.config.options.read import check_environment, help_text, read_options, to_arguments
from headway.config.options.rollout import RolloutOptions
from headway.config.options.simulate import SimulateOptions
from headway.config.options.tables import (
    EngineOptions,
    LogOptions,
    SamplingOptions,
    ServerOptions,
)
from headway.config.options.tune import TuneOptions

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
    "SpendOptions",
    "TuneOptions",
    "TraceOptions",
    "flag_name",
    "plain",
    "check_environment",
    "help_text",
    "read_options",
    "to_arguments",
]
