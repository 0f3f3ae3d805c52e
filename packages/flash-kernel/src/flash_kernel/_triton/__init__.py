"""The Triton kernels and what launches them: the only folder that imports triton.

`config` is plain data and may be imported without it.
"""
