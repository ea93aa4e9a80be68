"""Our own kernels in Triton, one operation a file; imported only where Triton is.

Each casts what it loads to `DOT`, the type of its products: the model's on a GPU, float32 in the
interpreter, which is silently wrong in bf16. Everything between two products is fp32.
"""
