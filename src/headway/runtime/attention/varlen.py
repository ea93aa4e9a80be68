"""Paged attention by torch's own FlashAttention: one call for a mixed batch, on CUDA only.

`num_splits` is 1, so that the bits of a row do not depend on the longest context of the batch; a
probe at the start (`cuda.same_bits`) verifies it. It supports windows, but neither soft caps, sinks
nor rounded KV; `config.attention_choice` does not choose it for these.
"""

from torch import Tensor

from headway.runtime.attention.cache import KVLayer
from headway.runtime.attention.protocol import AttentionRule
from headway.runtime.batch import Batch


class VarlenAttention:
    """`torch.nn.attention.varlen`, on blocks in the layout of `KVLayer`."""

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
        """Call the kernel with the arguments of `triton.paged_attention`."""
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
