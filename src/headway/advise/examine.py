"""What this machine and a model's plan are: `headway doctor` without a server.

`examine` asks `assemble` for it and keeps plain figures; `show_machine` prints them. A measured
ceiling stands beside the maker's where a datasheet is at hand.
"""

from pathlib import Path

import msgspec
from rich.console import Console

from headway.advise.show import plain
from headway.advise.words import duration, percent, plural, rate
from headway.assemble import examine_machine
from headway.config.memory_plan import gib
from headway.config.options import EngineOptions
from headway.core.clock import SystemClock
from headway.core.machine import MULTIPLY_FLAGS
from headway.perf.roofline import Sheet, read_sheets, sheet_of
from headway.spec import DTYPE_BYTES, KVGroupSpec
from headway.spec.quantization import bytes_per_weight, planned_bytes
from headway.telemetry.contention import CoreUse, CoreWatch

SETS = (
    *("sse4_2", "avx", "avx2", "fma", "f16c", "avx512f", "avx512_vnni", "avx_vnni"),
    *sorted(flag for flags in MULTIPLY_FLAGS.values() for flag in flags),
    *("amx_int8", "asimd", "sve", "i8mm", "bf16"),
)
"""Instruction sets that matter here, of x86 and ARM."""
FELT = 0.1
"""Of the cores' time while the machine was measured: more that others took is told."""


class Why(msgspec.Struct, kw_only=True):
    """A value, and why it is so."""

    name: str
    value: str
    why: str


class Group(msgspec.Struct, kw_only=True):
    """One KV group of the model."""

    kind: str
    window: int
    num_layers: int
    bytes_per_token: int
    slot_bytes: int = 0


class Examination(msgspec.Struct, kw_only=True):
    """The machine, and the plan for one model on it. Rates a second; None where not measured."""

    processor: str
    num_cores: int
    num_threads: int
    total_bytes: int
    free_bytes: int
    cache_bytes: int
    instruction_sets: list[str]
    gpu: str | None
    gpu_bytes: int | None
    datasheet: Sheet | None
    cores: CoreUse | None
    bandwidth_bytes_per_s: float | None
    kernel_flops_per_s: float | None
    kernel_dtype: str
    flops_per_s: dict[str, float]
    native: str
    native_why: str
    kernels: list[Why]
    model: str
    architecture: str
    plan: list[Why]
    kv_groups: list[Group]
    weight_bytes: int
    step_weight_bytes: int
    decode_floor_s: float | None
    prefill_floor_s_per_1000: float | None


def examine(
    folder: Path, options: EngineOptions, *, budget_s: float, accelerators: str = ""
) -> Examination:
    """Measure the machine and plan the model; raises HeadwayError."""
    sheets = read_sheets(accelerators) if accelerators else []
    watch = CoreWatch(SystemClock().now_s, max_seconds=600)
    watch.sample()
    found = examine_machine(folder, options, budget_s)
    cores = watch.sample()
    spec, machine, ceilings = found.spec, found.machine, found.ceilings
    settings, gpu = found.settings, machine.accelerator
    dtype = settings.dtype
    share = bytes_per_weight(settings.quantization, spec, dtype) / DTYPE_BYTES[dtype] or 1.0
    weights = round(spec.step_weight_bytes(dtype) * share)
    bandwidth = ceilings.bandwidth_bytes_per_s or None
    flops = ceilings.flops_per_s or None
    sheet = sheet_of(gpu.name, sheets, gpu.total_bytes / 1e9) if gpu else None
    return Examination(
        processor=found.processor,
        num_cores=machine.num_cores,
        num_threads=settings.threads,
        total_bytes=machine.total_bytes,
        free_bytes=machine.free_bytes,
        cache_bytes=ceilings.cache_bytes,
        instruction_sets=[name for name in SETS if name in machine.cpu_flags],
        gpu=gpu.name if gpu else None,
        gpu_bytes=gpu.total_bytes if gpu else None,
        datasheet=sheet,
        cores=cores,
        bandwidth_bytes_per_s=bandwidth,
        kernel_flops_per_s=flops,
        kernel_dtype=ceilings.flops_dtype,
        flops_per_s=found.flops_per_s,
        native=machine.native,
        native_why=machine.native_why,
        kernels=[Why(name=n, value=c, why=w) for n, (c, w) in sorted(found.kernels.items())],
        model=folder.name,
        architecture=spec.architecture,
        plan=[Why(name=r.name, value=r.value, why=r.why) for r in found.reasons],
        kv_groups=[group_of(group, settings.cache.dtype) for group in spec.kv_groups],
        weight_bytes=planned_bytes(settings.quantization, spec, dtype)
        if settings.quantization.rounded
        else spec.weight_bytes(dtype),
        step_weight_bytes=weights,
        decode_floor_s=weights / bandwidth if bandwidth else None,
        prefill_floor_s_per_1000=spec.flops(1000, 500, 1) / flops if flops else None,
    )


