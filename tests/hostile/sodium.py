"""The boxes of CURVE, by the libsodium that pyzmq brings along."""

import ctypes
import ctypes.util
from functools import cache
from pathlib import Path

import zmq

KEY_BYTES, MAC_BYTES = 32, 16


@cache
def _library() -> ctypes.CDLL:
    site = Path(zmq.__file__).parents[1]
    found = sorted(site.glob("pyzmq.libs/libsodium*"))
    name = str(found[0]) if found else ctypes.util.find_library("sodium")
    assert name is not None, "there is no libsodium beside pyzmq"
    return ctypes.CDLL(name)


def key_pair() -> tuple[bytes, bytes]:
    """A public key and its secret one."""
    public, secret = ctypes.create_string_buffer(KEY_BYTES), ctypes.create_string_buffer(KEY_BYTES)
    _library().crypto_box_keypair(public, secret)
    return public.raw, secret.raw


def box(plain: bytes, nonce: bytes, public: bytes, secret: bytes) -> bytes:
    """What only the owner of the public key can open."""
    closed = ctypes.create_string_buffer(len(plain) + MAC_BYTES)
    length = ctypes.c_ulonglong(len(plain))
    assert not _library().crypto_box_easy(closed, plain, length, nonce, public, secret)
    return closed.raw


def opened(closed: bytes, nonce: bytes, public: bytes, secret: bytes) -> bytes | None:
    """What lies in a box; None: it is not for this key, or damaged."""
    if len(closed) < MAC_BYTES:
        return None
    plain = ctypes.create_string_buffer(max(1, len(closed) - MAC_BYTES))
    length = ctypes.c_ulonglong(len(closed))
    if _library().crypto_box_open_easy(plain, closed, length, nonce, public, secret):
        return None
    return plain.raw[: len(closed) - MAC_BYTES]
