"""One model on several devices, a process each: tensor parallelism.

Every rank has some heads of each attention and some columns of each feed-forward block, and the sum
of what the ranks compute is what the whole would: Shoeybi et al., "Megatron-LM", 2019. Rank 0 is
whoever wants the model; to it the others (its followers) are part of a backend.
"""
