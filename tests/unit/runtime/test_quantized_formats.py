"""Quantization configs of others: which scheme each layer gets, and what is refused by name."""

import json
import time
from pathlib import Path
from typing import Any

import pytest

from headway.core.errors import CheckpointError, ModelError, UnsupportedModelError
from headway.runtime.quantized.formats import PARSERS, read_schemes
from headway.runtime.quantized.scheme import Schemes, match_pattern

LAYER = "model.layers.{}.{}"
QUERY, GATE, DOWN = (
    LAYER.format(0, name) for name in ("self_attn.q_proj", "mlp.gate_proj", "mlp.down_proj")
)


def group(targets: list[str], **changes: Any) -> dict[str, Any]:
    """A group of compressed-tensors; `weights` changes what its weights say."""
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 64}
    weights |= changes.pop("weights", {})
    return {"targets": targets, "weights": weights, **changes}


def compressed(*groups: dict[str, Any], **changes: Any) -> Schemes:
    config = {"format": "pack-quantized", "ignore": ["lm_head"], **changes}
    config["config_groups"] = {f"group_{i}": each for i, each in enumerate(groups)}
    return PARSERS["compressed-tensors"](config)


def write(folder: Path, config: dict[str, Any] | None, **beside: dict[str, Any]) -> Path:
    """A folder with this quantization_config, and files of their own."""
    found = {} if config is None else {"quantization_config": config}
    (folder / "config.json").write_text(json.dumps(found))
    for name, body in beside.items():
        (folder / f"{name}.json").write_text(json.dumps(body))
    return folder


# ── compressed-tensors ──────────────────────────────────────────────────────────────────────


def test_a_class_matches_all_linear_layers_except_ignored_ones():
    schemes = compressed(group(["Linear"]))
    scheme = schemes.scheme_of(QUERY)
    assert scheme is not None
    assert (scheme.layout, scheme.bits, scheme.group, scheme.symmetric) == (
        *("pack-quantized", 4, 64),
        True,
    )
    assert schemes.scheme_of("lm_head") is None
    assert compressed(group(["Linear"]), ignore=None).scheme_of("lm_head") is not None


def test_names_come_before_expressions_and_those_before_classes():
    """As compressed-tensors has it, whatever the order of the groups."""
    schemes = compressed(
        group(["Linear"], weights={"group_size": 128}),
        group([r"re:.*\.mlp\..*"], weights={"group_size": 32}),
        group([DOWN], weights={"num_bits": 8, "strategy": "channel", "group_size": None}),
        ignore=["re:.*gate_proj$"],
    )
    found = [schemes.scheme_of(name) for name in (QUERY, DOWN, LAYER.format(0, "mlp.up_proj"))]
    assert [(one.bits, one.group) for one in found if one] == [(4, 128), (8, 0), (4, 32)]
    assert schemes.scheme_of(GATE) is None
    assert schemes.named == (DOWN,)


def test_a_head_is_a_name_and_no_class():
    """`lm_head` beside `Linear`, as `headway quantize` writes an int8 head."""
    by_output = {"num_bits": 8, "strategy": "channel", "group_size": None}
    schemes = compressed(group(["Linear"]), group(["lm_head"], weights=by_output), ignore=[])
    found = [schemes.scheme_of(name) for name in (QUERY, "lm_head")]
    assert [(one.bits, one.group) for one in found if one] == [(4, 64), (8, 0)]


def test_each_group_may_have_a_layout_of_its_own():
    """`mixed-precision` on top, the layouts in the groups."""
    dynamic = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}
    schemes = compressed(
        group(["re:.*self_attn.*"], format="pack-quantized"),
        group(
            ["re:.*mlp.*"],
            format="int-quantized",
            weights={"num_bits": 8, "strategy": "channel", "group_size": None},
            input_activations=dynamic,
        ),
        group(
            ["lm_head"],
            format="float-quantized",
            weights={
                "num_bits": 8,
                "type": "float",
                "strategy": "block",
                "group_size": None,
                "block_structure": "128x64",
            },
        ),
        format="mixed-precision",
        ignore=[],
    )
    layouts = [schemes.scheme_of(name) for name in (QUERY, DOWN, "lm_head")]
    assert [one.layout for one in layouts if one] == [
        *("pack-quantized", "int-quantized", "float-quantized")
    ]
    assert layouts[2] is not None
    assert layouts[2].block == (128, 64)


