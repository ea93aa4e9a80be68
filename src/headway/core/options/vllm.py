"""The options of vLLM 0.33, by its names: each is one of ours, holds here anyway, or is refused.

An option that means the same has the same name in `tables`, and no row here. A `Word` says our
name for one that has another, with vLLM's units (`swap_space` counts GiB). A `Given` says what
always holds: `--data-parallel-size 1` passes, 2 is refused. All others are refused by name, so
that nothing that was asked for is dropped. `docs/options.md` has the table.
"""

import dataclasses
import json
from collections.abc import Callable, Mapping
from typing import Any

from headway.core.errors import UsageError
from headway.core.options.field import FALSE, TRUE, flag_name
from headway.core.options.vllm_speculation import speculation


def unchanged(text: str) -> str:
    """Our option reads the same text."""
    return text


def gibibytes(text: str) -> str:
    """ "4" → "4GiB"."""
    return f"{text}GiB"


def opposite(text: str) -> str:
    """ "true" → "false"."""
    return "false" if text.lower() in TRUE else "true" if text.lower() in FALSE else text


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Word:
    """vLLM's `name` is our option `ours`; `convert` makes our text of its, `switch` needs none.

    Where a verb or `LLM` has no such option, what is in `holds` is true there anyway.
    """

    name: str
    ours: str
    convert: Callable[[str], str] = unchanged
    switch: bool = False
    note: str = ""
    holds: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """The options `names` have one of `values` here, always: others are refused with `fix`."""

    names: str
    values: tuple[str, ...]
    fix: str
    switch: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """The options `names` mean nothing here; `fix` says what does."""

    names: str
    fix: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Together:
    """The options `names` say together what some of ours say; `read` makes those of them."""

    names: str
    ours: tuple[str, ...]
    read: Callable[[Mapping[str, Any], Callable[[str], str]], dict[str, str]]
    note: str