def group_of(group: KVGroupSpec, kv_dtype: str) -> Group:
    """A KV group as it is told."""
    return Group(
        kind=group.kind,
        window=group.window,
        num_layers=len(group.layers),
        bytes_per_token=group.bytes_per_token(kv_dtype),
        slot_bytes=group.slot_bytes,
    )


def show_machine(found: Examination, console: Console, alone: bool = False) -> None:
    """One screen: verdict, machine, kernels, plan; `alone`, machine and kernels."""
    if not alone:
        console.print(f"[bold]{verdict(found)}[/]", highlight=False)
        console.print()
    machine = plain("machine", " ", " ")
    for row in machine_rows(found):
        machine.add_row(*row)
    console.print(machine, highlight=False)
    console.print()
    for title, rows in (("kernels", found.kernels), ("plan", [] if alone else found.plan)):
        if not rows:
            continue
        table = plain(title, " ", "why")
        for each in rows:
            table.add_row(each.name, each.value, f"[dim]{each.why}[/]")
        if title == "plan":
            for i, group in enumerate(found.kv_groups):
                size = f"{gib(group.bytes_per_token)} a token"
                if group.slot_bytes:
                    size = f"{gib(group.slot_bytes)} a sequence"
                kind = f"window of {group.window}" if group.kind == "window" else group.kind
                table.add_row(f"kv_group {i}", size, f"[dim]{group.num_layers} layers, {kind}[/]")
        console.print(table, highlight=False)
        console.print()


def verdict(found: Examination) -> str:
    """What one user can get of this model here."""
    name = f"{found.model} ({found.architecture}) on {found.gpu or found.processor or 'this CPU'}"
    if found.decode_floor_s is None or found.prefill_floor_s_per_1000 is None:
        return f"{name}: not measured (--probe-seconds)"
    if found.step_weight_bytes < 2 * found.cache_bytes:
        return (
            f"{name}: the weights ({gib(found.step_weight_bytes)}) stay in the cache; small steps "
            "are bound by the host"
        )
    return (
        f"{name}: a token takes at least {duration(found.decode_floor_s)} "
        f"({gib(found.step_weight_bytes)} of weights at the measured bandwidth), a prompt of 1,000 "
        f"tokens at least {duration(found.prefill_floor_s_per_1000)}"
    )


def machine_rows(found: Examination) -> list[tuple[str, str, str]]:
    """Name, figure, remark."""
    rows = [
        ("processor", found.processor or "–", f"{found.num_cores} cores"),
        ("memory", f"{gib(found.free_bytes)} free", f"of {gib(found.total_bytes)}"),
        ("instruction sets", " ".join(found.instruction_sets) or "–", ""),
        ("last-level cache", gib(found.cache_bytes), ""),
    ]
    sheet = found.datasheet
    if found.gpu:
        rows.append(("GPU", found.gpu, gib(found.gpu_bytes or 0)))
    rows.append(("native kernels", found.native or "none", found.native_why))
    rows.append(("measured with", plural(found.num_threads, "thread"), ""))
    taken = found.cores.others_share + found.cores.steal_share if found.cores else 0.0
    if taken > FELT:
        remark = "the figures below are of a machine in use: measure again when it is idle"
        rows.append(("others meanwhile", f"{percent(taken)} of the cores' time", remark))
    if found.bandwidth_bytes_per_s:
        paper = paper_text(sheet.bandwidth_gb_per_s, 1e9, "B/s") if sheet else ""
        rows.append(("read", rate(found.bandwidth_bytes_per_s, "B/s"), paper))
    for name, flops in found.flops_per_s.items():
        unit, figure = ("OP/s", "int8_tops") if name == "int8" else ("FLOP/s", "bf16_tflops")
        paper = ""
        if sheet and name in ("int8", "bfloat16"):
            paper = paper_text(getattr(sheet, figure), 1e12, unit)
        rows.append((f"multiply {name}", rate(flops, unit), paper))
    if found.kernel_flops_per_s:
        text = f"the linear kernel, in {found.kernel_dtype}"
        rows.append(("multiply, as we do", rate(found.kernel_flops_per_s, "FLOP/s"), text))
    if sheet:
        rows.append(("datasheet", sheet.name, f"{sheet.memory_gb or 0:g} GB"))
    elif found.gpu:
        rows.append(("datasheet", "–", "give a file with --accelerators"))
    return rows


def paper_text(value: float | None, factor: float, unit: str) -> str:
    return f"datasheet {rate(value * factor, unit)}" if value else ""
