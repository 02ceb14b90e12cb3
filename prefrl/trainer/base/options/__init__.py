"""The options that all trainers share, as mixins of their config, and the rules that bind them."""
