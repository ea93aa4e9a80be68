"""A model's dimensions, read from its Hugging Face `config.json`, and what follows from them."""

from headway.core.json_file import read_json
from headway.core.model_spec.families import FAMILIES
from headway.core.model_spec.parts import ExpertsSpec, LatentSpec, RopeSpec
from headway.core.model_spec.read import read_model_spec, spec_from_config
from headway.core.model_spec.spec import DTYPE_BYTES, KVGroupSpec, LayerSpec, ModelSpec
from headway.core.model_spec.state import StateSpec

__all__ = [
    "DTYPE_BYTES",
    "FAMILIES",
    "ExpertsSpec",
    "KVGroupSpec",
    "LatentSpec",
    "LayerSpec",
    "ModelSpec",
    "RopeSpec",
    "StateSpec",
    "read_json",
    "read_model_spec",
    "spec_from_config",
]
