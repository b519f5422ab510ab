"""Whose request it is, by the address from which it came and what proxies say."""

import pytest

from coordinator.http.clients import client_at, networks

PROXIES = networks(("10.0.0.1", "192.168.0.0/16", "::1"))


@pytest.mark.parametrize("forwarded", [[], ["1.1.1.1"], ["1.1.1.1, 2.2.2.2", "10.0.0.1"]])
def test_a_client_that_is_no_trusted_proxy_cannot_say_that_it_is_another(
    forwarded: list[str],
) -> None:
    assert client_at("5.5.5.5", forwarded, PROXIES) == "5.5.5.5"
    assert client_at("10.0.0.1", forwarded, ()) == "10.0.0.1"


@pytest.mark.parametrize(
    ("forwarded", "client"),
    [
        ([], "10.0.0.1"),
        ([""], "10.0.0.1"),
        (["6.6.6.6"], "6.6.6.6"),
        (["made.up, 1.1.1.1, 6.6.6.6"], "6.6.6.6"),
        (["1.1.1.1", "6.6.6.6"], "6.6.6.6"),
        (["1.1.1.1, 6.6.6.6, 192.168.7.7"], "6.6.6.6"),
        (["6.6.6.6:4711"], "6.6.6.6"),
        (["192.168.7.7"], "192.168.7.7"),
        (["1.1.1.1, unknown"], "10.0.0.1"),
        (["[2001:db8::7]:4711"], "2001:db8::/64"),
        (["::ffff:6.6.6.6"], "6.6.6.6"),
    ],
)
def test_behind_a_proxy_the_last_address_that_is_not_trusted_is_the_client(
    forwarded: list[str], client: str
) -> None:
    assert client_at("10.0.0.1", forwarded, PROXIES) == client


def test_who_has_many_addresses_of_one_ipv6_network_is_one_client() -> None:
    names = {client_at(f"2001:db8::{last:x}", [], PROXIES) for last in (1, 2, 1 << 15)}
    assert names == {"2001:db8::/64"}
    assert client_at("2001:db8:0:1::1", [], PROXIES) not in names


def test_a_peer_without_an_address_has_the_name_that_it_came_with() -> None:
    assert client_at("", ["1.1.1.1"], PROXIES) == ""
    assert client_at("testclient", ["1.1.1.1"], PROXIES) == "testclient"


@pytest.mark.parametrize("text", ["*", "10.0.0.0/33", "proxy.example", ""])
def test_what_is_no_address_is_no_network(text: str) -> None:
    with pytest.raises(ValueError, match=r".*"):
        networks((text,))
