"""The model families: one small file for each family, one row for each architecture.

The dimensions of an architecture are read by its row of `spec.FAMILIES`.
"""

from headway.runtime.models.decoder import Architecture, Decoder
from headway.runtime.models.deepseek import DEEPSEEK
from headway.runtime.models.gemma import GEMMA2, GEMMA3
from headway.runtime.models.gemma3n import GEMMA3N
from headway.runtime.models.gpt_oss import GPT_OSS
from headway.runtime.models.granite import GRANITE
from headway.runtime.models.granite_hybrid import GRANITE_HYBRID
from headway.runtime.models.lfm2 import LFM2
from headway.runtime.models.llama import LLAMA
from headway.runtime.models.mixtral import MIXTRAL
from headway.runtime.models.olmo2 import OLMO2
from headway.runtime.models.phi3 import PHI3
from headway.runtime.models.qwen3 import QWEN2_MOE, QWEN3, QWEN3_MOE
from headway.runtime.models.qwen3_next import QWEN3_NEXT, QWEN35

MODELS: dict[str, Architecture] = {
    "LlamaForCausalLM": LLAMA,
    "MistralForCausalLM": LLAMA,
    "MixtralForCausalLM": MIXTRAL,
    "Ministral3ForCausalLM": LLAMA,
    "Qwen2ForCausalLM": LLAMA,
    "Qwen2MoeForCausalLM": QWEN2_MOE,
    "Qwen3ForCausalLM": QWEN3,
    "Qwen3MoeForCausalLM": QWEN3_MOE,
    "Gemma2ForCausalLM": GEMMA2,
    "Gemma3ForCausalLM": GEMMA3,
    "Gemma3nForCausalLM": GEMMA3N,
    "Phi3ForCausalLM": PHI3,
    "Olmo2ForCausalLM": OLMO2,
    "Olmo3ForCausalLM": OLMO2,
    "GraniteForCausalLM": GRANITE,
    "GraniteMoeHybridForCausalLM": GRANITE_HYBRID,
    "Qwen3NextForCausalLM": QWEN3_NEXT,
    "Qwen3_5ForCausalLM": QWEN35,
    "Qwen3_5MoeForCausalLM": QWEN35,
    "Lfm2ForCausalLM": LFM2,
    "Lfm2MoeForCausalLM": LFM2,
    "SmolLM3ForCausalLM": LLAMA,
    "GptOssForCausalLM": GPT_OSS,
    "DeepseekV2ForCausalLM": DEEPSEEK,
    "DeepseekV3ForCausalLM": DEEPSEEK,
}

__all__ = ["MODELS", "Decoder"]
