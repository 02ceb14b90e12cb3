"""`prefrl demo`: a tiny model, or SmolLM2, learns to add."""