NO, YES = ("false",), ("true",)
WORDS = (
    Word(name="enable_prefix_caching", ours="prefix_cache", switch=True),
    Word(name="scheduling_policy", ours="policy", note="fcfs and priority mean the same"),
    Word(name="swap_space", ours="kv_host_memory", convert=gibibytes, note="GiB"),
    Word(name="kv_cache_memory_bytes", ours="kv_memory"),
    Word(name="max_num_queued_reqs", ours="max_queue"),
    Word(name="otlp_traces_endpoint", ours="otlp_endpoint", note="over HTTP"),
    Word(name="shutdown_timeout", ours="drain_timeout"),
    Word(name="uvicorn_log_level", ours="log_level"),
    Word(
        name="enforce_eager",
        ours="graphs",
        switch=True,
        convert=opposite,
        note="on a CPU every step is eager",
    ),
    Word(name="enable_log_requests", ours="log_requests", switch=True),
    Word(
        name="disable_log_requests",
        ours="log_requests",
        switch=True,
        convert=opposite,
        holds=YES,
    ),
    Word(name="disable_log_stats", ours="log_stats", switch=True, convert=opposite, holds=YES),
)
GIVEN = (
    Given(
        names="data_parallel_size nnodes prefill_context_parallel_size api_server_count",
        values=("1",),
        fix="One machine serves a model here, by ranks of --tensor-parallel-size, "
        "--pipeline-parallel-size or --decode-context-parallel-size: give 1.",
    ),
    Given(
        names="enable_chunked_prefill",
        values=YES,
        switch=True,
        fix="Prompts are always computed in chunks; --max-num-batched-tokens bounds them.",
    ),
    Given(
        names="trust_remote_code",
        values=NO,
        switch=True,
        fix="Code from a model's folder is never run. Leave it out: the architectures that are "
        "served need none.",
    ),
    Given(
        names="enable_auto_tool_choice",
        values=YES,
        switch=True,
        fix='Tools are always on offer to the model; a request says tool_choice: "none".',
    ),
    Given(
        names="enable_prompt_tokens_details disable_uvicorn_access_log",
        values=YES,
        switch=True,
        fix="It is always so here.",
    ),
    Given(
        names="enable_lora enable_sleep_mode enable_expert_parallel enable_dbo enable_eplb "
        "async_scheduling disable_sliding_window enable_prompt_embeds enable_log_outputs "
        "return_tokens_as_token_ids exclude_tools_when_tool_choice_none headless "
        "disable_hybrid_kv_cache_manager enable_force_include_usage kv_cache_metrics "
        "disable_cascade_attn enable_return_routed_experts allow_credentials "
        "enable_request_id_headers disable_fastapi_docs disable_chunked_mm_input",
        values=NO,
        switch=True,
        fix="This version has no such thing: give false, or leave it out.",
    ),
    Given(names="runner", values=("auto", "generate"), fix="Models generate text here."),
    Given(names="task", values=("auto", "generate"), fix="Models generate text here."),
    Given(names="convert", values=("auto", "none"), fix="Models are served as they are."),
    Given(names="tokenizer_mode", values=("auto", "hf"), fix="Tokenizers are tokenizer.json."),
    Given(names="model_impl", values=("auto",), fix="Each architecture has one implementation."),
    Given(names="config_format", values=("auto", "hf"), fix="Folders have a config.json."),
    Given(
        names="generation_config",
        values=("auto",),
        fix="The folder's generation_config.json gives the defaults; a request overrides them.",
    ),
    Given(
        names="chat_template_content_format",
        values=("auto",),
        fix="It goes by the chat template.",
    ),
    Given(names="response_role", values=("assistant",), fix="Answers are the assistant's."),
    Given(names="cpu_offload_gb", values=("0", "0.0"), fix="Weights stay where they compute."),
    Given(
        names="guided_decoding_backend",
        values=("auto", "guidance"),
        fix="llguidance makes the grammars.",
    ),
    Given(names="stream_interval", values=("1",), fix="Each token leaves when it is there."),
)
REFUSED = (
    Refused(names="model", fix="Give the folder as the first argument: headway serve FOLDER."),
    Refused(
        names="reasoning_parser reasoning_parser_plugin reasoning_config",
        fix="Reasoning is told apart by the model's chat template: leave it out.",
    ),
    Refused(
        names="revision code_revision tokenizer_revision download_dir hf_token",
        fix="Fetch the model first: headway pull ORG/NAME --revision …; then serve its folder.",
    ),
    Refused(
        names="hf_overrides hf_config_path override_generation_config quantization_config",
        fix="Edit a copy of the folder's config.json or generation_config.json.",
    ),
    Refused(names="num_gpu_blocks_override", fix="Say how much memory: --kv-memory 4GiB, or 40%."),
    Refused(
        names="kv_offloading_size kv_offloading_backend kv_transfer_config",
        fix="KV blocks are copied to --kv-host-memory, and kept on a disk by --kv-disk.",
    ),
    Refused(
        names="long_prefill_token_threshold max_num_partial_prefills "
        "max_long_partial_prefills max_num_scheduled_tokens",
        fix="--long-prefill says in seconds what is long, --max-num-batched-tokens bounds a step.",
    ),
    Refused(names="max_num_queued_tokens", fix="--max-queue-wait bounds the wait in seconds."),
    Refused(
        names="structured_outputs_config",
        fix="Structured output is always there, by llguidance.",
    ),
    Refused(
        names="limit_mm_per_prompt allowed_local_media_path allowed_media_domains "
        "mm_processor_kwargs mm_processor_cache_gb",
        fix="Models read text alone in this version.",
    ),
    Refused(
        names="lora_modules max_loras max_lora_rank max_cpu_loras",
        fix="There are no adapters in this version.",
    ),
    Refused(
        names="ssl_ca_certs ssl_cert_reqs ssl_ciphers",
        fix="Put a proxy that ends TLS in front; docs/deploy.md says how.",
    ),
    Refused(
        names="allowed_methods allowed_headers middleware grpc_port log_config_file max_log_len",
        fix="See --help=all for what the server has.",
    ),
    Refused(
        names="tool_parser_plugin logits_processors scheduler_cls worker_cls "
        "worker_extension_cls io_processor_plugin",
        fix="The server loads no code of others.",
    ),
    Refused(
        names="max_logprobs logprobs_mode",
        fix="A request may ask for 20 of the model's own log-probabilities.",
    ),
    Refused(
        names="compilation_config optimization_level cudagraph_capture_sizes "
        "max_cudagraph_capture_size distributed_executor_backend max_parallel_loading_workers "
        "kernel_config attention_config additional_config performance_mode moe_backend "
        "linear_backend",
        fix="Kernels are chosen by --kernels and --attention-backend; --dry-run says why.",
    ),
    Refused(
        names="show_hidden_metrics_for_version collect_detailed_traces custom_histogram_buckets "
        "enable_mfu_metrics profiler_config",
        fix="docs/telemetry.md has the metrics, MFU among them; they are always on.",
    ),
)
TOGETHER = (
    Together(
        names="speculative_config spec_method spec_model spec_tokens",
        ours=("speculate", "draft_model", "max_drafts"),
        read=speculation,
        note="the methods ngram, suffix, draft_model, medusa and eagle, and no keys but method, "
        "model and num_speculative_tokens: the most that is guessed",
    ),
)
VALUES = {"dtype": {"half": "float16", "float": "float32"}}
"""Our option → vLLM's words for some of its values."""

