"""What this machine is and how one model would run on it: `headway doctor` without a server.

`examine` measures the machine through `assemble` and returns plain figures; `show_machine` prints
them. A measured ceiling is printed beside the maker's figure where a datasheet is given.
"""

from pathlib import Path

import msgspec
from rich.console import Console

from headway.advise.show import plain_table
from headway.advise.words import duration, percent, plural, rate
from headway.config.memory_plan import gib
from headway.config.options import EngineOptions
from headway.core.clock import SystemClock
from headway.core.machine import MULTIPLY_FLAGS
from headway.perf.roofline import DataSheetRow, find_sheet, read_sheets
from headway.planning import examine_machine
from headway.spec import DTYPE_BYTES, KVGroupSpec
from headway.spec.quantization import bytes_per_weight, planned_bytes
from headway.telemetry.contention import CoreUse, CoreWatch

INSTRUCTION_SETS = (
    *("sse4_2", "avx", "avx2", "fma", "f16c", "avx512f", "avx512_vnni", "avx_vnni"),
    *sorted(flag for flags in MULTIPLY_FLAGS.values() for flag in flags),
    *("amx_int8", "asimd", "sve", "i8mm", "bf16"),
)
"""Instruction sets of x86 and ARM that the kernels use."""
MAX_OTHERS_SHARE = 0.1
"""Share of the cores' time; more used by others during the measurement is reported."""


class ExplainedValue(msgspec.Struct, kw_only=True):
    """A value and its reason."""

    name: str
    value: str
    why: str


class KVGroupReport(msgspec.Struct, kw_only=True):
    """One KV group of the model."""

    kind: str
    window: int
    num_layers: int
    bytes_per_token: int
    slot_bytes: int = 0


class Examination(msgspec.Struct, kw_only=True):
    """The machine, and the plan for one model on it. Rates are per second; None where not
    measured."""

    processor: str
    num_cores: int
    num_threads: int
    total_bytes: int
    free_bytes: int
    cache_bytes: int
    instruction_sets: list[str]
    gpu: str | None
    gpu_bytes: int | None
    datasheet: DataSheetRow | None
    cores: CoreUse | None
    bandwidth_bytes_per_s: float | None
    kernel_flops_per_s: float | None
    kernel_dtype: str
    flops_per_s: dict[str, float]
    native: str
    native_why: str
    kernels: list[ExplainedValue]
    model: str
    architecture: str
    plan: list[ExplainedValue]
    kv_groups: list[KVGroupReport]
    weight_bytes: int
    step_weight_bytes: int
    decode_floor_s: float | None
    prefill_floor_s_per_1000: float | None


def examine(
    folder: Path, options: EngineOptions, *, budget_s: float, accelerators: str = ""
) -> Examination:
    """Measure the machine and plan the model; raise HeadwayError."""
    sheets = read_sheets(accelerators) if accelerators else []
    watch = CoreWatch(SystemClock().now_s, max_seconds=600)
    watch.sample()
    measured = examine_machine(folder, options, budget_s)
    cores = watch.sample()
    spec, machine, ceilings = measured.spec, measured.machine, measured.ceilings
    settings, gpu = measured.settings, machine.accelerator
    dtype = settings.dtype
    share = bytes_per_weight(settings.quantization, spec, dtype) / DTYPE_BYTES[dtype] or 1.0
    weights = round(spec.step_weight_bytes(dtype) * share)
    bandwidth = ceilings.bandwidth_bytes_per_s or None
    flops = ceilings.flops_per_s or None
    sheet = find_sheet(gpu.name, sheets, gpu.total_bytes / 1e9) if gpu else None
    return Examination(
        processor=measured.processor,
        num_cores=machine.num_cores,
        num_threads=settings.threads,
        total_bytes=machine.total_bytes,
        free_bytes=machine.free_bytes,
        cache_bytes=ceilings.cache_bytes,
        instruction_sets=[name for name in INSTRUCTION_SETS if name in machine.cpu_flags],
        gpu=gpu.name if gpu else None,
        gpu_bytes=gpu.total_bytes if gpu else None,
        datasheet=sheet,
        cores=cores,
        bandwidth_bytes_per_s=bandwidth,
        kernel_flops_per_s=flops,
        kernel_dtype=ceilings.flops_dtype,
        flops_per_s=measured.flops_per_s,
        native=machine.native,
        native_why=machine.native_why,
        kernels=[
            ExplainedValue(name=n, value=c, why=w) for n, (c, w) in sorted(measured.kernels.items())
        ],
        model=folder.name,
        architecture=spec.architecture,
        plan=[ExplainedValue(name=r.name, value=r.value, why=r.why) for r in measured.reasons],
        kv_groups=[kv_group_report(group, settings.cache.dtype) for group in spec.kv_groups],
        weight_bytes=planned_bytes(settings.quantization, spec, dtype)
        if settings.quantization.rounded
        else spec.weight_bytes(dtype),
        step_weight_bytes=weights,
        decode_floor_s=weights / bandwidth if bandwidth else None,
        prefill_floor_s_per_1000=spec.flops(1000, 500, 1) / flops if flops else None,
    )


