"""Loaders of torch batches over a reader, with Petastorm's names: whole columns are shuffled, cut and handed out."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, MutableMapping, Sequence
from decimal import Decimal
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from converter.frameworks.torch import TorchDataLoader  # noqa: F401 (first: it names the extra if torch is missing)
from converter.frameworks.torch.tensors import split_run
from converter.loading.epochs import as_generator
from converter.petastorm.reader_impl.batch_runs import (
    blocks_of,
    has_columns,
    native_runs,
    run_of,
    runs_in_order,
    shuffled_runs,
    slice_rows,
)
from converter.petastorm.reader_impl.column_pool import ColumnPool
from converter.petastorm.reader_impl.columns import join, num_rows_of, row_bytes_of, take_rows
from converter.petastorm.reader_impl.pytorch_shuffling_buffer import torch_seed
from converter.petastorm.reader_impl.seeds import generator_of, global_seed
from converter.petastorm.reader_impl.shuffling_buffer import (
    NoopShufflingBuffer,
    RandomShufflingBuffer,
    ShufflingBufferBase,
)
from converter.reading.runs import Run

import torch  # isort: skip
from torch.utils.data import default_collate  # isort: skip

logger = logging.getLogger(__name__)

Array = npt.NDArray[Any]
Batch = dict[Any, Any]
Transform = Callable[[Any], Any]

_UNBOUNDED = 1 << 62
_PIECE_BYTES = 8 << 20

_PARALLEL_ITER_ERROR = (
    "You must finish a full pass of Petastorm DataLoader before making another pass from the beginning. If you do need "
    "to terminate early and restart from beginning, please re-create the reader and the data loader."
)
