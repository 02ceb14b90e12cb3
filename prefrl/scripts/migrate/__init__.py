"""`prefrl migrate`: files of other libraries become those of prefrl."""
