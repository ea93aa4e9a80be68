"""Candidate machines: this one, a calibrated one, or a row of a datasheet.

The table is the project's own: dense figures of makers, memory in GB and bandwidth in GB/s as
printed, prices of an hour as read on their date. Sources: ai-dynamo/aiconfigurator at 095f58a
(systems/*.yaml, for all but the L40S's), NVIDIA's datasheet of the L40S; prices: RunPod secure
cloud and others as collected by datareceipts/data-receipts (read 2026-11-09), Lambda and Akash
(2026-09-20). `FILE.csv:NAME` takes a row of another sheet (`advise.accelerators`).
"""

from dataclasses import dataclass, replace
from pathlib import Path

from headway.advise.simulate.machine import SimulatedMachine, build_machine, roofline_machine
from headway.config.options import EngineOptions
from headway.config.options.plan import PlanOptions
from headway.config.options.simulate import SimulateOptions
from headway.config.resolve import Settings, resolve
from headway.core.errors import CapacityError, HeadwayError, UsageError
from headway.core.machine import Accelerator, probe_machine
from headway.core.plan import Ceilings, Description
from headway.perf.roofline import DataSheetRow, read_sheets
from headway.spec import ModelSpec, read_model_spec

PRICES_READ = "2026-11-09"
COLUMNS = ("name", "memory", "bandwidth", "bf16 TFLOP/s", "W", "USD/h")
TABLE: tuple[tuple[str, float, float, float, float | None, float | None], ...] = (
    ("A100-SXM4-80GB", 80, 2039, 312, 400, 1.79),
    ("A100-PCIe-80GB", 80, 1935, 312, 300, 1.79),
    ("H100-SXM5-80GB", 80, 3350, 989.4, 700, 3.99),
    ("H100-PCIe-80GB", 80, 2000, 756.5, 350, 2.89),
    ("H200-SXM-141GB", 141, 4800, 989.4, 700, 4.59),
    ("B200-SXM-180GB", 180, 7700, 2250, 1000, 6.69),
    ("L4", 24, 300, 121, 72, None),
    ("L40S", 48, 864, 362.05, 350, 0.94),
)
TENSOR_DEGREES = (1, 2, 4, 8)
PIPELINE_DEGREES = (1, 2, 4)
LINK_BYTES_PER_S = 300e9
"""Between devices of a server, each way: NVLink of four generations has 300e9 to 900e9."""
ALL_REDUCE_S = 1e-5
"""Least seconds of one all-reduce over devices."""
STAGE_HOP_S = 2e-5


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineCandidate:
    """One way to serve: a machine, the number of its devices in a server, and the weights'
    format."""

    name: str
    weights: str
    machinery: SimulatedMachine
    tensor: int = 1
    pipeline: int = 1
    usd_per_hour: float | None = None
    watts: float | None = None

    @property
    def devices(self) -> int:
        return self.tensor * self.pipeline


@dataclass(frozen=True, slots=True, kw_only=True)
class RefusedMachine:
    """A machine that cannot serve, and the reason."""

    name: str
    why: str


def find_candidates(
    folder: Path, options: PlanOptions, engine: EngineOptions, longest: int
) -> tuple[list[MachineCandidate], list[RefusedMachine]]:
    """Return every machine of the options, in every format, that holds `longest` tokens."""
    prices = read_prices(options.price)
    usable: list[MachineCandidate] = []
    refused: list[RefusedMachine] = []
    spec = read_model_spec(folder)
    for name in options.machines:
        for weights in options.formats:
            variant = replace(engine, quantization=weights)
            try:
                usable_one = build_candidate(folder, spec, name, options, variant, longest, prices)
            except HeadwayError as error:
                if isinstance(error, UsageError) and name not in machine_names(options.machines):
                    raise
                refused.append(RefusedMachine(name=f"{name}, {weights}", why=error.cause))
            else:
                usable.append(usable_one)
    return usable, refused


def machine_names(machines: list[str]) -> set[str]:
    """Return those of these names that are machines, whatever else may be wrong with them."""
    rows = {row[0] for row in TABLE}
    return {m for m in machines if m == "here" or m in rows or m.endswith(".json") or ".csv:" in m}


def read_prices(texts: list[str]) -> dict[str, float]:
    """Parse NAME=USD an hour."""
    prices = {}
    for text in texts:
        name, _, value = text.rpartition("=")
        try:
            price = float(value)
        except ValueError:
            price = -1.0
        if not name or not 0 <= price < 1e6:
            raise UsageError(f"--price: {text!r} is no price.", "Write H100-SXM5-80GB=3.2.")
        prices[name] = price
    return prices


