"""No part of a secret is left in a text."""

from __future__ import annotations

import pytest

from converter.portable.redaction import hide_secrets, shows_secrets


@pytest.mark.parametrize("names", [("account_key", "sas_token"), ("sas_token", "account_key")])
def test_a_secret_that_contains_another_one_is_hidden_whole(names: tuple[str, str]) -> None:
    options = dict(zip(names, ("hidden", "hidden-and-more"), strict=True))
    assert hide_secrets("refused: hidden-and-more, then hidden", options) == "refused: ***, then ***"


@pytest.mark.parametrize("is_cause", [True, False])
def test_a_secret_is_seen_in_every_error_that_a_traceback_shows(is_cause: bool) -> None:
    try:
        try:
            raise KeyError("no answer with the key hidden")
        except KeyError as error:
            raise OSError("no answer") from (error if is_cause else None)
    except OSError as error:
        shown = error
    if not is_cause:
        # As an error that is raised while another one is handled, without `from`.
        shown.__suppress_context__ = False
    assert shows_secrets(shown, {"account_key": "hidden"})
    assert not shows_secrets(shown, {"account_key": "another"})
