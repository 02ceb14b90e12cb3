"""`prefrl replay`: a past step of a run, computed again."""
