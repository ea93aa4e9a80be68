"""Model surgery: folders of weights turned into other folders of weights.

Here live `headway distill` (a student trained on its teacher's distribution) and `headway quantize`
(a model in int4 or int8, calibrated and judged). It imports core, runtime and evals, and torch at
will. It serves nothing; what it writes is an ordinary Hugging Face folder that any engine can load.
"""
