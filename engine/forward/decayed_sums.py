"""Linear attention with decays (lightning attention, Mamba 2): a rule of running states.

    S_t = exp(a_t) S_(t-1) + v_t k_t'          o_t = S_t q_t

Heads have values v and logarithms of decays a of their own; groups of heads share keys and queries.
A token's share in a later output is the product of query and key with the decays between the two
(https://arxiv.org/abs/2405.21060, equation 16), so a row of a tree needs no state of its own.
"""

import torch


def decayed_sums(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    decays: torch.Tensor,
    state: torch.Tensor | None,
    *,
    goes_on: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Run chains of tokens (`running_states.Rule`); return (outputs [B, q, g h, d], the state).

    In the shapes: g groups, h heads of each, d numbers of a value, s of a key. What is no token has
    zeros.

    queries  [B, q, g, s] of the last q tokens of each chain
    keys, values, decays  [B, n, g, s], [B, n, g, h, d], [B, n, g, h] float64
    state    [g, h, d, s]
    """
    # Sums of logarithms from the beginning on, whose differences must stay exact.
    sums = decays.cumsum(1)
    num_tokens, num_rows = keys.shape[1], queries.shape[1]
    of_rows = sums[:, num_tokens - num_rows :]
    are_later = torch.ones(num_rows, num_tokens, dtype=torch.bool, device=keys.device)
    are_later = are_later.triu_(num_tokens - num_rows + 1)[..., None, None]
    since = (of_rows[:, :, None] - sums[:, None]).masked_fill_(are_later, -torch.inf)
    shares = torch.einsum("bqgs,bngs->bqng", queries, keys)[..., None] * since.exp_().float()
    made = torch.einsum("bqngh,bnghd->bqghd", shares, values)
    if state is not None:
        old = torch.einsum("bqgs,ghds->bqghd", queries, state)
        made = made + old * of_rows.exp().float()[..., None]
    behind = _behind(keys, values, sums, state) if goes_on else None
    return made.flatten(2, 3), behind


def _behind(
    keys: torch.Tensor, values: torch.Tensor, sums: torch.Tensor, state: torch.Tensor | None
) -> torch.Tensor:
    """Return the state behind one chain of tokens; shapes as in `decayed_sums`, with B = 1."""
    left = (sums[:, -1:] - sums).exp().float()
    made = torch.einsum("nghd,ngs->ghds", (values * left[..., None])[0], keys[0])
    return made if state is None else made + state * sums[0, -1].exp().float()[..., None, None]
