"""Sizes that are "auto", and the trials that find them."""
