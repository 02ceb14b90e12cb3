"""Parsers of command lines and YAML files."""