REFUSED = {
    "two bits": lambda: compressed(group(["Linear"], weights={"num_bits": 2})),
    "groups of 24": lambda: compressed(group(["Linear"], weights={"group_size": 24})),
    "blocks of integers": lambda: compressed(group(["Linear"], weights={"strategy": "block"})),
    "NVFP4": lambda: compressed(group(["Linear"]), format="nvfp4-pack-quantized"),
    "2:4": lambda: compressed(group(["Linear"]), sparsity_config={"format": "sparse-24-bitmask"}),
    "transforms": lambda: compressed(
        group(["Linear"]), transform_config={"config_groups": {"R1": {}}}
    ),
    "frozen": lambda: compressed(group(["Linear"]), quantization_status="frozen"),
    "outputs": lambda: compressed(group(["Linear"], output_activations={"num_bits": 8})),
    "inputs alone": lambda: compressed({"targets": ["Linear"], "input_activations": {}}),
    "GPTQ of 3 bits": lambda: PARSERS["gptq"]({"bits": 3, "group_size": 128}),
    "Marlin": lambda: PARSERS["gptq"]({"bits": 4, "checkpoint_format": "marlin"}),
    "AWQ GEMV": lambda: PARSERS["awq"]({"bits": 4, "version": "gemv"}),
    "AWQ of 8 bits": lambda: PARSERS["awq"]({"bits": 8}),
    "FP8 e5m2": lambda: PARSERS["fp8"]({"fmt": "e5m2"}),
    "experts in FP4": lambda: PARSERS["fp8"]({"expert_dtype": "fp4"}),
}


@pytest.mark.parametrize("case", REFUSED)
def test_variants_that_are_not_read_are_refused(case: str):
    with pytest.raises(UnsupportedModelError, match=r"not read|not compressed"):
        REFUSED[case]()


MISSTATED = {
    "bits as text": lambda: PARSERS["gptq"]({"bits": "four"}),
    "bits missing": lambda: PARSERS["gptq"]({}),
    "sym as text": lambda: PARSERS["gptq"]({"bits": 4, "sym": "yes"}),
    "ignore as text": lambda: compressed(group(["Linear"]), ignore="lm_head"),
    "a group as text": lambda: compressed("W4A16"),  # type: ignore[arg-type]
    "a block of one": lambda: PARSERS["fp8"]({"weight_block_size": [128]}),
    "a block of zero": lambda: PARSERS["fp8"]({"weight_block_size": [0, 128]}),
    "no expression": lambda: compressed(group(["re:(("])),
    "a huge group": lambda: PARSERS["gptq"]({"bits": 4, "group_size": 1 << 40}),
    "blocks to quantize": lambda: PARSERS["gptq"](
        {"bits": 4, "modules_in_block_to_quantize": [[1]]}
    ),
}


@pytest.mark.parametrize("case", MISSTATED)
def test_invalid_keys_are_named(case: str):
    with pytest.raises(CheckpointError, match=r"config\.json"):
        MISSTATED[case]()


ENDLESS = ["(a+)+$", "(a|aa)*b", "(a?a)*b", "(a*){50}b", ".*" * 8 + "x", "x" * 501]


@pytest.mark.parametrize("pattern", ENDLESS)
def test_expressions_that_could_take_forever_are_refused(pattern: str):
    """Long before a name of 80 characters is tried with them."""
    begin = time.monotonic()
    with pytest.raises(CheckpointError, match="too complex"):
        match_pattern(pattern, "ignore")("a" * 80)
    assert time.monotonic() - begin < 5


@pytest.mark.parametrize(
    ("pattern", "name", "fits"),
    [
        (r".*layers\.(0|1)\.self_attn\.(q|k|v)_proj$", QUERY, True),
        (r"model\.layers\.\d+\.mlp\.down_proj", DOWN, True),
        (r"layers", QUERY, False),  # from the beginning, as re.match
        (r"^(?!.*down).*mlp.*", DOWN, False),
        (r"^(?!.*down).*mlp.*", GATE, True),
    ],
)
def test_expressions_are_matched_from_the_beginning(pattern: str, name: str, fits: bool):
    assert match_pattern(pattern, "targets")(name) is fits


