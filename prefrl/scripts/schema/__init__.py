"""The options of every algorithm, parsed, shown and checked before torch is imported."""
