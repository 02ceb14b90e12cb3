"""The folder of a run: who writes there, its checkpoints, and how a run ends before it is done."""
