"""The options of commands that belong to no config: data, model, rewards, processes."""
