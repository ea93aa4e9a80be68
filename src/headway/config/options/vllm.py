"""The options of vLLM 0.33, by its names, that are one of ours or hold here anyway.

An option that means the same has the same name in `tables`, and no row here. A `Word` says our
name for one that has another, with vLLM's units (`swap_space` counts GiB). A `Given` says what
always holds: `--data-parallel-size 1` passes, 2 is refused. All others are unknown options.
`docs/options.md` has the table, and what serves in place of those that are not here.
"""

import dataclasses
import json
from collections.abc import Callable, Mapping
from typing import Any

from headway.config.options.field import FALSE, TRUE, flag_name
from headway.core.errors import UsageError


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
    """The options `names` have one of `values` here, always: other values are refused."""

    names: str
    values: tuple[str, ...]
    switch: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Together:
    """The options `names` say together what some of ours say; `read` makes those of them."""

    names: str
    ours: tuple[str, ...]
    read: Callable[[Mapping[str, Any], Callable[[str], str]], dict[str, str]]
    note: str


SPECULATIVE_METHODS = {
    "ngram": "ngram",
    "suffix": "ngram,suffix",
    "draft_model": "draft",
    "medusa": "medusa",
    "eagle": "eagle",
}
"""vLLM's method → `--speculative-method`; its suffix decoding looks into the prompt as well."""
SHORT_OPTIONS = {
    "spec_method": "method",
    "spec_model": "model",
    "spec_tokens": "num_speculative_tokens",
}
"""vLLM's short options → their key of the object."""
FIXED_KEYS = {"draft_tensor_parallel_size": 1}
"""Keys that have one value here."""
SPECULATIVE_CONFIG = "speculative_config"


def translate_speculation(given: Mapping[str, Any], spell: Callable[[str], str]) -> dict[str, str]:
    """Return our options for vLLM's of speculation: one JSON object, or three short ones.

    vLLM verifies `num_speculative_tokens` in every step; here they are the most, and fewer are
    verified where more would not pay. `spell` writes a name as its user did.

    >>> translate_speculation({"spec_method": "ngram", "spec_tokens": 4}, str)
    {'speculative_method': 'ngram', 'num_speculative_tokens': '4'}
    """
    config = {}
    if SPECULATIVE_CONFIG in given:
        config = parse_speculative_config(given[SPECULATIVE_CONFIG], spell(SPECULATIVE_CONFIG))
    for name, key in SHORT_OPTIONS.items():
        if name in given and key in config:
            raise UsageError(
                f"{spell(name)} and {key} in {spell(SPECULATIVE_CONFIG)} are both given.",
                "Keep one of them.",
            )
        if name in given:
            config[key] = given[name]
    return convert_speculation(config, spell(SPECULATIVE_CONFIG))


def parse_speculative_config(value: Any, name: str) -> dict[str, Any]:
    """Return the object that a flag writes as JSON, and YAML as itself, without null values."""
    document = value
    if isinstance(value, str):
        try:
            document = json.loads(value)
        except (ValueError, RecursionError):
            document = None
    if not isinstance(document, dict):
        raise UsageError(
            f"{name} is no JSON object.", 'Write {"method": "ngram", "num_speculative_tokens": 5}.'
        )
    return {key: each for key, each in document.items() if each is not None}


def convert_speculation(config: dict[str, Any], name: str) -> dict[str, str]:
    """Return our options for vLLM's object; raises UsageError for an unknown key or method."""
    config = {k: v for k, v in config.items() if not (k in FIXED_KEYS and v == FIXED_KEYS[k])}
    method, model = config.pop("method", None), config.pop("model", None)
    count = config.pop("num_speculative_tokens", None)
    if config:
        raise UsageError(
            f"{name}: {next(iter(config))} means nothing here.",
            "Leave it out: each step decides how many tokens it verifies, up to "
            "--num-speculative-tokens.",
        )
    if method is None:
        method, model = (model, None) if model in SPECULATIVE_METHODS else ("draft_model", model)
    if method not in SPECULATIVE_METHODS:
        raise UsageError(
            f"{name}: there is no method {method} here.",
            f"Use one of {', '.join(SPECULATIVE_METHODS)}, or --speculative-method.",
        )
    if (model is None) == (method == "draft_model"):
        raise UsageError(
            f"{name}: method {method} "
            + ("takes no model." if model is not None else "needs a model."),
            "Give model, the folder of a smaller model, with draft_model alone; what medusa and "
            "eagle read lies beside the model that is served.",
        )
    options = {"speculative_method": SPECULATIVE_METHODS[method]}
    if model is not None:
        options["draft_model"] = str(model)
    if count is not None:
        options["num_speculative_tokens"] = str(count)
    return options


