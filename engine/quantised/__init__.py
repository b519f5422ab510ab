"""Weights in 8 or 4 bits: reading them, dequantising them, and multiplying with them on CPUs.

`formats.py` reads the format from config.json. Each format has a file with its arithmetic (`fp8`,
`gptq`, `awq`, `pack_quantized`, `nf4`, `mxfp4`, `nvfp4`, `gguf_blocks`). `packed_checkpoint.py` and
`gguf_checkpoint.py` read such a checkpoint as if its weights were plain, or with the codes that are
stored. `rounding.py` rounds plain weights (`--quantization`). `matrix.py` is the one form of
weights that stay in few bits, `linear.py` a layer that has one, `cpu_products.py` the product with
one, `gpu_products.py` the same on a GPU. `kernels.py` says where another library can multiply with
packed weights on a GPU.
"""
