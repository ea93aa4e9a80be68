"""`headway eval B --against A`: what holds for B, what for A, and that the two are told apart."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from headway.cli.main import main
from headway.config.options import AgainstOptions, EngineOptions, EvalOptions, read_options
from headway.config.options.against import OF_ONE, reference_engine

TABLES = (EvalOptions, EngineOptions, AgainstOptions)


def engines(*words: str) -> tuple[EngineOptions, EngineOptions]:
    """What A and B are loaded with."""
    options, _, _ = read_options(TABLES, ["MODEL", "--against=MODEL", *words], {})
    engine: Any = options[EngineOptions]
    return reference_engine(engine, options[AgainstOptions]), engine


def test_a_format_holds_for_b_alone_and_the_rest_for_both():
    a, b = engines("--quantization=int4", "--quantization-group=32", "--kv-read=25%", "--threads=2")
    assert (b.quantization, b.quantization_group, b.kv_read) == ("int4", 32, "25%")
    assert a == EngineOptions(threads=2)


def test_a_has_formats_of_its_own():
    a, b = engines("--quantization=int4", "--against-quantization=int8", "--against-dtype=float32")
    assert (a.quantization, a.dtype) == ("int8", "float32")
    assert (b.quantization, b.dtype) == ("int4", "auto")
    a, b = engines("--kernels=torch", "--against-kernels=native")
    assert (a.kernels, b.kernels) == ("native", "torch")
    a, b = engines("--kernels=torch")
    assert a.kernels == b.kernels == "torch"


def test_every_option_of_a_format_may_differ():
    """One that is added to the engine's table joins `OF_ONE`, or A would get B's."""
    named = ("dtype", "fp8", "quantization", "kv_cache_dtype", "kv_layers", "kv_read", "kv_keep")
    given = {f.name for f in dataclasses.fields(EngineOptions) if f.name.startswith(named)}
    assert given == set(OF_ONE)


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["eval", *words]) == 2
    return capsys.readouterr().err


def test_a_gate_between_a_model_and_itself_is_refused(capsys: pytest.CaptureFixture[str]):
    """int4 beside int4 of one folder has a divergence of 0, and says nothing."""
    alike = "--quantization=int4", "--against-quantization=int4"
    for words in ((), alike):
        said = refused(capsys, "headway-tiny", "--against=headway-tiny", "--gate", *words)
        assert "A and B are one" in said and "--against-quantization" in said
    assert main(["eval", "headway-tiny", "--against=headway-tiny", "--gate", alike[0],
                 "--dry-run"]) == 0  # fmt: skip


def test_a_format_that_nothing_is_loaded_in_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    url = "http://127.0.0.1:9"
    said = refused(capsys, url, "--quantization=int4")
    assert f"--quantization holds for the model, and that is {url}" in said
    said = refused(capsys, "headway-tiny", f"--against={url}", "--against-quantization=int8")
    assert f"--against-quantization holds for --against, and that is {url}" in said
    said = refused(capsys, "headway-tiny", "--against-dtype=float32")
    assert "--against-dtype holds for --against, and that is not given" in said