NO, YES = ("false",), ("true",)
SEE_TABLE = "docs/options.md#options-of-vllm has what serves in place of vLLM's flags."
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
        names="enable_chunked_prefill enable_auto_tool_choice enable_prompt_tokens_details "
        "disable_uvicorn_access_log",
        values=YES,
        switch=True,
    ),
    Given(
        names="trust_remote_code async_scheduling enable_lora enable_expert_parallel "
        "enable_sleep_mode disable_sliding_window",
        values=NO,
        switch=True,
    ),
    Given(names="data_parallel_size nnodes api_server_count stream_interval", values=("1",)),
    Given(names="runner task", values=("auto", "generate")),
    Given(names="convert", values=("auto", "none")),
    Given(names="tokenizer_mode config_format", values=("auto", "hf")),
    Given(
        names="model_impl generation_config chat_template_content_format",
        values=("auto",),
    ),
    Given(names="response_role", values=("assistant",)),
    Given(names="cpu_offload_gb", values=("0", "0.0")),
    Given(names="guided_decoding_backend", values=("auto", "guidance")),
)
TOGETHER = (
    Together(
        names="speculative_config spec_method spec_model spec_tokens",
        ours=("speculative_method", "draft_model", "num_speculative_tokens"),
        read=translate_speculation,
        note="the methods ngram, suffix, draft_model, medusa and eagle, and no keys but method, "
        "model and num_speculative_tokens: the most that a step verifies",
    ),
)
VALUES = {"dtype": {"half": "float16", "float": "float32"}}
"""Our option → vLLM's words for some of its values."""

BY_NAME: dict[str, Word | Given | Together] = {
    **{word.name: word for word in WORDS},
    **{name: row for rows in (GIVEN, TOGETHER) for row in rows for name in row.names.split()},
}
SWITCHES = frozenset(name for name, row in BY_NAME.items() if getattr(row, "switch", False))


def translate(
    given: Mapping[str, Any], there: frozenset[str], spell: Callable[[str], str] = flag_name
) -> dict[str, Any]:
    """`given` with vLLM's names put into ours; `there` are the names of our own options.

    {"enable_prefix_caching": "false"} → {"prefix_cache": "false"}. `spell` writes a name as its
    user did. Raises UsageError for what is refused, and for one thing that is said twice.
    """
    options = {name: value for name, value in given.items() if name in there}
    for name, value in given.items():
        row = BY_NAME.get(name)
        if name in there or row is None:
            if name not in there:
                options[name] = value  # an unknown name is for the reader to refuse
            continue
        if isinstance(row, Together):
            continue
        ours = accept(name, row, str(value), there, spell)
        if ours is not None:
            add(options, ours, name, spell)
    for together in TOGETHER:
        parts = {name: given[name] for name in together.names.split() if name in given}
        for ours in together.read(parts, spell).items() if parts else ():
            add(options, ours, next(iter(parts)), spell)
    for name, words in VALUES.items():
        if isinstance(options.get(name), str):
            options[name] = words.get(options[name], options[name])
    return options


def add(
    options: dict[str, Any], ours: tuple[str, str], name: str, spell: Callable[[str], str]
) -> None:
    """Add (our name, our value) of vLLM's `name`; UsageError where it is there."""
    if ours[0] in options:
        raise UsageError(
            f"{spell(name)} is {spell(ours[0])} here, and both are given.",
            f"Keep {spell(ours[0])}.",
        )
    options[ours[0]] = ours[1]


def accept(
    name: str, row: Word | Given, value: str, there: frozenset[str], spell: Callable[[str], str]
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
    if value.lower() in row.values:
        return None
    raise UsageError(
        f"{spell(name)} {value[:80]} is not served: here it is {' or '.join(row.values)}, always.",
        SEE_TABLE,
    )


def json_list(text: str) -> list[str] | None:
    """vLLM's lists are JSON as well: '["*"]' → ["*"]; None for what is none."""
    if not text.startswith("["):
        return None
    try:
        items = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return [str(item) for item in items] if isinstance(items, list) else None
