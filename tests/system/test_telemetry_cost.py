"""Telemetry is cheap, and its MBU is the one that others measure. Timed: `make hardening`."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.hardening
BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
QWEN_0_5B = {
    "architectures": ["Qwen2ForCausalLM"],
    "vocab_size": 151936,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}


def run(script: str, *arguments: str | Path) -> str:
    command = [sys.executable, BENCHMARKS / script, *arguments]
    return subprocess.run(command, capture_output=True, check=True, text=True, timeout=3000).stdout


def test_a_step_at_32_sequences_costs_less_than_100_us() -> None:
    table = run("telemetry_overhead.py")
    every = re.search(r"^all +([\d.]+)", table, re.MULTILINE)
    request = re.search(r"^a request +([\d.]+) us", table, re.MULTILINE)
    assert every and float(every[1]) <= 100, table
    assert request and float(request[1]) <= 100, table


@pytest.mark.timeout(1800)
def test_server_client_and_offline_agree_on_mbu(tmp_path: Path) -> None:
    """A 0.5B shape with random weights, batch 1 and 8: within 5%, each in its best round."""
    (tmp_path / "config.json").write_text(json.dumps(QWEN_0_5B))
    table = run("mbu_agreement.py", tmp_path, "--rounds", "6")
    ratios = re.findall(r"^(client|offline) .* ([\d.]+)$", table, re.MULTILINE)
    assert len(ratios) == 4, table
    assert all(float(ratio) == pytest.approx(1, abs=0.05) for _, ratio in ratios), table
