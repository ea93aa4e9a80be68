"""The vocabulary every other room speaks: requests, plans, options, model dimensions, errors, time."""
