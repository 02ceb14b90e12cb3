"""Hypothesis for these tests."""

from hypothesis import settings

# How long an example takes is the machine's matter: others work on it, too.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")
