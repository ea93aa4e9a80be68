"""The tuner: search in simulation, then confirmation on real servers beside the default.

space.py      the options that may change, and their values
search.py     successive halving over simulated settings, the same arrivals for all
finalists.py  the settings to run for real: the best, and those where the simulation may be wrong
confirm.py    the finalists and the default on real servers, in turns; paired bootstrap
outcome.py    the combined gains, the choice and its reason, as JSON and YAML
page.py       TTFT against TPOT of all settings, and the choice
"""
