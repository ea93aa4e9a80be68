"""Writes docs/options.md from the option tables: `python -m headway.config.options.reference`."""

import dataclasses
import sys
from collections.abc import Iterable
from pathlib import Path

from headway.config.options import vllm
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
from headway.config.options.field import environment_name, flag_name, value_type
from headway.config.options.gate import GateOptions
from headway.config.options.gateway import GatewayOptions, SpendOptions
from headway.config.options.plan import PlanOptions
from headway.config.options.prune import PruneOptions
from headway.config.options.quantize import QuantizeOptions
from headway.config.options.read import format_value
from headway.config.options.renamed import LAST_VERSION, RENAMED_OPTIONS
from headway.config.options.rollout import RolloutOptions
from headway.config.options.simulate import SimulateOptions
from headway.config.options.tables import (
    EngineOptions,
    LogOptions,
    SamplingOptions,
    ServerOptions,
)
from headway.config.options.tune import TuneOptions

INTRODUCTION = """# Options

Written from the tables of `config/options` by `python -m headway.config.options.reference`; edit
those.

Each option is a flag, an environment variable and a key of the `--config` YAML file (the flag's
name, with `_` or `-`). A flag wins over the environment, that over the file, that over the default.
Where the default is "derived", `--dry-run` shows the value with its reason.
"""


def reference() -> str:
    """The page's text."""
    parts = [INTRODUCTION]
    for table in TITLES:
        parts.append(
            f"## {TITLES[table]}\n\n| flag | type | default | |\n| --- | --- | --- | --- |"
        )
        parts.extend(row(table, field) for field in dataclasses.fields(table))
        parts.append("")
    return "\n".join([*parts, *renamed_table(), *from_vllm()])


RENAMED = f"""## Renamed options

The old name works in {LAST_VERSION} as a flag, a key, a variable and an argument of `LLM`, with a
line of warning.

| old name | name |
| --- | --- |
"""


def renamed_table() -> list[str]:
    """The table of renamed options, with the words of their values that changed."""
    lines = []
    for row in RENAMED_OPTIONS:
        words = ", ".join(f"`{old}` is `{new}`" for old, new in row.values.items())
        name = f"`{flag_name(row.new)}`{words and f': {words}'}"
        lines.append(f"| `{flag_name(row.old)}` | {name} |")
    return [RENAMED + "\n".join(lines), ""]


FROM_VLLM = """## Options of vLLM

Flags of vLLM (0.33) work in `headway serve` and in `headway.LLM(...)`: one that means the same has
the same name, spelled with `-` or `_`, and `--enable-x` has its `--no-enable-x`. What a flag asks
for is honoured or refused, never dropped.

| of vLLM | here |
| --- | --- |
"""
NOT_HERE = """
A flag of vLLM that is not in this table is an unknown option. What serves in its place:

| of vLLM | use |
| --- | --- |
"""
IN_PLACE = {
    "model": "the first argument: `headway serve FOLDER`",
    "revision code_revision tokenizer_revision download_dir hf_token": "`headway pull ORG/NAME "
    "--revision …`, then serve the folder",
    "hf_overrides override_generation_config quantization_config": "a copy of the folder with "
    "another `config.json` or `generation_config.json`",
    "reasoning_parser structured_outputs_config": "nothing: the chat template says how reasoning "
    "is marked; structured output is always there",
    "num_gpu_blocks_override": "`--kv-memory 4GiB`, or `40%`",
    "kv_offloading_size kv_transfer_config": "`--kv-host-memory`, `--kv-disk`",
    "long_prefill_token_threshold max_num_partial_prefills max_num_scheduled_tokens": "`--long-"
    "prefill` (seconds), `--max-num-batched-tokens`",
    "max_num_queued_tokens": "`--max-queue-wait` (seconds)",
    "compilation_config cudagraph_capture_sizes attention_config": "`--kernels`, "
    "`--attention-backend`; `--dry-run` says why",
    "ssl_ca_certs ssl_cert_reqs ssl_ciphers": "a proxy that ends TLS: [deploy](deploy.md)",
    "max_logprobs": "nothing: a request may ask for 20",
    "lora_modules limit_mm_per_prompt tool_parser_plugin logits_processors": "nothing: there are "
    "no adapters, models read text, the server loads no code of others",
    "collect_detailed_traces show_hidden_metrics_for_version": "nothing: all "
    "[metrics](telemetry.md) are on",
}
"""Flags of vLLM that are not here, and what to use."""
SAME = (
    *("served_model_name", "dtype", "seed", "max_model_len", "max_num_seqs"),
    *("max_num_batched_tokens", "block_size", "gpu_memory_utilization", "kv_cache_dtype"),
    "kv_cache_dtype_skip_layers",
    *("quantization", "load_format", "tokenizer", "skip_tokenizer_init", "chat_template"),
    *("attention_backend", "tool_call_parser", "host", "port", "api_key", "allowed_origins"),
)
"""Options with vLLM's name and meaning; of some it has other values."""


