"""`headway gateway --from-litellm`: the common part is converted, the rest is listed."""

from pathlib import Path

import pytest

from headway.cli.main import main
from headway.gateway.config import read_config
from headway.gateway.from_litellm import convert

CONFIG = """
model_list:
  - model_name: gpt-4o
    litellm_params:
      {model: azure/my-4o, api_base: "https://n.openai.azure.com", api_version: 2024-10-21, rpm: 6,
       api_key: os.environ/AZURE_KEY}
    model_info: {input_cost_per_token: 0.0000025, output_cost_per_token: 0.00001}
  - model_name: gpt-4o
    litellm_params: {model: gpt-4o, api_key: sk-secret-in-the-file, weight: 2}
  - model_name: claude
    litellm_params: {model: anthropic/claude-haiku-4-5, max_parallel_requests: 8}
  - model_name: local
    litellm_params: {model: hosted_vllm/org/name, api_base: http://10.0.0.1:8000/v1}
  - model_name: own
    litellm_params: {model: openai/tiny, api_base: http://10.0.0.2:8000/v1, api_key: none}
  - {model_name: fast, litellm_params: {model: groq/llama-3.3-70b}}
  - {model_name: nova, litellm_params: {model: bedrock/nova, aws_region_name: us-east-1}}
  - {model_name: "*", litellm_params: {model: "openai/*"}}
router_settings:
  routing_strategy: simple-shuffle
  model_group_alias: {best: gpt-4o, hidden: {model: claude, hidden: true}, gone: nothing}
  fallbacks: [{gpt-4o: [claude, local]}, {claude: [gpt-4o]}, {local: [none]}]
  redis_host: os.environ/REDIS
litellm_settings: {num_retries: 2, request_timeout: 90, cache: true, drop_params: true,
  cache_params: {type: local, ttl: 300}}
general_settings: {master_key: sk-master, database_url: postgres://x}
"""
MISSING = (
    *("model_list[0].litellm_params.rpm", "model_list[1].litellm_params.api_key"),
    "model_list[4].litellm_params.api_key",
    *("model_list[6].litellm_params.model", "model_list[7]", "claude → gpt-4o would lead back"),
    *("local → none", "gone → nothing", "router_settings.redis_host", "litellm_settings.drop"),
    *("general_settings.master_key", "general_settings.database_url", "litellm_settings.cache"),
)


def test_the_common_part_is_converted_and_the_rest_is_listed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "config.yaml"
    source.write_text(CONFIG)
    assert main(["gateway", "--from-litellm", str(source)]) == 0
    shown = capsys.readouterr()
    assert [each for each in MISSING if each not in shown.err] == []
    assert len(shown.err.splitlines()) == len(MISSING)
    assert "secret" not in shown.out + shown.err and "sk-master" not in shown.out + shown.err
    file = tmp_path / "gateway.yaml"
    file.write_text(shown.out)
    config = read_config(file)
    found = {row.name: (row.kind, row.model, row.key_env) for row in config.upstreams}
    assert found == {
        "gpt-4o-1": ("azure", "my-4o", "AZURE_KEY"),
        "gpt-4o-2": ("openai", "gpt-4o", "GPT_4O_2_KEY"),
        "claude-1": ("anthropic", "claude-haiku-4-5", "ANTHROPIC_API_KEY"),
        "local-1": ("vllm", "org/name", ""),
        "own-1": ("auto", "tiny", "OWN_1_KEY"),
        "fast-1": ("openai", "llama-3.3-70b", "GROQ_API_KEY"),
    }
    azure, hosted = config.upstreams[:2]
    assert azure.price is not None and (azure.price.input, azure.price.output) == (2.5, 10)
    assert (hosted.weight, config.upstreams[2].max_at_once) == (2, 8)
    rows = {row.name: row for row in config.models}
    first = rows["gpt-4o"]
    assert (first.upstreams, first.fallbacks) == (("gpt-4o-1", "gpt-4o-2"), ("claude", "local"))
    assert (first.aliases, rows["claude"].aliases) == (("best",), ("hidden",))
    assert {(r.retries, r.deadline, r.policy, r.cache) for r in config.models} == {
        (2, "90s", "weighted", "300s")
    }


def test_a_provider_is_not_sent_the_key_of_another() -> None:
    params = [
        {"model": "mixtral", "custom_llm_provider": "groq"},
        {"model": "openrouter/some", "custom_llm_provider": "groq"},
        {"model": "openrouter/some"},
        {"model": "gpt-4o"},
    ]
    entries = [{"model_name": "m", "litellm_params": each} for each in params]
    found = [row["key_env"] for row in convert({"model_list": entries}).upstreams]
    assert found == ["GROQ_API_KEY", "GROQ_API_KEY", "OPENROUTER_API_KEY", "OPENAI_API_KEY"]


@pytest.mark.parametrize(
    "text", ["", "[1]", "model_list: 3", "model_list: [{model_name: x}]", "a: ["]
)
def test_a_file_without_a_model_is_an_error(tmp_path: Path, text: str) -> None:
    source = tmp_path / "config.yaml"
    source.write_text(text)
    assert main(["gateway", "--from-litellm", str(source)]) == 2
    assert main(["gateway", "--from-litellm"]) == 2
