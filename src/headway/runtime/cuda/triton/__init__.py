"""Our own kernels in Triton, one operation per file; imported only where Triton is installed.

Each casts what it loads to `DOT`, the type of its products: the model's on a GPU, float32 in the
interpreter, whose bf16 products are silently wrong. Everything between two products is fp32.
"""
