"""How a GPU takes its steps, and in which formats: chosen by default, given, refused."""

import dataclasses

import pytest

from headway.core.errors import UsageError
from headway.core.formats import Format
from resolve_cases import decide, gpu, model


def in_fp8(group: int = 0):
    return dataclasses.replace(
        model(), quantization="fp8", formats=(("layers.*", Format("fp8", group)),)
    )


def test_fp8_is_multiplied_as_it_is_asked_for():
    assert gpu(spec=in_fp8(), fp8="scaled").quantization.fp8 == "scaled"
    assert gpu(spec=in_fp8(128)).quantization.fp8 == "exact"
    with pytest.raises(UsageError, match="a scale for each block"):
        gpu(spec=in_fp8(128), fp8="scaled")
    with pytest.raises(UsageError, match="the kernels are torch"):
        gpu(spec=in_fp8(), fp8="scaled", has_kernels=False)
    with pytest.raises(UsageError, match="no weights of the model are in FP8"):
        gpu(fp8="scaled")


def test_a_gpu_takes_steps_ahead_and_as_graphs():
    settings = gpu()
    assert (settings.scheduler.overlap, settings.graphs) == (1, True)
    assert not gpu(attention_backend="sdpa").graphs and not gpu(graphs=False).graphs
    settings, why = decide()
    assert (settings.scheduler.overlap, settings.graphs) == (0, False)
    assert why["graphs"] == "no: they are a GPU's"
