"""Heads: small models that draft from what their target has computed.

`stated.py` says what the folder of one must be, `head_tensors.py` reads its files, `target.py` what
it takes from its target's checkpoint, `layouts.py` says what the tensors of each kind are called,
`medusa.py` and `eagle_layer.py` are what they compute, `eagle.py` runs an EAGLE head with a cache
as an executor, and `head_loading.py` puts that together. What a head is called is in
`proto/head_kinds.py`.
"""
