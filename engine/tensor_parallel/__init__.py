"""One model on several devices, a process each: tensor parallelism.

Every rank (process) has some heads of each attention and some columns of each feed-forward block,
and the sum of the ranks' results is the result of the whole model: Shoeybi et al., "Megatron-LM",
2019. Rank 0 is the node's process; it starts the other ranks, its followers, and hides them behind
a backend.
"""
