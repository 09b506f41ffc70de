"""What `state_dict()` holds: where a run stands, and whether a loader may resume from there."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from converter.errors import StateMismatchError

Uneven = Literal["drop", "pad", "keep"]
UNEVEN = ("drop", "pad", "keep")

Past = tuple[tuple[int, int], ...]
"""What was read of an epoch: stretches of (number of shards, rows that each of them read), in order."""

STATE_VERSION = 1

MAX_EPOCH = 1 << 62
"""Worker processes get the epoch as an int64."""


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """Where a run stands, and in which rows and order."""

    fingerprint: str
    """`Manifest.live_fingerprint`: of the rows, and of which are selected."""

    shuffle: bool
    seed: int
    window_rows: int
    window_groups: int
    """The most row groups of a window; 0 for any number."""

    uneven: Uneven
    epoch: int
    epochs_done: int
    """Epochs of this iteration that were complete before this one."""

    past: Past
    bucket_by: str = ""
    """The column by whose lengths rows come together; empty for none."""

    windows: str = ""
    """Those of a mixture's sources; empty if it is none, and in older states."""

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON or `torch.save`."""
        fields = {name: getattr(self, name) for name in _STATE_TYPES}
        fields |= {name: getattr(self, name) for name in _TEXTS if getattr(self, name)}
        return {"version": STATE_VERSION, **fields, "past": [list(stretch) for stretch in self.past]}

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> State:
        """The inverse of `to_dict`.

        Raises:
            StateMismatchError: it is no state of this package's loaders, or a newer version wrote it.
        """
        try:
            version = value["version"]
            fields = {name: value[name] for name in _STATE_TYPES}
            past = [tuple(stretch) for stretch in value["past"]]
            texts = {name: value.get(name, "") for name in _TEXTS}
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
            raise StateMismatchError(
                f"This is no state of a loader ({type(error).__name__}: {error}). Pass what its state_dict() returned."
            ) from error
        if type(version) is not int or version != STATE_VERSION:
            raise StateMismatchError(
                f"The state has version {shown_value(version)}, and this package reads version {STATE_VERSION}. "
                "Install the release that saved it, or start from the beginning."
            )
        wrong = {name: fields[name] for name, kind in _STATE_TYPES.items() if type(fields[name]) is not kind}
        wrong |= {
            name: fields[name]
            for name in ("epoch", "epochs_done")
            if name not in wrong and not 0 <= fields[name] < MAX_EPOCH
        }
        wrong |= {name: text for name, text in texts.items() if type(text) is not str}
        for stretch in past:
            if len(stretch) != 2 or not all(type(number) is int and number > 0 for number in stretch):
                wrong.setdefault("past", stretch)
        if wrong:
            shown = ", ".join(f"{name}={shown_value(wrong_value)}" for name, wrong_value in wrong.items())
            raise StateMismatchError(
                f"The state holds values that no loader wrote: {shown}. Take another checkpoint, or start from the "
                "beginning."
            )
        return cls(**fields, past=tuple(past), **texts)

    def check(self, current: State) -> None:
        """Refuse to resume a loader whose own state `current` is of other rows or another order.

        Raises:
            StateMismatchError: the message says what differs.
        """
        names = ["fingerprint", "shuffle", "uneven", "bucket_by"]
        if self.shuffle:
            names += ["seed", "window_rows", "window_groups", *(["windows"] if self.windows else [])]
        shown_names = {
            "fingerprint": "the rows (fingerprint)",
            "window_rows": "shuffle_window_rows",
            "window_groups": "shuffle_window_rows (row groups of a window)",
            "windows": "shuffle_window_rows (the windows of the sources)",
        }
        differs = [
            f"{shown_names.get(name, name)} was {shown_value(before)} and is {shown_value(now)}"
            for name in names
            if (before := getattr(self, name)) != (now := getattr(current, name))
        ]
        is_of_other_rows = self.fingerprint != current.fingerprint
        if differs:
            same = (
                "the same rows (of a Delta table, its version=) and arguments"
                if is_of_other_rows
                else "the same arguments"
            )
            raise StateMismatchError(
                f"The state is of another run: {'; '.join(differs)}. Make the loader with {same}, or start from the "
                "beginning."
            )

    def after(self, shard_count: int, rows_done: int) -> State:
        """The state after each of `shard_count` shards has read `rows_done` more rows."""
        if not rows_done:
            return self
        if self.past and self.past[-1][0] == shard_count:
            # The same number of shards gets the same parts, so two stretches become one.
            *before, (_, rows_before) = self.past
            return dataclasses.replace(self, past=(*before, (shard_count, rows_before + rows_done)))
        return dataclasses.replace(self, past=(*self.past, (shard_count, rows_done)))


def shown_value(value: Any) -> str:
    """A short text of any value, for errors: Python refuses to print an integer of 5,000 digits."""
    if isinstance(value, (list, tuple)):
        parts = ["[…]" if isinstance(part, (list, tuple)) else shown_value(part) for part in value[:4]]
        return f"[{', '.join(parts)}{', …' if len(value) > 4 else ''}]"
    if isinstance(value, int) and value.bit_length() > 256:
        return f"an integer of {value.bit_length()} bits"
    try:
        text = repr(value)
    except Exception:  # noqa: BLE001 (its own `repr` may raise anything)
        text = type(value).__name__
    return text if len(text) <= 200 else f"{text[:200]}…"


_TEXTS = ("bucket_by", "windows")
_STATE_TYPES = {
    "fingerprint": str, "shuffle": bool, "seed": int, "window_rows": int, "window_groups": int, "uneven": str,
    "epoch": int, "epochs_done": int,
}  # fmt: skip
