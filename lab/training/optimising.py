"""How a model is trained: which texts a step sees, the learning rate, the optimizer, the clock."""

import time

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

SEED = 20  # of the order of the texts


def batch_rows(step: int, num_windows: int, batch_size: int) -> npt.NDArray[np.int64]:
    """Return the indices of the windows in the batch of a step.

    They depend on the step alone, so that a resumed run sees the same batches as an unbroken one.
    """
    epoch, index = divmod(step, num_windows // batch_size)
    order = np.random.default_rng([SEED, epoch]).permutation(num_windows)
    return order[index * batch_size : (index + 1) * batch_size]


def learning_rate(lr_max: float, step: int, progress: float) -> float:
    """Return the rate: warm-up over 50 steps, flat, then from 40 % of the budget linearly to 0."""
    return lr_max * min((step + 1) / 50, 1.0, (1.0 - progress) / 0.6)


def computing_s() -> float:
    """Return the seconds of computing so far; only differences mean something.

    On a CPU this is the processor's time per thread, so that a machine busy with other work makes a
    run longer and not worse (OMP_WAIT_POLICY=passive keeps it honest).
    """
    if torch.cuda.is_available():
        return time.monotonic()
    return time.process_time() / torch.get_num_threads()


def optimizer_for(model: nn.Module, lr: float) -> torch.optim.AdamW:
    """Return AdamW with weight decay for matrices and none for vectors."""
    groups = [
        {"params": [p for p in model.parameters() if p.ndim == ndim], "weight_decay": decay}
        for ndim, decay in ((2, 0.1), (1, 0.0))
    ]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), fused=True)
