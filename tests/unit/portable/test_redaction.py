"""No part of a secret is left in a text."""

from __future__ import annotations

import pytest

from converter.portable.redaction import hide_secrets


@pytest.mark.parametrize("names", [("account_key", "sas_token"), ("sas_token", "account_key")])
def test_a_secret_that_contains_another_one_is_hidden_whole(names: tuple[str, str]) -> None:
    options = dict(zip(names, ("hidden", "hidden-and-more"), strict=True))
    assert hide_secrets("refused: hidden-and-more, then hidden", options) == "refused: ***, then ***"