def from_vllm() -> list[str]:
    """The table of vLLM's options, from the rows that read them."""
    lines = [f"| {listed(SAME)} | the same name |"]
    for word in vllm.WORDS:
        meaning = f"`{flag_name(word.ours)}`"
        if word.convert is vllm.opposite:
            meaning = f"the opposite of {meaning}"
        lines.append(f"| {listed([word.name])} | {meaning}{word.note and f', {word.note}'} |")
    for row in vllm.TOGETHER:
        lines.append(f"| {listed(row.names.split())} | {listed(row.ours)}; {row.note} |")
    for given in vllm.GIVEN:
        values = " or ".join(f"`{value}`" for value in given.values)
        lines.append(f"| {listed(given.names.split())} | {values} alone |")
    missing = [f"| {listed(names.split())} | {use} |" for names, use in IN_PLACE.items()]
    return [FROM_VLLM + "\n".join(lines), NOT_HERE + "\n".join(missing), ""]


def listed(names: Iterable[str]) -> str:
    """`--a`, `--b`"""
    return ", ".join(f"`{flag_name(name)}`" for name in names)


TITLES: dict[type, str] = {
    ServerOptions: "Server (`serve`)",
    GatewayOptions: "Gateway (`gateway`)",
    SpendOptions: "Spending (`gateway spend`)",
    CalibrateOptions: "Evidence of a cascade (`gateway calibrate`)",
    DriftOptions: "Upstreams compared (`gateway drift`)",
    RolloutOptions: "A new version of a model (`gateway rollout`)",
    LogOptions: "Log (`serve`, `gateway`)",
    EngineOptions: "Engine (`serve`, `run`, `chat`, `headway.LLM`)",
    SamplingOptions: "Sampling (`run`, `chat`)",
    BatchOptions: "Batch without a server (`batch`)",
    KeyOptions: "A new API key (`key`)",
    PlaceOptions: "Which model goes on which machine (`plan --place`)",
    BenchOptions: "Load generator (`bench`)",
    SimulateOptions: "Simulation (`headway simulate`), beside those of bench and the engine",
    TuneOptions: "Tuning (`headway tune`), beside those of bench and the engine",
    PlanOptions: "Planner (`headway plan`), beside those of bench and the engine",
    EvalOptions: "Evaluation (`eval`)",
    AgainstOptions: "The model of `eval --against` (`eval`)",
    DoctorOptions: "Doctor (`doctor`)",
    TraceOptions: "Trace (`doctor --trace`)",
    PruneOptions: "Pruning (`prune`)",
    DistillOptions: "Distillation (`distill`)",
    QuantizeOptions: "Quantization (`quantize`)",
    GateOptions: "Gate of what is written (`prune`, `distill`, `quantize`)",
    LaunchOptions: "Coding agents (`launch`)",
    PullOptions: "Hub (`pull`)",
}


def row(table: type, field: "dataclasses.Field[object]") -> str:
    """One line of the table."""
    kind, many = value_type(table, field.name)
    rules = field.metadata
    type_name = "flag" if kind is bool else (rules["unit"] or kind.__name__.lower())
    if many and not type_name.endswith("s"):
        type_name += "s"
    if rules["choices"]:
        type_name = " \\| ".join(rules["choices"])
    default = "derived" if field.default is None else ""
    if field.default not in (dataclasses.MISSING, None, "", False):
        default = format_value(field.default)
    name = f"`{flag_name(field.name)}`<br>`{environment_name(field.name)}`"
    return f"| {name} | {type_name} | {default} | {rules['help']} |"


if __name__ == "__main__":
    target = Path(sys.argv[1] if len(sys.argv) > 1 else "docs/options.md")
    target.write_text(reference(), encoding="utf-8")
