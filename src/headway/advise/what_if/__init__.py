"""What would change if a running server's options or its traffic were others: simulated from its
own `/calibration`.

    case.py        the server as it is: settings, classes, steps, and its recent traffic
    changes.py     NAME=VALUE → another case
    compare.py     both are simulated with the same arrivals and the same moments of the machine
"""
