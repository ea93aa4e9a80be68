"""The verbs a user types."""
