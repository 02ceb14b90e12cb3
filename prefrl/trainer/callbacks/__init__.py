"""Callbacks for the argument `callbacks` of a trainer."""
