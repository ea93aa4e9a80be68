def instruction_sets() -> list[str]: ...

class Kernels:
    def __init__(self, isa: str, threads: int, /) -> None: ...
    def lanes(self) -> int: ...
    def pack_linear(
        self, weight: int, packed: int, outputs: int, inputs: int, type: int
    ) -> None: ...
    def linear(
        self,
        x: int,
        packed: int,
        bias: int,
        y: int,
        scratch: int,
        tokens: int,
        inputs: int,
        outputs: int,
        type: int,
        weight_type: int,
    ) -> None: ...
    def norm(
        self,
        x: int,
        weight: int,
        y: int,
        rows: int,
        width: int,
        inner: int,
        outer_stride: int,
        inner_stride: int,
        eps: float,
        offset: float,
        type: int,
    ) -> None: ...
    def rope(
        self,
        x: int,
        y: int,
        cosines: int,
        sines: int,
        tokens: int,
        heads: int,
        size: int,
        half: int,
        x_token_stride: int,
        x_head_stride: int,
        y_token_stride: int,
        y_head_stride: int,
        type: int,
    ) -> None: ...
    def gated(
        self, x: int, y: int, tokens: int, inner: int, type: int, activation: int
    ) -> None: ...
    def add(
        self, x: int, added: int, y: int, tokens: int, width: int, factor: float, type: int
    ) -> None: ...
    def run(
        self,
        operations: int,
        count: int,
        tokens: int,
        sequences: int,
        token_ids: int,
        positions: int,
        query_lens: int,
        context_lens: int,
        groups: int,
        buffers: int,
    ) -> None: ...
    def are_finite(self, x: int, count: int, type: int) -> bool: ...
    def read_words(self, base: int, bytes: int) -> int: ...
    def sampling_bytes(self, vocabulary: int) -> int: ...
    def sample(
        self,
        draws: int,
        rows: int,
        vocabulary: int,
        allowed_bytes: int,
        scratch: int,
        tokens: int,
    ) -> None: ...
    def logprobs(
        self,
        logits: int,
        type: int,
        rows: int,
        vocabulary: int,
        tokens: int,
        count: int,
        scratch: int,
        values: int,
        ranks: int,
        top_tokens: int,
    ) -> None: ...
    def pack_quantized(
        self, weight: int, scales: int, packed: int, outputs: int, inputs: int, group: int
    ) -> None: ...
    def round_weight(
        self,
        weight: int,
        packed: int,
        scales: int,
        outputs: int,
        inputs: int,
        group: int,
        type: int,
    ) -> None: ...
    def quantize_rows(
        self,
        x: int,
        q: int,
        scales: int,
        starts: int,
        tokens: int,
        inputs: int,
        group: int,
        type: int,
    ) -> None: ...
    def quantized(
        self,
        q: int,
        scales: int,
        starts: int,
        packed: int,
        weight_scales: int,
        bias: int,
        y: int,
        tokens: int,
        inputs: int,
        outputs: int,
        group: int,
        type: int,
    ) -> None: ...
    def write_kv(
        self,
        k: int,
        v: int,
        k_step: int,
        v_step: int,
        slots: int,
        tokens: int,
        type: int,
        to_k: int,
        to_v: int,
        k_scale: int,
        v_scale: int,
        kv_heads: int,
        head_dim: int,
        block_size: int,
        kv_type: int,
        paired: int,
    ) -> None: ...
    def round_kv(
        self,
        pairs: int,
        count: int,
        from_k: int,
        from_v: int,
        from_type: int,
        k: int,
        v: int,
        k_scale: int,
        v_scale: int,
        kv_heads: int,
        head_dim: int,
        block_size: int,
    ) -> None: ...
    def attention_rounded(
        self,
        q: int,
        out: int,
        q_step: int,
        tables: int,
        open_tables: int,
        query_lens: int,
        context_lens: int,
        sequences: int,
        width: int,
        heads: int,
        window: int,
        scale: float,
        softcap: float,
        sink_logits: int,
        type: int,
        open_k: int,
        open_v: int,
        open_type: int,
        k: int,
        v: int,
        k_scale: int,
        v_scale: int,
        kv_heads: int,
        head_dim: int,
        block_size: int,
    ) -> None: ...
    def attention(
        self,
        q: int,
        out: int,
        q_step: int,
        tables: int,
        query_lens: int,
        context_lens: int,
        sequences: int,
        width: int,
        heads: int,
        window: int,
        sinks: int,
        scale: float,
        softcap: float,
        sink_logits: int,
        type: int,
        k: int,
        v: int,
        k_scale: int,
        v_scale: int,
        kv_heads: int,
        head_dim: int,
        block_size: int,
        kv_type: int,
        paired: int,
    ) -> None: ...
