"""Graders: rewards that are configured by parameters instead of written in Python."""
