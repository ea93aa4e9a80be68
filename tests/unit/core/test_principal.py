"""Whose KV blocks: a key's begin alike, those of a gateway's user among them, each salt's too."""

from headway.core.principal import KEY_BYTES, USER_BYTES, Principal

KEY = Principal(name="k", cache_salt="s", cache_owner="k")
USER = Principal(name="k/u", cache_salt="t", cache_owner="k u")


def test_all_of_a_key_begin_alike_and_no_two_salts_are_one():
    mine, salted = KEY.block_owner(), KEY.salted("x").block_owner()
    assert mine[:USER_BYTES] == salted[:USER_BYTES] and mine != salted and len(mine) == 32


def test_a_gateways_user_is_part_of_its_key():
    mine, users = KEY.block_owner(), USER.salted("x").block_owner()
    assert mine[:KEY_BYTES] == users[:KEY_BYTES]
    assert mine[:USER_BYTES] != users[:USER_BYTES] == USER.block_owner()[:USER_BYTES]


def test_another_key_of_the_same_salt_is_another_owner():
    """As with --share-prefix-cache, where all have one salt."""
    other = Principal(name="o", cache_salt="s", cache_owner="o")
    assert KEY.block_owner()[:KEY_BYTES] != other.block_owner()[:KEY_BYTES]