BY_NAME: dict[str, Word | Given | Refused | Together] = {
    **{word.name: word for word in WORDS},
    **{
        name: row
        for rows in (GIVEN, REFUSED, TOGETHER)
        for row in rows
        for name in row.names.split()
    },
}
SWITCHES = frozenset(name for name, row in BY_NAME.items() if getattr(row, "switch", False))


def translate(
    given: Mapping[str, Any], there: frozenset[str], spell: Callable[[str], str] = flag_name
) -> dict[str, Any]:
    """`given` with vLLM's names put into ours; `there` are the names of our own options.

    {"enable_prefix_caching": "false"} → {"prefix_cache": "false"}. `spell` writes a name as its
    user did. Raises UsageError for what is refused, and for one thing that is said twice.
    """
    found = {name: value for name, value in given.items() if name in there}
    for name, value in given.items():
        row = BY_NAME.get(name)
        if name in there or row is None:
            if name not in there:
                found[name] = value  # an unknown name is for the reader to refuse
            continue
        if isinstance(row, Together):
            continue
        ours = accept(name, row, str(value), there, spell)
        if ours is not None:
            add(found, ours, name, spell)
    for together in TOGETHER:
        said = {name: given[name] for name in together.names.split() if name in given}
        for ours in together.read(said, spell).items() if said else ():
            add(found, ours, next(iter(said)), spell)
    for name, words in VALUES.items():
        if isinstance(found.get(name), str):
            found[name] = words.get(found[name], found[name])
    return found


def add(
    found: dict[str, Any], ours: tuple[str, str], name: str, spell: Callable[[str], str]
) -> None:
    """Add (our name, our value) of vLLM's `name`; UsageError where it is there."""
    if ours[0] in found:
        raise UsageError(
            f"{spell(name)} is {spell(ours[0])} here, and both are given.",
            f"Keep {spell(ours[0])}.",
        )
    found[ours[0]] = ours[1]


def accept(
    name: str,
    row: Word | Given | Refused,
    value: str,
    there: frozenset[str],
    spell: Callable[[str], str],
) -> tuple[str, str] | None:
    """(our name, our value), None for what holds anyway; raises UsageError."""
    if isinstance(row, Word):
        if row.ours in there:
            return row.ours, row.convert(value)
        if value.lower() in row.holds:
            return None
        raise UsageError(
            f"There is no option {spell(name)} here.",
            f"Here and in headway serve it is called {spell(row.ours)}, and this has none.",
        )
    if isinstance(row, Given):
        if value.lower() in row.values:
            return None
        raise UsageError(f"{spell(name)} {value[:80]} is not served.", row.fix)
    raise UsageError(f"There is no option {spell(name)}.", row.fix)


def json_list(text: str) -> list[str] | None:
    """vLLM's lists are JSON as well: '["*"]' → ["*"]; None for what is none."""
    if not text.startswith("["):
        return None
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return [str(item) for item in found] if isinstance(found, list) else None
