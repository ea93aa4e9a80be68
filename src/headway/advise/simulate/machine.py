"""The simulated machine: settings, step times and cost model, from a calibration or a roofline."""

from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path

import msgspec

from headway.advise.simulate.front import FrontendTimes
from headway.advise.simulate.own_time import own_seconds
from headway.advise.simulate.truth import (
    CALIBRATED,
    MAX_HALF_DRIFT,
    MEASURED_ALONE,
    ROOFLINE,
    TRANSFERRED,
    CalibratedTruth,
    CalibrationFit,
    RooflineTruth,
    Truth,
    check_measured_alone,
    check_same,
    ratio_of,
)
from headway.bench.calibrate import open_calibration
from headway.config.options import EngineOptions
from headway.config.options.simulate import SimulateOptions
from headway.config.resolve import Settings
from headway.core.errors import UsageError
from headway.core.plan import Description
from headway.perf.model import StepModel, prior_of
from headway.planning import plan_settings
from headway.spec import ModelSpec
from headway.spec.quantization import planned_bytes
from headway.telemetry.calibration import WHOLE_LOAD, MachineCalibration, fingerprint

MIN_DRIFT = 0.03
"""Least difference in pace between two hours of one machine."""
BANDWIDTH_REACHED, FLOPS_REACHED = (0.4, 0.8), (0.3, 0.7)
"""Shares of a datasheet's figures that kernels reach, worst and best: an estimate, so that results
are intervals."""
CPU_LAYER_S, CUDA_LAYER_S = 2e-5, 3e-5
"""Seconds of a layer beside its bytes and FLOPs: launches, and on a CPU the threads' barrier."""
UNMEASURED_NOTE = (
    "This machine was not measured: times are bytes and FLOPs over 40 to 80% of its bandwidth "
    "and 30 to 70% of its FLOP/s."
)
OLD_CALIBRATION_NOTE = (
    "The calibration is of version 1: what it says of the server's front was measured under the "
    "whole load, so waits there count twice. Calibrate again: headway bench URL --calibrate FILE."
)
ONE_ENGINE_NOTE = (
    "One engine was calibrated: what several take from each other but cores, caches and memory, is "
    "not known. Calibrate a server of as many: headway serve --replicas N."
)
HOST_STEP_S = 5e-4
"""Seconds of a step on the host: schedule, update, messages."""


@dataclass(slots=True, kw_only=True)
class SimulatedMachine:
    """The machine on which steps run: the engine's settings, and the time of a step."""

    spec: ModelSpec
    settings: Settings
    description: Description
    model: str
    label: str
    front: FrontendTimes = field(default_factory=FrontendTimes)
    belief: StepModel | None = None
    acceptance: tuple[float, ...] = ()
    drift: float = 0.0
    notes: list[str] = field(default_factory=list)
    fit: CalibrationFit | None = None
    ends: tuple[RooflineTruth, RooflineTruth] | None = None
    """A roofline's best and worst."""

    def cases(self, runs: int, seed: int) -> list[tuple[int, float]]:
        """Return (seed, scale) of each run; the first is the reported one.

        A calibrated machine runs `runs` times as it is, then once slower and once faster. On a
        roofline the scale goes from 0, the best that is believed possible, to 1, the worst.
        """
        if self.ends is not None:
            return [(seed, 0.5), (seed, 0.0), (seed, 1.0)]
        more = max(self.drift, MIN_DRIFT)
        drawn = [(seed + number, 1.0) for number in range(runs)]
        return [*drawn, (seed, 1 + more), (seed, 1 - more)]

    def truth(self, seed: int, scale: float) -> Truth:
        """Return the step times of one of these runs."""
        if self.ends is not None:
            return interpolate(*self.ends, scale)
        assert self.fit is not None
        return CalibratedTruth(self.fit, seed=seed, scale=scale, label=self.label)


def build_machine(
    folder: Path, options: SimulateOptions, engine: EngineOptions
) -> SimulatedMachine:
    """Return the machine that the options name; UsageError for a calibration of something else."""
    spec, settings, _, _ = plan_settings(folder, engine)
    if not options.calibration:
        refuse_unmeasured(engine)
        return roofline_machine(folder, spec, settings, Description(device=settings.device))
    calibration = open_calibration(options.calibration)
    same = calibration.fingerprint == fingerprint(spec)
    check_measured_alone(calibration, settings.to_stats())
    if not options.transfer:
        check_same(calibration, fingerprint(spec), settings.to_stats())
    settings = as_measured(settings, calibration, engine, same)
    machine = calibrated_machine(folder.name, spec, settings, calibration)
    if options.replicas > 1 and engine_threads(calibration)[1] == 1:
        machine.notes.append(ONE_ENGINE_NOTE)
    return machine


def refuse_unmeasured(engine: EngineOptions) -> None:
    """Raise UsageError for options whose effect a roofline would silently leave out."""
    own = EngineOptions()
    for name in MEASURED_ALONE:
        given = getattr(engine, name)
        if given != getattr(own, name):
            raise UsageError(
                f"--{name.replace('_', '-')} {given}: the time of its steps can only be measured.",
                "Calibrate a server that has it (headway bench URL --calibrate FILE) and give "
                "--calibration FILE, or leave it out.",
            )


def as_measured(
    settings: Settings, calibration: MachineCalibration, engine: EngineOptions, same: bool
) -> Settings:
    """Return the settings with the KV blocks of the measured server, unless options state them.

    Free memory changes from hour to hour, so it is not taken from the present moment.
    """
    cache = settings.cache
    memory_options = (engine.kv_memory, engine.max_model_len, engine.gpu_memory_utilization)
    if not same or any(memory_options) or cache.block_size != calibration.block_size:
        return settings
    if len(cache.num_blocks) != len(calibration.group_blocks):
        return settings
    blocks = tuple(count + 1 for count in calibration.group_blocks)
    new = replace(cache, num_blocks=blocks)
    return replace(
        settings,
        cache=new,
        max_model_len=min(calibration.max_model_len, min(new.token_blocks) * cache.block_size),
    )


