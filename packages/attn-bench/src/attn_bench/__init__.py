"""Attention benchmarks that refuse to time a wrong kernel."""

__version__ = "0.1.0"
