"""Kernels for compute capability 9.0 in Gluon: like `_triton`, a world of its own.

`config` is plain data and may be imported without Triton.
"""