def build_candidate(
    folder: Path,
    spec: ModelSpec,
    name: str,
    options: PlanOptions,
    engine: EngineOptions,
    longest: int,
    prices: dict[str, float],
) -> MachineCandidate:
    """Return the machine of this name in one format; raise HeadwayError where it cannot serve."""
    if name == "here" or name.endswith(".json"):
        path = options.calibration if name == "here" else name
        simulated = SimulateOptions(calibration=path, transfer=engine.quantization != "none")
        machine = build_machine(folder, simulated, engine)
        if machine.settings.max_model_len < longest:
            raise UsageError(
                f"A request of {longest:,} tokens does not fit: {machine.settings.max_model_len:,} "
                "do."
            )
        return MachineCandidate(
            name=name,
            weights=engine.quantization,
            machinery=machine,
            usd_per_hour=prices.get(name),
        )
    sheet, watts = find_sheet(name)
    for stages in PIPELINE_DEGREES:
        for degree in TENSOR_DEGREES if stages == 1 else TENSOR_DEGREES[-1:]:
            settings = settings_for_devices(spec, engine, sheet, degree * stages)
            if settings is not None and settings.max_model_len >= longest:
                machine = datasheet_machine(folder, spec, settings, sheet, degree, stages)
                price = prices.get(name, sheet.usd_per_hour)
                return MachineCandidate(
                    name=sheet.name,
                    weights=engine.quantization,
                    machinery=machine,
                    tensor=degree,
                    pipeline=stages,
                    usd_per_hour=None if price is None else price * degree * stages,
                    watts=None if watts is None else watts * degree * stages,
                )
    most = TENSOR_DEGREES[-1] * PIPELINE_DEGREES[-1]
    raise UsageError(f"{sheet.name}: not even {most} of them hold the weights and one request.")


def find_sheet(name: str) -> tuple[DataSheetRow, float | None]:
    """Return the datasheet's row, and its watts where known; UsageError where a figure is
    missing."""
    path, _, row_name = name.rpartition(":")
    if path:
        sheets = {sheet.name: sheet for sheet in read_sheets(path)}
        if row_name not in sheets:
            raise UsageError(f"{path} has no {row_name!r}.", f"It has {', '.join(sheets)}.")
        sheet, watts = sheets[row_name], None
    else:
        row = next((row for row in TABLE if row[0] == name), None)
        if row is None:
            rows = ", ".join(row[0] for row in TABLE)
            raise UsageError(
                f"--machines: there is no machine {name!r}.",
                f"There are here, {rows}, calibrations as FILE.json, rows as FILE.csv:NAME.",
            )
        sheet = DataSheetRow(
            name=row[0],
            memory_gb=row[1],
            bandwidth_gb_per_s=row[2],
            bf16_tflops=row[3],
            fp8_tflops=None,
            int8_tops=None,
            usd_per_hour=row[5],
        )
        watts = row[4]
    if not sheet.bandwidth_gb_per_s or not sheet.bf16_tflops or not sheet.memory_gb:
        raise UsageError(
            f"{sheet.name}: its memory, bandwidth or bf16 TFLOP/s are not known.",
            "Add them to the sheet.",
        )
    return sheet, watts


def settings_for_devices(
    spec: ModelSpec, engine: EngineOptions, sheet: DataSheetRow, devices: int
) -> Settings | None:
    """Return the settings with the memory of `devices` devices; None where the weights do not
    fit."""
    assert sheet.memory_gb is not None
    memory = int(sheet.memory_gb * 1e9 * devices)
    accelerator = Accelerator(name=sheet.name, total_bytes=memory, free_bytes=memory)
    machine = probe_machine(accelerator)
    options = replace(engine, device="cuda", attention_backend="auto", kernels="auto")
    try:
        return resolve(options, machine, spec)[0]
    except CapacityError:
        return None


def datasheet_machine(
    folder: Path, spec: ModelSpec, settings: Settings, sheet: DataSheetRow, degree: int, stages: int
) -> SimulatedMachine:
    """Return a machine by its datasheet.

    Tensor parallel devices share bytes and FLOPs and all-reduce twice a layer; stages of a pipeline
    hold a part of the layers each and hand over activations: they add memory, not speed.
    """
    assert sheet.bandwidth_gb_per_s is not None and sheet.bf16_tflops is not None
    description = Description(
        device="cuda",
        name=sheet.name,
        ceilings=Ceilings(
            bandwidth_bytes_per_s=sheet.bandwidth_gb_per_s * 1e9 * degree,
            flops_per_s=sheet.bf16_tflops * 1e12 * degree,
            flops_dtype="bfloat16",
        ),
    )
    machine = roofline_machine(folder, spec, settings, description)
    if degree * stages > 1 and machine.ends is not None:
        sent = 2 * spec.hidden_size * 2 * (degree - 1) / degree * 2 * spec.num_layers
        waits_s = 2 * spec.num_layers * ALL_REDUCE_S * (degree > 1) + STAGE_HOP_S * (stages - 1)
        best, worst = (
            replace(
                end,
                fixed_s=end.fixed_s + waits_s,
                token_link_s=sent / LINK_BYTES_PER_S,
            )
            for end in machine.ends
        )
        machine.ends = best, worst
    return machine
