"""The vocabulary that every other room speaks: requests, plans, options, errors, time.

Here lives what two rooms must agree on: `request`, `plan` (the seam between engine and runtime),
`options`, `resolve` and `memory_plan`, `model_spec`, `slo`, `service`, `errors`, `clock`.
It imports no other room, opens no socket, starts no process and never imports torch.
"""
