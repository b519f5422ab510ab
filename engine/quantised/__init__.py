"""Checkpoints whose weights are stored in fewer bits: which of them are covered, and what they are.

No model and no device is known here. `formats.py` reads what config.json says, each packing has a
file of arithmetic, `packed_checkpoint.py` reads them as if they were plain, and `kernels.py` says
where another library multiplies with them as they are.
"""
