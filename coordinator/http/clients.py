"""Whose request it is: a key's, or an address's (pure).

Free lanes are shared out evenly among clients (`admission.py`), so nobody may become several
clients by what a request says of itself. With API keys each key is a client. Without them each
address is one, whatever the headers say. Of an IPv6 address the first 64 bits count, because the
rest is free for whoever has them.

Behind a reverse proxy every request comes from the proxy's address. A proxy that was named as
trusted adds the address that it has seen to the end of X-Forwarded-For. So the last address there
that is not a trusted one is the client's; those before it may be made up.
"""

import ipaddress
from collections.abc import Sequence

Network = ipaddress.IPv4Network | ipaddress.IPv6Network
Address = ipaddress.IPv4Address | ipaddress.IPv6Address

PREFIX_BITS = 64  # of an IPv6 address that tell one client from another


def networks(texts: Sequence[str]) -> tuple[Network, ...]:
    """Return addresses and networks (10.0.0.0/8) as networks. Raises ValueError: it is neither."""
    return tuple(ipaddress.ip_network(text.strip(), strict=False) for text in texts)


def address_of(text: str) -> Address | None:
    """Return an address, also one with a port or in brackets; None: it is none."""
    text = text.strip().strip('"')
    if text.startswith("["):
        text = text[1:].partition("]")[0]
    elif text.count(":") == 1:
        text = text.partition(":")[0]
    try:
        found = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return None
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return mapped or found


def client_at(peer: str, forwarded: Sequence[str], trusted: Sequence[Network]) -> str:
    """Return the name of the client whose request came from the address `peer`.

    forwarded  the values of the headers X-Forwarded-For, in their order
    trusted    the addresses of reverse proxies
    """
    address = address_of(peer)
    hops = [hop for value in forwarded for hop in value.split(",")]
    while address is not None and hops and _is_in(address, trusted):
        before = address_of(hops.pop())
        if before is None:
            break  # the proxy does not know it: its own address must do
        address = before
    return peer if address is None else _name(address)


def _is_in(address: Address, some: Sequence[Network]) -> bool:
    return any(address in network for network in some)


def _name(address: Address) -> str:
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    return str(ipaddress.ip_network((address, PREFIX_BITS), strict=False))
