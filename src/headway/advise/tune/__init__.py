"""The tuner: searched in simulation, confirmed on the real server beside the default.

space.py      what may be changed, and to what
search.py     successive halving over simulated settings, the same arrivals for all
finalists.py  who runs for real: the best, and where the simulation may be wrong
confirm.py    the finalists and the default on real servers, in turns; paired bootstrap
together.py   what simulation and real runs say together of a gain
outcome.py    what came of it, as JSON and YAML
page.py       the curve of TTFT against TPOT, and where the choice lies
"""
