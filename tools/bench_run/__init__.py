"""Measurements of the compiler and the executor, each a ratio or a growth that means the same on another machine."""
