"""Paged attention by torch's own FlashAttention: one call for a mixed batch, on CUDA alone.

`num_splits` is 1: a row's bits do not depend on the longest context beside it. It knows windows;
soft caps, sinks and rounded KV it does not, and `core.attention_choice` asks it for none.
"""

from torch import Tensor

from headway.runtime.attention.cache import KVLayer
from headway.runtime.attention.protocol import AttentionRule
from headway.runtime.batch import Batch


class VarlenAttention:
    """`torch.nn.attention.varlen`, on blocks as `KVLayer` has them."""

    name = "varlen"
    kv_layer: type[KVLayer] = KVLayer

    def attend(
        self,
        q_TND: Tensor,
        k_TGD: Tensor | None,
        v_TGD: Tensor | None,
        layer: KVLayer,
        batch: Batch,
        rule: AttentionRule,
    ) -> Tensor:
        from torch.nn.attention.varlen import varlen_attn

        assert batch.lens is not None
        assert not (rule.softcap or rule.sinks or rule.sink_logits is not None)
        if k_TGD is not None and v_TGD is not None:
            layer.write(k_TGD, v_TGD, batch.slots_GT[layer.group])
        lens = batch.lens
        out = varlen_attn(
            q_TND.contiguous(),
            layer.k,
            layer.v,
            lens.query_starts_S1,
            None,
            lens.longest_query,
            lens.longest_context,
            scale=rule.scale,
            window_size=(rule.window - 1 if rule.window else -1, 0),
            enable_gqa=True,
            seqused_k=lens.context_lens_S,
            block_table=lens.tables_GSB[layer.group],
            num_splits=1,
        )
        assert isinstance(out, Tensor)
        return out
