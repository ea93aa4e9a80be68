"""What-if: a running server with other options or other traffic, simulated from its `/calibration`.

case.py        the server as it is: settings, classes, steps, and its recent traffic
changes.py     NAME=VALUE → another case
compare.py     both are simulated with the same arrivals and the same times of the machine
gains.py       the gains of requested changes and of fixes, for the doctor's diagnosis
"""
