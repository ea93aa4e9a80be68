"""vLLM's options: honoured or refused, in flags, in YAML and in `LLM(...)`."""

import re
from pathlib import Path

import pytest

from headway.config.options import EngineOptions, LogOptions, ServerOptions, read_options, vllm
from headway.config.options.bench import BenchOptions
from headway.config.options.read import fields_of
from headway.config.options.reference import IN_PLACE, SAME
from headway.config.resolve import resolve
from headway.core.errors import UsageError
from headway.core.machine import Machine
from headway.llm import make_options
from telemetry_cases import llama

SERVE = (ServerOptions, EngineOptions, LogOptions)
OURS = frozenset(fields_of(SERVE))


def read(*arguments):
    """All options of `serve` in one namespace."""
    tables, positionals, _ = read_options(SERVE, arguments, {})
    merged = {name: getattr(table, name) for table in tables.values() for name in table.__slots__}
    return merged, positionals


def refusal(*arguments) -> UsageError:
    with pytest.raises(UsageError) as caught:
        read(*arguments)
    return caught.value


def test_a_name_has_one_meaning():
    """No row hides an option of ours, none stands twice, and every word is one of ours."""
    rows = [*vllm.GIVEN, *vllm.TOGETHER]
    names = [word.name for word in vllm.WORDS] + [n for row in rows for n in row.names.split()]
    assert len(names) == len(set(names)) and not OURS & set(names)
    assert {word.ours for word in vllm.WORDS} <= OURS and set(SAME) <= OURS
    switches = {"NO": vllm.NO, "YES": vllm.YES}.values()
    assert all(given.switch == (given.values in switches) for given in vllm.GIVEN)


@pytest.mark.parametrize(
    ("arguments", "name", "value"),
    [
        (["--enable-prefix-caching"], "prefix_cache", True),
        (["--no-enable-prefix-caching"], "prefix_cache", False),
        (["--enable-prefix-caching=false"], "prefix_cache", False),
        (["--enable_prefix_caching", "False"], "prefix_cache", False),
        (["--no-enable_prefix_caching"], "prefix_cache", False),
        (["--swap-space", "4"], "kv_host_memory", 4 * 2**30),
        (["--scheduling-policy=fcfs"], "policy", "fcfs"),
        (["--kv-cache-memory-bytes", "1000000"], "kv_memory", 1_000_000),
        (["--max-num-queued-reqs=7"], "max_queue", 7),
        (["--shutdown-timeout=9"], "drain_timeout", 9.0),
        (["--uvicorn-log-level=warning"], "log_level", "warning"),
        (["--disable-log-requests"], "log_requests", False),
        (["--enable-log-requests"], "log_requests", True),
        (["--no-enable-log-requests"], "log_requests", False),
        (["--disable-log-stats"], "log_stats", False),
        (["--max_model_len=1_024"], "max_model_len", 1024),
        (["--dtype=half"], "dtype", "float16"),
        (["--allowed-origins", '["http://a", "http://b"]'], "allowed_origins",
         ["http://a", "http://b"]),
        (["--allowed-origins", "[]"], "allowed_origins", []),
    ],
)  # fmt: skip
def test_what_means_the_same_is_honoured(arguments, name, value):
    assert read(*arguments, "folder")[0][name] == value
    assert read("folder", *arguments)[1] == ["folder"]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--spec-method=ngram", "--spec-tokens=5"], ("ngram", "", 5)),
        (["--spec-method=medusa"], ("medusa", "", 8)),
        (["--speculative-config", '{"method": "eagle", "num_speculative_tokens": 4}'],
         ("eagle", "", 4)),
        (["--speculative-config", '{"method": "suffix"}'], ("ngram,suffix", "", 8)),
        (["--speculative-config", '{"model": "small", "num_speculative_tokens": 3}'],
         ("draft", "small", 3)),
        (["--speculative-config", '{"model": "ngram", "draft_tensor_parallel_size": 1}'],
         ("ngram", "", 8)),
        (["--speculative-config", '{"method": "draft_model"}', "--spec-model=small"],
         ("draft", "small", 8)),
    ],
)  # fmt: skip
def test_speculation_in_vllms_words(arguments, expected, tmp_path):
    names = ("speculative_method", "draft_model", "num_speculative_tokens")
    assert tuple(read(*arguments)[0][name] for name in names) == expected
    file = tmp_path / "vllm.yaml"
    file.write_text("speculative_config: {method: ngram, num_speculative_tokens: 5}\n")
    assert tuple(read("--config", str(file))[0][name] for name in names) == ("ngram", "", 5)
    script = make_options({"speculative_config": {"method": "ngram", "num_speculative_tokens": 5}})
    assert script == make_options({"speculative_method": "ngram", "num_speculative_tokens": 5})


