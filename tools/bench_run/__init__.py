"""Measurements of the compiler, each a ratio or a growth that means the same on another machine."""