def kv_group_report(group: KVGroupSpec, kv_dtype: str) -> KVGroupReport:
    """Return the figures of a KV group."""
    return KVGroupReport(
        kind=group.kind,
        window=group.window,
        num_layers=len(group.layers),
        bytes_per_token=group.bytes_per_token(kv_dtype),
        slot_bytes=group.slot_bytes,
    )


def show_machine(report: Examination, console: Console, machine_only: bool = False) -> None:
    """Print verdict, machine, kernels and plan; with `machine_only` machine and kernels."""
    if not machine_only:
        console.print(f"[bold]{verdict(report)}[/]", highlight=False)
        console.print()
    machine = plain_table("machine", " ", " ")
    for row in machine_rows(report):
        machine.add_row(*row)
    console.print(machine, highlight=False)
    console.print()
    for title, rows in (
        ("kernels", report.kernels),
        ("plan", [] if machine_only else report.plan),
    ):
        if not rows:
            continue
        table = plain_table(title, " ", "why")
        for each in rows:
            table.add_row(each.name, each.value, f"[dim]{each.why}[/]")
        if title == "plan":
            for i, group in enumerate(report.kv_groups):
                size = f"{gib(group.bytes_per_token)} a token"
                if group.slot_bytes:
                    size = f"{gib(group.slot_bytes)} a sequence"
                kind = f"window of {group.window}" if group.kind == "window" else group.kind
                table.add_row(f"kv_group {i}", size, f"[dim]{group.num_layers} layers, {kind}[/]")
        console.print(table, highlight=False)
        console.print()


def verdict(report: Examination) -> str:
    """Return the least time of a token and of a prompt of 1,000 tokens, as a sentence."""
    name = (
        f"{report.model} ({report.architecture}) on {report.gpu or report.processor or 'this CPU'}"
    )
    if report.decode_floor_s is None or report.prefill_floor_s_per_1000 is None:
        return f"{name}: not measured (--probe-seconds)"
    if report.step_weight_bytes < 2 * report.cache_bytes:
        return (
            f"{name}: the weights ({gib(report.step_weight_bytes)}) stay in the cache; small steps "
            "are bound by the host"
        )
    return (
        f"{name}: a token takes at least {duration(report.decode_floor_s)} "
        f"({gib(report.step_weight_bytes)} of weights at the measured bandwidth), a prompt of "
        f"1,000 tokens at least {duration(report.prefill_floor_s_per_1000)}"
    )


def machine_rows(report: Examination) -> list[tuple[str, str, str]]:
    """Return (name, figure, remark) of each property of the machine."""
    rows = [
        ("processor", report.processor or "–", f"{report.num_cores} cores"),
        ("memory", f"{gib(report.free_bytes)} free", f"of {gib(report.total_bytes)}"),
        ("instruction sets", " ".join(report.instruction_sets) or "–", ""),
        ("last-level cache", gib(report.cache_bytes), ""),
    ]
    sheet = report.datasheet
    if report.gpu:
        rows.append(("GPU", report.gpu, gib(report.gpu_bytes or 0)))
    rows.append(("native kernels", report.native or "none", report.native_why))
    rows.append(("measured with", plural(report.num_threads, "thread"), ""))
    others_share = report.cores.others_share + report.cores.steal_share if report.cores else 0.0
    if others_share > MAX_OTHERS_SHARE:
        remark = "the figures below are of a machine in use: measure again when it is idle"
        rows.append(("other processes", f"{percent(others_share)} of the cores' time", remark))
    if report.bandwidth_bytes_per_s:
        datasheet_text = format_datasheet(sheet.bandwidth_gb_per_s, 1e9, "B/s") if sheet else ""
        rows.append(("read", rate(report.bandwidth_bytes_per_s, "B/s"), datasheet_text))
    for name, flops in report.flops_per_s.items():
        unit, figure = ("OP/s", "int8_tops") if name == "int8" else ("FLOP/s", "bf16_tflops")
        datasheet_text = ""
        if sheet and name in ("int8", "bfloat16"):
            datasheet_text = format_datasheet(getattr(sheet, figure), 1e12, unit)
        rows.append((f"multiply {name}", rate(flops, unit), datasheet_text))
    if report.kernel_flops_per_s:
        text = f"the linear kernel, in {report.kernel_dtype}"
        rows.append(("multiply, as used", rate(report.kernel_flops_per_s, "FLOP/s"), text))
    if sheet:
        rows.append(("datasheet", sheet.name, f"{sheet.memory_gb or 0:g} GB"))
    elif report.gpu:
        rows.append(("datasheet", "–", "give a file with --accelerators"))
    return rows


def format_datasheet(value: float | None, factor: float, unit: str) -> str:
    return f"datasheet {rate(value * factor, unit)}" if value else ""
