"""`prefrl generate`, `chat` and `eval`: completions of a model or a server."""
