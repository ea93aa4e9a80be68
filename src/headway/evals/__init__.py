"""How good the answers are: suites of questions and texts, statistics over their items, a gate.

Here lives `headway eval`, and the twelve skills (`skills`) that the embedded models are trained and
asked with. It is given a `core.scoring.Model`, a folder's engine or a URL.
It promises every item with its reply, an interval for each share, and paired tests of A against B.
It imports core and measure; it never loads a model itself.
"""
