"""The servers that `router` is given are named right, and each once."""

import pytest

from coordinator.cli.router import addresses
from proto.errors import ConfigurationError


def test_an_address_may_be_written_in_several_ways() -> None:
    written = ["http://H", "https://h", "http://h:8000/v1", "http://[::1]:8000/"]
    made = ["http://h:80", "https://h:443", "http://h:8000", "http://[::1]:8000"]
    assert addresses(written) == made


@pytest.mark.parametrize(
    "url",
    [
        *("h:8000", "ftp://h", "http://", "http://h:0", "http://h:99999", "http://h/a"),
        *("http://u:p@h", "http://h?x=1", "http://h#x", "http:// h", ""),
    ],
)
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(ConfigurationError, match=r"expected an address like http://host:8000"):
        addresses([url])


def test_a_server_is_named_once() -> None:
    with pytest.raises(ConfigurationError, match="named twice"):
        addresses(["http://h", "http://H:80/v1"])