def calibrated_machine(
    name: str, spec: ModelSpec, settings: Settings, calibration: MachineCalibration
) -> SimulatedMachine:
    """Return a machine as it was measured; for another format its parts are scaled by the
    roofline."""
    description = calibration.description
    summary = settings.to_stats()
    same = calibration.fingerprint == fingerprint(spec) and all(
        summary.get(name) == calibration.settings.get(name) for name in ("quantization", "kv_dtype")
    )
    prior = prior_of(spec, description, settings.dtype, settings.cache.dtype)
    notes, ratio = [], None
    if not same:
        check_same_model(spec, calibration)
        new = description
        if summary.get("quantization") != calibration.settings.get("quantization"):
            new = with_weight_bytes(description, settings, spec)
        prior = prior_of(spec, description, settings.dtype, settings.cache.dtype)
        ratio = ratio_of(
            prior_of(spec, new, settings.dtype, settings.cache.dtype),
            prior_of(spec, description, settings.dtype, calibration.settings.get("kv_dtype", "")),
        )
        notes.append("The calibration is of another format; parts are scaled by the roofline.")
    front = FrontendTimes.of(calibration.host)
    own_s = own_seconds(calibration, front, *engine_threads(calibration))
    fit = CalibrationFit(
        calibration.steps, settings.cache.reaches, prior, ratio, own_s, calibration.step_model
    )
    front = replace(front, interference=fit.interference)
    if calibration.version == WHOLE_LOAD:
        notes.append(OLD_CALIBRATION_NOTE)
    if fit.half_drift > MAX_HALF_DRIFT:
        notes.append(
            "This machine was not steady enough to calibrate: for the same work the second half "
            f"of its steps took {fit.half_drift:.0%} more or less than the first."
        )
    acceptance = list(calibration.acceptance.values())
    return SimulatedMachine(
        spec=spec,
        settings=settings,
        description=description,
        model=name,
        label=CALIBRATED if same else TRANSFERRED,
        front=front,
        belief=fit.belief,
        acceptance=tuple(acceptance[0]) if acceptance else (),
        drift=max(fit.drift, fit.half_drift / 2),
        notes=notes,
        fit=fit,
    )


def engine_threads(calibration: MachineCalibration) -> tuple[int, int]:
    """Return (threads of an engine, engines) of the calibrated server."""
    names = ("threads", "tensor_parallel_size", "decode_context_parallel_size")
    threads = prod(int(calibration.settings.get(name, "1")) for name in names)
    origin = calibration.origin
    return threads, 1 if origin is None else origin.replicas


def check_same_model(spec: ModelSpec, calibration: MachineCalibration) -> None:
    """Raise UsageError for another model: a calibration can stand in only for other formats of its
    own."""
    if calibration.fingerprint != fingerprint(spec):
        raise UsageError(
            f"The calibration is of another model, {calibration.model}; only another format of "
            "the same model can be derived from it.",
            "Calibrate this model: headway bench URL --calibrate FILE.",
        )


def with_weight_bytes(description: Description, settings: Settings, spec: ModelSpec) -> Description:
    """Return the same machine with weights of the new format."""
    rounded = settings.quantization
    planned = planned_bytes(rounded, spec, settings.dtype) if rounded.rounded else 0
    per_weight = planned / spec.num_parameters if planned else 0.0
    return msgspec.structs.replace(description, bytes_per_weight=per_weight)


# ── the roofline ────────────────────────────────────────────────────────────────────────────


def roofline_machine(
    folder: Path, spec: ModelSpec, settings: Settings, description: Description
) -> SimulatedMachine:
    """Return a machine of which only ceilings are known: results are intervals."""
    ends = (
        roofline(spec, settings, description, BANDWIDTH_REACHED[1], FLOPS_REACHED[1]),
        roofline(spec, settings, description, BANDWIDTH_REACHED[0], FLOPS_REACHED[0]),
    )
    return SimulatedMachine(
        spec=spec,
        settings=settings,
        description=description,
        model=folder.name,
        label=ROOFLINE,
        ends=ends,
        notes=[UNMEASURED_NOTE],
    )


def roofline(
    spec: ModelSpec, settings: Settings, description: Description, bandwidth: float, flops: float
) -> RooflineTruth:
    """Return step times at these shares of the machine's ceilings."""
    prior = prior_of(spec, description, settings.dtype, settings.cache.dtype)
    layer_s = CPU_LAYER_S if settings.device == "cpu" else CUDA_LAYER_S
    return RooflineTruth(
        weights_s=prior.weights_s / bandwidth,
        head_s=prior.any_sampled_s / bandwidth,
        read_s=prior.read_s / bandwidth,
        token_s=prior.token_s / flops,
        attended_s=prior.attended_s / flops,
        sampled_s=prior.sampled_s / flops,
        fixed_s=HOST_STEP_S + spec.num_layers * layer_s,
    )


def interpolate(best: RooflineTruth, worst: RooflineTruth, share: float) -> RooflineTruth:
    """Return step times between the best (0) and the worst (1), each part in even ratios."""
    names = ("weights_s", "head_s", "read_s", "token_s", "attended_s", "sampled_s", "fixed_s")
    parts = {n: getattr(best, n) ** (1 - share) * getattr(worst, n) ** share for n in names}
    link_s = (1 - share) * best.token_link_s + share * worst.token_link_s
    return RooflineTruth(**parts, token_link_s=link_s)
