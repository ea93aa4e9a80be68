"""Paged attention by torch's own FlashAttention: one call for a mixed batch, on CUDA alone.

`num_splits` is 1, so that a row's bits should not depend on the longest context beside it; a probe
at the start (`cuda.same_bits`) tells whether they do. It knows windows; soft caps, sinks and
rounded KV it does not, and `config.attention_choice` asks it for none.
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
        assert batch.lens is not None
        assert not (rule.softcap or rule.sinks or rule.sink_logits is not None)
        if k_TGD is not None and v_TGD is not None:
            layer.write(k_TGD, v_TGD, batch.slots_GT[layer.group])
        lens = batch.lens
        return self.attend_paged(
            q_TND.contiguous(),
            layer.k,
            layer.v,
            lens.query_starts_S1,
            lens.context_lens_S,
            lens.tables_GSB[layer.group],
            lens.longest_query,
            lens.longest_context,
            rule.scale,
            rule.window,
        )

    def attend_paged(
        self,
        q_TND: Tensor,
        k: Tensor,
        v: Tensor,
        starts_S1: Tensor,
        context_lens_S: Tensor,
        table_SB: Tensor,
        longest_query: int,
        longest_context: int,
        scale: float | None = None,
        window: int = 0,
    ) -> Tensor:
        """The kernel, as `triton.paged_attention` is called; lengths and table are int32."""
        from torch.nn.attention.varlen import varlen_attn

        out = varlen_attn(
            q_TND,
            k,
            v,
            starts_S1,
            None,
            longest_query,
            longest_context,
            scale=scale,
            window_size=(window - 1 if window else -1, 0),
            enable_gqa=True,
            seqused_k=context_lens_S,
            block_table=table_SB,
            num_splits=1,
        )
        assert isinstance(out, Tensor)
        return out
