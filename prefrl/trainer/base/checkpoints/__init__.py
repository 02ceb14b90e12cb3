"""What a checkpoint holds besides weights, how it is written and read, and which run it belongs to."""
