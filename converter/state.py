"""Where a run stands: what `state_dict()` holds, and whether a loader may go on from there."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from converter.errors import StateMismatchError

Uneven = Literal["drop", "pad", "keep"]
UNEVEN = ("drop", "pad", "keep")

Past = tuple[tuple[int, int], ...]
"""What was read of an epoch: (number of shards, rows that each of them has done), one after the other."""

STATE_VERSION = 1

_MAX_EPOCH = 1 << 62
"""Worker processes are told the epoch as an int64."""


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """Where a run stands, and of which rows and order: what `state_dict()` holds."""

    fingerprint: str
    """Of the rows, and of which of them are selected."""

    shuffle: bool
    seed: int
    window_rows: int
    window_groups: int
    """Row groups that a window may have; 0 for any number."""

    uneven: Uneven
    epoch: int
    epochs_done: int
    """Epochs that the iteration had ended before this one."""

    past: Past

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON or `torch.save`."""
        known = {name: getattr(self, name) for name in _STATE_TYPES}
        return {"version": STATE_VERSION, **known, "past": [list(stretch) for stretch in self.past]}

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> State:
        """The inverse of `to_dict`.

        Raises:
            StateMismatchError: this is no state of a loader of this package, or of a newer version of it.
        """
        try:
            version = value["version"]
            known = {name: value[name] for name in _STATE_TYPES}
            past = [tuple(stretch) for stretch in value["past"]]
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise StateMismatchError(
                f"This is no state of a loader of this package ({type(error).__name__}: {error})."
            ) from error
        if type(version) is not int or version != STATE_VERSION:
            raise StateMismatchError(
                f"The state has version {shown_value(version)}, and this package reads version {STATE_VERSION}."
            )
        wrong = {name: known[name] for name, kind in _STATE_TYPES.items() if type(known[name]) is not kind}
        # No loader counts to 2**62.
        wrong |= {
            name: known[name]
            for name in ("epoch", "epochs_done")
            if name not in wrong and not 0 <= known[name] < _MAX_EPOCH
        }
        stretches = [one for one in past if not (len(one) == 2 and all(type(part) is int and part > 0 for part in one))]
        if stretches:
            wrong["past"] = stretches[0]
        if wrong:
            shown = ", ".join(f"{name}={shown_value(one)}" for name, one in wrong.items())
            raise StateMismatchError(f"The state holds values that no loader wrote: {shown}.")
        return cls(**known, past=tuple(past))

    def check(self, current: State) -> None:
        """Refuse to go on where `current`, the loader's own state, is of other rows or another order.

        Raises:
            StateMismatchError: the message says what differs.
        """
        names = ["fingerprint", "shuffle", "uneven"] + (
            ["seed", "window_rows", "window_groups"] if self.shuffle else []
        )
        what = {
            "fingerprint": "the rows (fingerprint)",
            "window_rows": "shuffle_window_rows",
            "window_groups": "shuffle_window_rows (row groups of a window)",
        }
        differs = [
            f"{what.get(name, name)} was {shown_value(before)} and is {shown_value(now)}"
            for name in names
            if (before := getattr(self, name)) != (now := getattr(current, name))
        ]
        if differs:
            raise StateMismatchError(
                f"The state is of another run: {'; '.join(differs)}. Make the loader as it was, or begin anew."
            )

    def after(self, shard_count: int, rows_done: int) -> State:
        """The state once each of `shard_count` shards has done so many rows more."""
        past = self.past
        if rows_done:
            if past and past[-1][0] == shard_count:
                # Cut anew among as many shards, each gets what it had: so two stretches are one.
                past, rows_done = past[:-1], past[-1][1] + rows_done
            past = (*past, (shard_count, rows_done))
        return dataclasses.replace(self, past=past)


def shown_value(value: Any) -> str:
    """A value of a state from elsewhere, short, whatever it is: Python does not print an integer of 5,000 digits."""
    if isinstance(value, (list, tuple)):
        shown = ", ".join(shown_value(one) if not isinstance(one, (list, tuple)) else "[…]" for one in value[:4])
        return f"[{shown}{', …' if len(value) > 4 else ''}]"
    if isinstance(value, int) and value.bit_length() > 256:
        return f"an integer of {value.bit_length()} bits"
    try:
        shown = repr(value)
    except Exception:  # noqa: BLE001 (its own `repr` may raise anything)
        shown = type(value).__name__
    return shown if len(shown) <= 200 else f"{shown[:200]}…"


_STATE_TYPES = {
    "fingerprint": str, "shuffle": bool, "seed": int, "window_rows": int, "window_groups": int, "uneven": str,
    "epoch": int, "epochs_done": int,
}  # fmt: skip
