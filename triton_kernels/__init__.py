"""Triton kernels of hiradix, installed as `hiradix.triton_kernels`."""
