"""A model as its files state it: dimensions (`config.json`, GGUF), formats of weights and of KV.

`read_model_spec` reads a folder or a file. Imports core alone, and never torch.
"""

from headway.spec.families import FAMILIES
from headway.spec.model import DTYPE_BYTES, KVGroupSpec, LayerSpec, ModelSpec
from headway.spec.model_files import read_json
from headway.spec.parts import ExpertsSpec, LatentSpec, RopeSpec
from headway.spec.read import read_model_spec, spec_from_config
from headway.spec.state import StateSpec

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
