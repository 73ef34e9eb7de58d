"""Pallas kernels of jspec, each in a folder of its own with its reference and its shapes."""
