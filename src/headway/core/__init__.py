"""The vocabulary that every other room speaks: requests, plans, records, objectives, errors, time.

Here lives what two rooms must agree on: `request`, `plan` (the seam between engine and runtime),
`records`, `slo`, `service`, `errors`, `clock`. Models are in `spec`, settings in `config`.
It imports no other room, opens no socket, starts no process and never imports torch.
"""
