"""Measuring: prompt sets, metrics, reports and `jspec bench`."""
