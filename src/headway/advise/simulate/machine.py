"""The machine under a simulation: settings, truth and belief, from a calibration or a roofline."""

from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path

import msgspec

from headway.advise.simulate.front import Front
from headway.advise.simulate.stripped import own_seconds
from headway.advise.simulate.truth import (
    CALIBRATED,
    MEASURED_ALONE,
    ROOFLINE,
    STEADY,
    TRANSFERRED,
    Fit,
    Learned,
    Roofline,
    Truth,
    check_measured_alone,
    check_same,
    ratio_of,
)
from headway.assemble import plan_settings
from headway.bench.calibrate import open_calibration
from headway.config.options import EngineOptions
from headway.config.options.simulate import SimulateOptions
from headway.config.resolve import Settings
from headway.core.errors import UsageError
from headway.core.plan import Description
from headway.perf.model import StepModel, prior_of
from headway.spec import ModelSpec
from headway.spec.quantization import planned_bytes
from headway.telemetry.calibration import WHOLE_LOAD, MachineCalibration, fingerprint

LEAST_DRIFT = 0.03
"""Two hours of one machine differ by at least this."""
BANDWIDTH_REACHED, FLOPS_REACHED = (0.4, 0.8), (0.3, 0.7)
"""Of a datasheet, worst and best: a judgement, so what follows from it is an interval."""
CPU_LAYER_S, CUDA_LAYER_S = 2e-5, 3e-5
"""What a layer takes beside its bytes and FLOPs: launches, and on a CPU the meeting of threads."""
UNMEASURED = (
    "Nobody has measured this machine: times are bytes and FLOPs over 40 to 80% of its bandwidth "
    "and 30 to 70% of its FLOP/s."
)
OLDER = (
    "The calibration is of version 1: what it says of the server's front was measured under the "
    "whole load, so waits there count twice. Calibrate again: headway bench URL --calibrate FILE."
)
ONE_ENGINE = (
    "One engine was calibrated: what several take from each other but cores, caches and memory, is "
    "not known. Calibrate a server of as many: headway serve --replicas N."
)
STEP_S = 5e-4
"""What a step takes on the host: schedule, update, messages."""


@dataclass(slots=True, kw_only=True)
class Machinery:
    """Where steps run: what the engine is set to, and how long a step takes."""

    spec: ModelSpec
    settings: Settings
    description: Description
    model: str
    label: str
    front: Front = field(default_factory=Front)
    belief: StepModel | None = None
    acceptance: tuple[float, ...] = ()
    drift: float = 0.0
    notes: list[str] = field(default_factory=list)
    fit: Fit | None = None
    ends: tuple[Roofline, Roofline] | None = None
    """A roofline's best and worst."""

    def cases(self, runs: int, seed: int) -> list[tuple[int, float]]:
        """(seed, scale) of each run; the first is the one that is reported.

        A calibrated machine runs so often as it is, then once slower and once faster. On a
        roofline the scale is from 0, the best that is believed possible, to 1, the worst.
        """
        if self.ends is not None:
            return [(seed, 0.5), (seed, 0.0), (seed, 1.0)]
        more = max(self.drift, LEAST_DRIFT)
        drawn = [(seed + number, 1.0) for number in range(runs)]
        return [*drawn, (seed, 1 + more), (seed, 1 - more)]

    def truth(self, seed: int, scale: float) -> Truth:
        """What steps take in one of these runs."""
        if self.ends is not None:
            return between(*self.ends, scale)
        assert self.fit is not None
        return Learned(self.fit, seed=seed, scale=scale, label=self.label)


def machinery(folder: Path, options: SimulateOptions, engine: EngineOptions) -> Machinery:
    """What the options name; UsageError for a calibration of something else."""
    spec, settings, _, _ = plan_settings(folder, engine)
    if not options.calibration:
        refuse_unmeasured(engine)
        return by_roofline(folder, spec, settings, Description(device=settings.device))
    calibration = open_calibration(options.calibration)
    same = calibration.fingerprint == fingerprint(spec)
    check_measured_alone(calibration, settings.to_stats())
    if not options.transfer:
        check_same(calibration, fingerprint(spec), settings.to_stats())
    settings = as_measured(settings, calibration, engine, same)
    found = calibrated(folder.name, spec, settings, calibration)
    if options.replicas > 1 and computing(calibration)[1] == 1:
        found.notes.append(ONE_ENGINE)
    return found


def refuse_unmeasured(engine: EngineOptions) -> None:
    """Raise UsageError for options that a roofline would leave out of its times in silence."""
    own = EngineOptions()
    for name in MEASURED_ALONE:
        given = getattr(engine, name)
        if given != getattr(own, name):
            raise UsageError(
                f"--{name.replace('_', '-')} {given}: what its steps take is known by measuring.",
                "Calibrate a server that has it (headway bench URL --calibrate FILE) and give "
                "--calibration FILE, or leave it out.",
            )


def as_measured(
    settings: Settings, calibration: MachineCalibration, engine: EngineOptions, same: bool
) -> Settings:
    """The settings with the KV blocks that the measured server had, where nobody says otherwise:
    how much memory is free changes from hour to hour."""
    cache = settings.cache
    asked = (engine.kv_memory, engine.max_model_len, engine.gpu_memory_utilization)
    if not same or any(asked) or cache.block_size != calibration.block_size:
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


