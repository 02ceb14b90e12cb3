"""What a run shows of itself while it trains: one history of its logs, and three views on it."""
