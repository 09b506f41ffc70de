"""A reader that draws each element from one of several readers, by their probabilities."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from converter.petastorm.reader_impl.columns import Columns, join, num_rows_of, take_rows
from converter.petastorm.reader_impl.seeds import global_seed

_ROWS_AT_ONCE, _DRAWS_AT_ONCE = 4096, 256
"""Rows that `next_block` draws at once, and draws for single elements; both are guesses."""


class WeightedSamplingReader:
    """Elements of several readers, each drawn from a random one of them. It ends when one of them does.

    It can take a reader's place in loaders. The native form is `mix`.

    ```python
    from converter.petastorm import make_batch_reader
    from converter.petastorm.weighted_sampling_reader import WeightedSamplingReader

    readers = [make_batch_reader("file:///data/rides", schema_fields=["fare"], num_epochs=None) for _ in range(2)]
    with WeightedSamplingReader(readers, [0.1, 0.9]) as mixed:
        print(len(next(mixed).fare))
    ```

    Args:
        readers: at least two, of the same fields, either all of rows, all of batches, or all of the same windows.
        probabilities: one for each reader; they are divided by their sum. If all readers have seeds, draws repeat.

    Raises:
        ValueError: there are too few readers, other numbers of probabilities, or the readers differ.
    """

    def __init__(self, readers: Sequence[Any], probabilities: Sequence[float]) -> None:
        if len(readers) <= 1:
            raise ValueError(f"Two or more readers must be specified. Got {len(readers)}.")
        if len(readers) != len(probabilities):
            raise ValueError(
                "readers and probabilities are expected to be lists of the same length, got "
                f"{len(readers)} and {len(probabilities)}."
            )
        weights = np.asarray(probabilities, np.float64)
        if not np.isfinite(weights).all() or (weights < 0).any() or not weights.any():
            raise ValueError(f"probabilities must be at least 0, and one of them above 0: {list(probabilities)}.")
        for other in readers[1:]:
            _check_alike(readers[0], other)
        self._readers = list(readers)
        self._probabilities = weights / weights.sum()
        seeds: list[Any] = [getattr(reader, "seed", None) for reader in readers]
        self.seed: int | None = None if None in seeds else int(seeds[0])
        self._generator = np.random.default_rng(
            global_seed() if None in seeds else [int(seed) % (1 << 64) for seed in seeds]
        )
        self._drawn: list[int] = []
        """Draws for single elements, in reverse: one at a time takes ten times as long."""

        self._parts: list[list[Columns]] = [[] for _ in readers]
        """Rows of each reader that `next_block` has read and not handed out."""

        self._ending: int | None = None
        """The reader that has ended, if `next_block` has drawn it after the rows that it has handed out."""

        self._ended: int | None = None
        """The reader that ended the last pass."""

        self.batched_output = readers[0].batched_output
        self.ngram = readers[0].ngram
        self.schema = readers[0].schema
        self._is_other_order = [list(reader.schema.fields) != list(self.schema.fields) for reader in readers]

    def __iter__(self) -> WeightedSamplingReader:
        return self

    def __next__(self) -> Any:
        """The next element of a random reader.

        Raises:
            StopIteration: that reader has ended.
        """
        # Blocks were left for elements: the others go on until that reader is drawn again.
        self._ending = None
        number = self._draw_one()
        parts = self._parts[number]
        if not parts:
            try:
                element = next(self._readers[number])
            except StopIteration:
                self._ended = number
                raise
            return self._in_order(element) if self._is_other_order[number] else element
        row = {name: column[0] for name, column in parts[0].items()}
        self._take(number, 1)
        return self.schema.make_namedtuple(**row)

    def _in_order(self, element: Any) -> Any:
        """An element with the fields in the first reader's order."""
        if self.ngram is None:
            return self.schema.make_namedtuple(**element._asdict())
        return {
            offset: self.ngram.get_schema_at_timestep(self.schema, offset).make_namedtuple(**row._asdict())
            for offset, row in element.items()
        }

    def next(self) -> Any:
        """The same as `next(reader)`."""
        return self.__next__()

    @property
    def next_block(self) -> Callable[[], Columns]:
        """A method that returns the next rows as columns, as a reader's does, if all readers have one.

        An element of it is drawn as `next` draws it; the rows of one reader stay in their order.
        """
        if self.ngram is not None or not all(hasattr(reader, "next_block") for reader in self._readers):
            raise AttributeError("next_block: one of the readers hands out rows only.")
        return self._next_batch if self.batched_output else self._next_rows

    def _draw(self, count: int) -> npt.NDArray[np.int64]:
        return self._generator.choice(len(self._readers), count, p=self._probabilities)

    def _draw_one(self) -> int:
        if not self._drawn:
            self._drawn = self._draw(_DRAWS_AT_ONCE).tolist()
        return self._drawn.pop()

    def _next_batch(self) -> Columns:
        number = self._draw_one()
        try:
            block: Columns = self._readers[number].next_block()
        except StopIteration:
            self._ended = number
            raise
        return block

    def _next_rows(self) -> Columns:
        self._end()
        drawn = self._draw(_ROWS_AT_ONCE)
        for number in range(len(self._readers)):
            places = np.flatnonzero(drawn == number)
            num_read = self._read(number, len(places))
            if num_read < len(places):
                # This reader has ended; so the draw that asks it for one more ends all.
                drawn = drawn[: places[num_read]]
                self._ending = number
        if not len(drawn):
            self._end()
        counts = np.bincount(drawn, minlength=len(self._readers))
        starts = np.cumsum(counts) - counts
        rows = np.empty(len(drawn), np.int64)
        taken: list[Columns] = []
        for number, count in enumerate(counts.tolist()):
            rows[drawn == number] = starts[number] + np.arange(count)
            taken += self._take(number, count)
        return {name: take_rows(join([part[name] for part in taken]), rows) for name in self.schema.fields}

    def _end(self) -> None:
        """Raise StopIteration if a reader that has ended was drawn."""
        if self._ending is not None:
            self._ended, self._ending = self._ending, None
            raise StopIteration

    def _read(self, number: int, count: int) -> int:
        """Read at least `count` rows of a reader, if there are so many; returns how many of them there are."""
        parts = self._parts[number]
        num_rows = sum(map(num_rows_of, parts))
        while num_rows < count:
            try:
                parts.append(self._readers[number].next_block())
            except StopIteration:
                break
            num_rows += num_rows_of(parts[-1])
        return min(num_rows, count)

    def _take(self, number: int, count: int) -> list[Columns]:
        """Take the first rows of what was read of a reader."""
        taken, parts = [], self._parts[number]
        while count:
            part = parts.pop(0)
            taken.append({name: column[:count] for name, column in part.items()})
            if num_rows_of(part) > count:
                parts.insert(0, {name: column[count:] for name, column in part.items()})
            count -= num_rows_of(taken[-1])
        return taken

    @property
    def last_row_consumed(self) -> bool:
        """Whether a pass has ended, because one of the readers had handed out all its rows."""
        return self._ended is not None

    def reset(self) -> None:
        """Begin again with the reader that has ended; the others go on.

        Raises:
            NotImplementedError: none has ended.
        """
        if self._ended is None:
            raise NotImplementedError("Currently do not support resetting a reader while in the middle of iteration.")
        # The others may have been read to their ends, too, but not handed out.
        self._readers[self._ended].reset()
        self._ended = self._ending = None

    def stop(self) -> None:
        """Stop all readers."""
        self._parts = [[] for _ in self._readers]
        for reader in self._readers:
            reader.stop()

    def at_stop(self, call: Callable[[], None]) -> None:
        """Call this once the first reader is stopped, as `stop` does."""
        if hasattr(self._readers[0], "at_stop"):
            self._readers[0].at_stop(call)

    def join(self) -> None:
        """Wait for the threads of all readers."""
        for reader in self._readers:
            reader.join()

    def __enter__(self) -> WeightedSamplingReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
        self.join()


def _check_alike(reader: Any, other: Any) -> None:
    """Raise ValueError if two readers hand out different elements."""
    if reader.batched_output != other.batched_output:
        raise ValueError(
            'All readers passed to WeightedSamplingReader should have the same value of "batched_output" attribute: '
            "use make_reader for all of them, or make_batch_reader."
        )
    fields, others = set(reader.schema.fields), set(other.schema.fields)
    if fields != others:
        raise ValueError(
            "All readers passed to WeightedSamplingReader should have the same schema. Only some have the fields "
            f"{', '.join(sorted(fields ^ others))}."
        )
    if (reader.ngram is None) != (other.ngram is None) or (reader.ngram is not None and reader.ngram != other.ngram):
        raise ValueError("All readers passed to WeightedSamplingReader should have the same ngram spec")