@pytest.mark.parametrize(
    "arguments",
    [
        *(["--data-parallel-size=1"], ["--enforce-eager=false"]),
        *(["--enable-chunked-prefill"], ["--no-trust-remote-code"], ["--enable-auto-tool-choice"]),
        *(["--trust-remote-code=false"], ["--runner", "generate"], ["--cpu-offload-gb", "0"]),
    ],
    ids=" ".join,
)
def test_what_holds_anyway_passes(arguments):
    assert read(*arguments, "folder") == read("folder")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--data-parallel-size=2"], ["--data-parallel-size 2", "it is 1, always"]),
        (["--trust-remote-code"], ["--trust-remote-code true", "it is false, always"]),
        (["--no-enable-chunked-prefill"], ["enable-chunked-prefill false", vllm.SEE_TABLE]),
        (["--reasoning-parser=qwen3"], ["no option --reasoning-parser.", vllm.SEE_TABLE]),
        (["--speculative-config={}"], ["draft_model needs a model"]),
        (["--speculative-config=5"], ["no JSON object", "num_speculative_tokens"]),
        (["--spec-method=eagle3", "--spec-model=x"], ["no method eagle3", "--speculative-method"]),
        (["--spec-method=ngram", "--spec-model=x"], ["ngram takes no model"]),
        (
            ["--speculative-config", '{"method": "ngram", "prompt_lookup_max": 4}'],
            ["prompt_lookup_max", "--num-speculative-tokens"],
        ),
        (
            ["--speculative-config", '{"method": "suffix"}', "--spec-method=suffix"],
            ["--spec-method", "both given"],
        ),
        (
            ["--spec-method=ngram", "--speculative-method=auto"],
            ["--speculative-method", "both are given"],
        ),
        (["--spec-method=ngram", "--spec-tokens=1000"], ["--num-speculative-tokens", "64"]),
        (
            ["--num-gpu-blocks-override", "9"],
            ["no option --num-gpu-blocks-override.", vllm.SEE_TABLE],
        ),
        (["--model", "x"], ["no option --model.", vllm.SEE_TABLE]),
        (["--enable-lora"], ["--enable-lora true"]),
        (["--prefix-cache", "--no-enable-prefix-caching"], ["--prefix-cache", "both are given"]),
        (["--swap-space=lots"], ["--kv-host-memory"]),
        (["--enable-prefix-cashing"], ["There is no option --enable-prefix-cashing"]),
    ],
)
def test_what_is_not_there_is_refused_with_our_word(arguments, words):
    said = refusal(*arguments)
    assert said.exit_code == 2 and all(word in f"{said.cause} {said.fix}" for word in words), said


def test_a_yaml_file_of_vllms(tmp_path):
    file = tmp_path / "vllm.yaml"
    file.write_text("enable-prefix-caching: false\ndata_parallel_size: 1\nmax-model-len: 64\n")
    found, _ = read("--config", str(file))
    assert found["prefix_cache"] is False and found["max_model_len"] == 64
    file.write_text("reasoning_parser: qwen3\n")
    said = refusal("--config", str(file))
    assert "no option reasoning_parser" in said.cause and vllm.SEE_TABLE in said.fix
    file.write_text("data_parallel_size: 4\n")
    assert f"--config {file}: data_parallel_size 4" in refusal("--config", str(file)).cause


def test_a_script_of_vllms():
    """LLM(model, **options), as vLLM's examples call it."""
    found = make_options(
        {
            "tensor_parallel_size": 1,
            "gpu_memory_utilization": 0.5,
            "enable_prefix_caching": False,
            "enforce_eager": True,
            "trust_remote_code": False,
            "swap_space": 0,
            "max_model_len": 64,
            "dtype": "half",
            "seed": 7,
            "disable_log_stats": True,
            "quantization": None,
        }
    )
    assert found == EngineOptions(
        gpu_memory_utilization=0.5,
        prefix_cache=False,
        max_model_len=64,
        dtype="float16",
        seed=7,
        graphs=False,
        kv_host_memory=found.kv_host_memory,
    )
    assert found.kv_host_memory == 0
    for given, word in (
        ({"trust_remote_code": True}, "it is false, always"),
        ({"max_num_queued_reqs": 3}, "--max-queue"),
        ({"disable_log_stats": False}, "--log-stats"),
        ({"data_parallel_size": 8}, "it is 1, always"),
    ):
        with pytest.raises(UsageError) as caught:
            make_options(given)
        assert word in f"{caught.value.cause} {caught.value.fix}"


def test_the_share_of_the_memory_counts_on_a_cpu_too():
    machine = Machine(num_cores=2, total_bytes=10_000_000, free_bytes=9_000_000)
    for given, expected in ((0.5, 5_000_000), (0.95, 9_000_000)):
        options = EngineOptions(device="cpu", gpu_memory_utilization=given, load_format="dummy")
        _, reasons = resolve(options, machine, llama())
        (kv,) = [reason for reason in reasons if reason.name == "kv_memory"]
        weights = llama().weight_bytes("float32")
        assert f"{given:.0%} of the RAM" in kv.why
        assert abs(float(re.findall(r"[0-9.]+", kv.value)[0]) - (expected - weights) / 2**20) < 0.1


def test_other_verbs_keep_their_words():
    """`bench --model` is its own; a verb without an engine knows nothing of vLLM's."""
    tables, _, _ = read_options([BenchOptions], ["http://x", "--model=m"], {})
    assert tables[BenchOptions].model == "m"
    with pytest.raises(UsageError, match="There is no option --enforce-eager") as caught:
        read_options([BenchOptions], ["--enforce-eager"], {})
    assert vllm.SEE_TABLE not in caught.value.fix


def test_the_page_has_every_row():
    page = (Path(__file__).resolve().parents[3] / "docs" / "options.md").read_text()
    table = page.split("## Options of vLLM", 1)[1]
    for name in [*vllm.BY_NAME, *SAME]:
        assert f"`--{name.replace('_', '-')}`" in table
    missing = {name for names in IN_PLACE for name in names.split()}
    assert not missing & (OURS | vllm.BY_NAME.keys())
