"""prefrl's losses and advantage estimators in other training engines: one module for each engine.

Each module imports its engine. docs/library.md has a table of what runs in which.
"""
