"""How a GPU takes its steps, and in which formats: chosen by default, given, refused."""

import dataclasses

import pytest

from headway.core.errors import UsageError
from headway.spec.formats import Format
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


def test_plain_weights_are_rounded_to_fp8_on_a_gpu():
    """The head stays in 16 bits; activations are rounded too where that is asked for."""
    found = gpu(quantization="fp8").quantization
    assert found.format_of("layers.0.mlp.down") == Format("fp8")
    assert found.format_of("head") == found.format_of("layers.0.mlp.router") == Format()
    assert found.fp8 == "exact" and str(found) == "fp8"
    assert gpu(quantization="fp8", fp8="scaled").quantization.fp8 == "scaled"
    with pytest.raises(UsageError, match="no weights of the model are in FP8"):
        gpu(quantization="fp8", fp8="int8")


def test_a_cpu_does_not_round_to_fp8():
    """The reason, and what to use; a folder that is in FP8 may be called so as before."""
    with pytest.raises(UsageError, match="as many bytes as int8, and is slower") as error:
        decide(quantization="fp8")
    assert "--quantization int8" in str(error.value)
    with pytest.raises(UsageError, match=r"with the kernels of cuda .torch. FP8"):
        gpu(quantization="fp8", has_kernels=False)
    settings, why = decide(spec=in_fp8(128), quantization="fp8")
    assert settings.quantization.main == Format("fp8", 128)
    assert why["quantization"].endswith("fp8, the checkpoint's weights as they are")
    gptq = dataclasses.replace(in_fp8(), quantization="gptq")
    with pytest.raises(UsageError, match="the folder is in gptq"):
        gpu(spec=gptq, quantization="fp8")


def test_products_of_torch_are_a_value_of_kernels():
    """All else is as with our own; a CPU has neither."""
    settings = gpu(kernels="cublas")
    assert (settings.kernels, settings.attention_backend) == ("cublas", "triton")
    assert settings.graphs and gpu().kernels == "cuda"
    assert gpu(kernels="cublas", quantization="int4").quantization.main.kind == "int4"
    for name in ("cuda", "cublas"):
        with pytest.raises(UsageError, match=f"--kernels {name}: they are a GPU's"):
            decide(kernels=name)
        with pytest.raises(UsageError, match=f"--kernels {name}: "):
            gpu(kernels=name, has_kernels=False)


def test_a_gpu_takes_steps_ahead_and_as_graphs():
    settings = gpu()
    assert (settings.scheduler.overlap, settings.graphs) == (1, True)
    assert not gpu(attention_backend="sdpa").graphs and not gpu(graphs=False).graphs
    settings, why = decide()
    assert (settings.scheduler.overlap, settings.graphs) == (0, False)
    assert why["graphs"] == "no: they are a GPU's"


GEMMA2 = {
    "architectures": ["Gemma2ForCausalLM"],
    "head_dim": 256,
    "attn_logit_softcapping": 50.0,
    "query_pre_attn_scalar": 256,
}


def test_attention_of_libraries_is_asked_for_by_name():
    """FlashInfer plans on the host, so no graph holds it; it knows soft caps, torch's does not."""
    settings = gpu(attention_backend="flashinfer")
    assert (settings.attention_backend, settings.graphs) == ("flashinfer", False)
    assert gpu(attention_backend="varlen").graphs
    assert gpu(attention_backend="flashinfer", kernels="torch").kernels == "torch"
    assert gpu(spec=model(**GEMMA2), attention_backend="flashinfer").scheduler.overlap == 1
    with pytest.raises(UsageError, match="has soft caps or sinks here, which torch's kernel"):
        gpu(spec=model(**GEMMA2), attention_backend="varlen")


@pytest.mark.parametrize(
    ("given", "cause", "fix"),
    [
        ({"has_flashinfer": False}, "FlashInfer is not installed", "pip install flashinfer-python"),
        ({"device": "cpu"}, "the device is cpu", "--attention-backend auto"),
        ({"dtype": "float32"}, "attends in 16 bits", "--attention-backend triton"),
        ({"kv_cache_dtype": "int8"}, "reads no such KV", "triton (on a GPU, int8)"),
        ({"spec": model(head_dim=96)}, "have 96 numbers", "which knows any size"),
    ],
    ids=["missing", "cpu", "fp32", "int8", "heads"],
)
def test_what_flashinfer_does_not_do_is_refused(given, cause, fix):
    with pytest.raises(UsageError, match=cause) as caught:
        gpu(attention_backend="flashinfer", **given)
    assert fix in str(caught.value)


@pytest.mark.parametrize("name", ["varlen", "flashinfer"])
def test_libraries_know_no_sinks_and_no_latent_rows(name):
    spec = dataclasses.replace(model(), sink_logits=True)
    with pytest.raises(UsageError, match="sinks here, which") as caught:
        gpu(spec=spec, attention_backend=name)
    assert "--attention-backend triton" in str(caught.value)
