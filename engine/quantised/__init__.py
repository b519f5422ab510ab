"""Quantised checkpoints, whose weights are packed into fewer bits: reading and dequantising them.

`formats.py` reads the format from config.json. Each format has a file with its arithmetic (`fp8`,
`gptq`, `awq`, `nf4`). `packed_checkpoint.py` reads such a checkpoint as if its weights were plain.
`kernels.py` says where another library can multiply with the packed weights directly.
"""
