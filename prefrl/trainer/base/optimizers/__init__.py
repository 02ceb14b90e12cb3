"""Optimizers by name, and schedules as functions of the step."""
