"""Options and hyperparameters: their declaration, their checks, and suggestions for unknown names."""
