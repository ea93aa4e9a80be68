"""The vocabulary of every other room: requests, plans, options, model dimensions, errors, time."""
