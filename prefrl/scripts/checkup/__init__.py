"""`prefrl doctor`, and the checks that it shares with the start of a run."""
