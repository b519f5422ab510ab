"""Heads (Medusa, EAGLE, DFlash ...): small models that draft from their target's hidden states.

`recognised.py` tells whether a checkpoint is a head. `stated.py` checks a head's folder and
config.json, `head_tensors.py` reads its files, `target.py` reads what it shares with its target's
checkpoint, and `layouts.py` knows the names of the tensors in each layout. `medusa.py` and
`eagle_layer.py` hold the computations; `medusa_executor.py` and `eagle.py` run them as executors;
`head_loading.py` puts all together. The kinds of heads are named in `proto/head_kinds.py`.
"""