def calibrated(
    name: str, spec: ModelSpec, settings: Settings, calibration: MachineCalibration
) -> Machinery:
    """A machine as it was measured; of another model or format the parts scale by the roofline."""
    description = calibration.description
    told = settings.to_stats()
    same = calibration.fingerprint == fingerprint(spec) and all(
        told.get(name) == calibration.settings.get(name) for name in ("quantization", "kv_dtype")
    )
    prior = prior_of(spec, description, settings.dtype, settings.cache.dtype)
    notes, ratio = [], None
    if not same:
        raise_unknown(spec, calibration)
        new = description
        if told.get("quantization") != calibration.settings.get("quantization"):
            new = replace_bytes(description, settings, spec)
        prior = prior_of(spec, description, settings.dtype, settings.cache.dtype)
        ratio = ratio_of(
            prior_of(spec, new, settings.dtype, settings.cache.dtype),
            prior_of(spec, description, settings.dtype, calibration.settings.get("kv_dtype", "")),
        )
        notes.append("The calibration is of another format; parts are scaled by the roofline.")
    front = Front.of(calibration.host)
    own_s = own_seconds(calibration, front, *computing(calibration))
    fit = Fit(
        calibration.steps, settings.cache.reaches, prior, ratio, own_s, calibration.step_model
    )
    front = replace(front, beside=fit.beside)
    if calibration.version == WHOLE_LOAD:
        notes.append(OLDER)
    if fit.moved > STEADY:
        notes.append(
            "This machine was not steady enough to calibrate: for the same work the second half "
            f"of its steps took {fit.moved:.0%} more or less than the first."
        )
    kept = list(calibration.acceptance.values())
    return Machinery(
        spec=spec,
        settings=settings,
        description=description,
        model=name,
        label=CALIBRATED if same else TRANSFERRED,
        front=front,
        belief=fit.belief,
        acceptance=tuple(kept[0]) if kept else (),
        drift=max(fit.drift, fit.moved / 2),
        notes=notes,
        fit=fit,
    )


def computing(calibration: MachineCalibration) -> tuple[int, int]:
    """(threads of an engine, engines) of the server that was calibrated."""
    names = ("threads", "tensor_parallel_size", "decode_context_parallel_size")
    threads = prod(int(calibration.settings.get(name, "1")) for name in names)
    origin = calibration.origin
    return threads, 1 if origin is None else origin.replicas


def raise_unknown(spec: ModelSpec, calibration: MachineCalibration) -> None:
    """A calibration without a model's dimensions can only stand in for its other formats."""
    if calibration.fingerprint != fingerprint(spec):
        raise UsageError(
            f"The calibration is of another model, {calibration.model}; only another format of "
            "the same model can be derived from it.",
            "Calibrate this model: headway bench URL --calibrate FILE.",
        )


def replace_bytes(description: Description, settings: Settings, spec: ModelSpec) -> Description:
    """The same machine with weights of the new format."""
    rounded = settings.quantization
    planned = planned_bytes(rounded, spec, settings.dtype) if rounded.rounded else 0
    per_weight = planned / spec.num_parameters if planned else 0.0
    return msgspec.structs.replace(description, bytes_per_weight=per_weight)


# ── the roofline ────────────────────────────────────────────────────────────────────────────


def by_roofline(
    folder: Path, spec: ModelSpec, settings: Settings, description: Description
) -> Machinery:
    """A machine of which only ceilings are known: the answer is an interval."""
    ends = (
        roofline(spec, settings, description, BANDWIDTH_REACHED[1], FLOPS_REACHED[1]),
        roofline(spec, settings, description, BANDWIDTH_REACHED[0], FLOPS_REACHED[0]),
    )
    return Machinery(
        spec=spec,
        settings=settings,
        description=description,
        model=folder.name,
        label=ROOFLINE,
        ends=ends,
        notes=[UNMEASURED],
    )


def roofline(
    spec: ModelSpec, settings: Settings, description: Description, bandwidth: float, flops: float
) -> Roofline:
    """Steps at these shares of the machine's ceilings."""
    prior = prior_of(spec, description, settings.dtype, settings.cache.dtype)
    layer_s = CPU_LAYER_S if settings.device == "cpu" else CUDA_LAYER_S
    return Roofline(
        weights_s=prior.weights_s / bandwidth,
        head_s=prior.any_sampled_s / bandwidth,
        read_s=prior.read_s / bandwidth,
        token_s=prior.token_s / flops,
        attended_s=prior.attended_s / flops,
        sampled_s=prior.sampled_s / flops,
        fixed_s=STEP_S + spec.num_layers * layer_s,
    )


def between(best: Roofline, worst: Roofline, share: float) -> Roofline:
    """From the best (0) to the worst (1), each part in even ratios."""
    names = ("weights_s", "head_s", "read_s", "token_s", "attended_s", "sampled_s", "fixed_s")
    parts = {n: getattr(best, n) ** (1 - share) * getattr(worst, n) ** share for n in names}
    link_s = (1 - share) * best.token_link_s + share * worst.token_link_s
    return Roofline(**parts, token_link_s=link_s)
