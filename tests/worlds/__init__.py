"""Distributed tests: real processes, real gloo."""