# ── GPTQ, AWQ, FP8 ──────────────────────────────────────────────────────────────────────────


def test_gptq_excludes_the_head_and_dynamic_modules():
    schemes = PARSERS["gptq"](
        {
            "bits": 4,
            "group_size": -1,
            "desc_act": True,
            "sym": False,
            "checkpoint_format": "gptq_v2",
            "dynamic": {"-:.*gate_proj": {}, r"+:.*\.down_proj": {"bits": 8, "group_size": 64}},
        }
    )
    found = [schemes.scheme_of(name) for name in (QUERY, GATE, DOWN, "lm_head")]
    assert [one and (one.bits, one.group, one.symmetric) for one in found] == [
        (4, 0, False),
        None,
        (8, 64, False),
        None,
    ]
    assert schemes.version == "gptq_v2"
    assert PARSERS["gptq"]({"bits": 4, "lm_head": True}).scheme_of("lm_head") is not None


def test_gptq_quantizes_what_blocks_name():
    schemes = PARSERS["gptq"](
        {"bits": 4, "modules_in_block_to_quantize": [["self_attn.q_proj"], ["mlp.down_proj"]]}
    )
    assert [schemes.scheme_of(name) is None for name in (QUERY, GATE, DOWN)] == [False, True, False]


def test_awq_excludes_names_that_contain_a_word():
    schemes = PARSERS["awq"](
        {"w_bit": 4, "q_group_size": 64, "modules_to_not_convert": ["self_attn"]}
    )
    assert [schemes.scheme_of(name) is None for name in (QUERY, DOWN, "lm_head")] == [
        *(True, False),
        True,
    ]


def test_fp8_excludes_modules_and_all_inside():
    """`model.layers.1` leaves out layer 1 and not layer 11; `gate_proj` is an end."""
    schemes = PARSERS["fp8"](
        {
            "weight_block_size": [128, 128],
            "modules_to_not_convert": ["model.layers.1", "mlp.gate_proj"],
        }
    )
    found = schemes.scheme_of(LAYER.format(11, "mlp.up_proj"))
    assert found is not None and found.block == (128, 128)
    assert schemes.scheme_of(LAYER.format(1, "mlp.up_proj")) is None
    assert schemes.scheme_of(GATE) is None
    assert PARSERS["fp8"]({"ignored_layers": [DOWN]}).scheme_of(DOWN) is None


# ── which config counts ─────────────────────────────────────────────────────────────────────


def test_a_plain_folder_has_no_schemes(tmp_path: Path):
    assert read_schemes(write(tmp_path, None)) is None
    assert read_schemes(write(tmp_path, {})) is None


def test_old_writers_config_stands_in_a_file_of_its_own(tmp_path: Path):
    write(tmp_path, None, quantize_config={"bits": 4, "group_size": 128, "desc_act": False})
    found = read_schemes(tmp_path)
    assert found is not None and found.method == "gptq"
    write(tmp_path, {"quant_method": "awq", "bits": 4})  # config.json's own comes first
    found = read_schemes(tmp_path)
    assert found is not None and found.method == "awq"


def test_awq_by_gptqmodel_is_awq(tmp_path: Path):
    config = {"quant_method": "gptq", "checkpoint_format": "awq", "bits": 4}
    found = read_schemes(write(tmp_path, config))
    assert found is not None and found.method == "awq"


@pytest.mark.parametrize("method", ["bitsandbytes", "hqq", "torchao", "aqlm", None])
def test_other_methods_are_refused_by_name(tmp_path: Path, method: str | None):
    with pytest.raises(UnsupportedModelError, match=method or "unknown"):
        read_schemes(write(tmp_path, {"quant_method": method, "load_in_4bit": True}))


def test_a_config_that_is_no_object_is_refused(tmp_path: Path):
    with pytest.raises(ModelError):
        read_schemes(write(tmp_path, ["gptq"]))  # type: ignore[arg-type]
