#!/usr/bin/env python3
"""How fast bytes become tensors: JPEG, `.npy` and plain numbers, beside what the machine can do, and the peers.

    python tests/bench/images.py                        # all of it, with the peers: some fifteen minutes on two cores
    python tests/bench/images.py --quick                # small, without the peers: does it run at all?
    python tests/bench/images.py --only jpeg npy --data DIR
    python tests/bench/images.py --without-peers

Each way to read runs in turns (A B C A B C …), each turn in a fresh process, which reads once to be warm and then for
the figures. Medians are compared. All have as many threads or workers as there are cores, and batches of 256 rows; one
element of each of their tensors is read. "CPU" is that of all threads and child processes. An epoch of a peer that is
not over after `--peer-seconds` is left, and counts from behind its first batch.

jpeg: 20,000 JPEGs of 224×224 (quality 90), cut and flipped at random out of photographs that scikit-learn and
scikit-image bring, and a label; Parquet of four files, row groups of about 8 MB. The limit is simplejpeg alone: the
same bytes in memory, in an order made before, decoded by as many threads, each into an array of its own that is warm;
it makes no batches. Peers read the same JPEGs and give the same pixels as uint8. Each shuffles by its own means:
Petastorm with its codec and a buffer of 2,048 rows, Mosaic Streaming (MDS, `jpeg`) in its own order, Hugging Face
datasets with `Image()` and torch's sampler, Ray Data with Pillow in `map_batches` and a buffer of 1,024 decoded rows,
DeltaTorch with `load_image_using_pil` on a Delta table with an id, within record batches.

decode_at: the same JPEGs written by Spark's executors into a cache, with `decode_at="read"` and with "write".

libraries: 4,000 of the same JPEGs, decoded to RGB by five libraries: with one thread, and with as many as cores.
npy: 200,000 rows of `.npy` bytes of float32 (28, 28), beside `np.load` and `np.stack` in a loop over the same bytes in
memory. raw: 200,000 rows of 28×28 bytes as BINARY and as FIXED_LEN_BYTE_ARRAY. deltatorch: the rows of raw with a label
and an id in a Delta table.

Peers, libraries and photographs have environments of their own, made by pip on first use. Prints Markdown. At import
this file needs nothing but NumPy where it is given a job, because it runs in those environments too.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import functools
import importlib.metadata
import io
import itertools
import json
import os
import platform
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from peers_read import timed_epoch, tree_cpu_seconds

IS_JOB = "--job" in sys.argv
if not IS_JOB:
    # A peer's environment has none of these.
    import platformdirs
    import pyarrow as pa
    import pyarrow.parquet as pq
    import read
    from read import Goal, Peers, UnavailableError, Way, in_turns, last_line, print_ratios, print_table, print_ways, say

    import converter

Job = dict[str, Any]
Epoch = dict[str, Any]

BATCH_SIZE = 256
SIDE, QUALITY = 224, 90
ROW_GROUP_BYTES = 8 << 20
PETASTORM_BUFFER, RAY_BUFFER = 2048, 1024
NUM_THREADS = os.cpu_count() or 1


# --- The jobs: each runs in a process of its own ----------------------------------------------------------------------


def epochs_of(batches: Callable[[], Iterable[Any]], job: Job) -> list[Epoch]:
    """One epoch to be warm, of half the time at most, and one that counts, or up to five short ones."""
    timed_epoch(batches, max_seconds=job["max_seconds"] / 2)
    return counted(batches, job)


def counted(batches: Callable[[], Iterable[Any]], job: Job) -> list[Epoch]:
    is_tree = job["name"] not in ("ours", "np_load")
    cpu_seconds = tree_cpu_seconds if is_tree else time.process_time
    found: list[Epoch] = []
    while not found or (len(found) < 5 and sum(epoch["seconds"] for epoch in found) < 2):
        found.append(timed_epoch(batches, max_seconds=job["max_seconds"], cpu_seconds=cpu_seconds))
    return found


def workers() -> dict[str, Any]:
    """Options of torch's DataLoader: its workers start once, in the epoch that does not count."""
    return {"num_workers": NUM_THREADS, "persistent_workers": True}


def checked(batches: Iterable[Any], shape: tuple[int, ...] = (SIDE, SIDE, 3)) -> Iterator[Any]:
    """The batches of a peer; its pictures must be whole, as uint8."""
    for number, batch in enumerate(batches):
        pictures = batch["image"]
        found = (str(pictures.dtype).removeprefix("torch."), sorted(pictures.shape[1:]))
        if not number and found != ("uint8", sorted(shape)):
            raise ValueError(f"the pictures are {found[0]} {tuple(pictures.shape)}")
        yield batch


def bytes_of(folder: str, column: str) -> list[bytes]:
    """All values of a column, in memory."""
    import pyarrow.parquet

    return pyarrow.parquet.read_table(folder, columns=[column]).column(column).to_pylist()


def ours(job: Job) -> list[Epoch]:
    from converter import make_delta_converter, make_parquet_converter, open_converter
    from converter.decoders import Image, NumPy

    if job["is_cache"]:
        made = open_converter(job["path"])
    else:
        made = (make_delta_converter if job["is_delta"] else make_parquet_converter)(
            job["path"],
            shapes={name: tuple(shape) for name, shape in job["shapes"].items()},
            decode={
                name: NumPy() if options == "npy" else Image(**options | {"size": tuple(options["size"])})
                for name, options in job["decode"].items()
            },
        )
    with made, made.make_torch_dataloader(batch_size=BATCH_SIZE, shuffle=True) as loader:
        return epochs_of(lambda: loader, job)


def decode_all(decode: Callable[[int, Any], Any], num_rows: int, num_threads: int) -> Epoch:
    """Decode rows in a random order; `decode` is given a row and a place that is the thread's own."""
    order = np.random.default_rng(0).permutation(num_rows)
    # Written here, so that no epoch pays for their pages.
    places = np.ones((num_threads, 32, SIDE, SIDE, 3), np.uint8)
    pieces: queue.SimpleQueue[list[int]] = queue.SimpleQueue()
    for start in range(0, num_rows, 32):
        pieces.put(order[start : start + 32].tolist())

    def work(thread: int) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                for row, place in zip(pieces.get_nowait(), places[thread], strict=False):
                    decode(row, place)

    begin_cpu, begin = time.process_time(), time.perf_counter()
    with concurrent.futures.ThreadPoolExecutor(num_threads) as pool:
        list(pool.map(work, range(num_threads)))
    seconds, cpu_seconds = time.perf_counter() - begin, time.process_time() - begin_cpu
    return {"rows": num_rows, "seconds": seconds, "cpu_seconds": cpu_seconds}


def limit(job: Job) -> list[Epoch]:
    import simplejpeg

    values = bytes_of(job["path"], "image")

    def decode(row: int, place: Any) -> None:
        simplejpeg.decode_jpeg(values[row], buffer=place)

    return [decode_all(decode, len(values), NUM_THREADS) for _ in range(2)][1:]


def np_load(job: Job) -> list[Epoch]:
    import torch

    values = bytes_of(job["path"], "x")

    def batches() -> Iterator[dict[str, Any]]:
        for start in range(0, len(values), BATCH_SIZE):
            rows = [np.load(io.BytesIO(value)) for value in values[start : start + BATCH_SIZE]]
            yield {"x": torch.from_numpy(np.stack(rows))}

    return epochs_of(batches, job)


def library(job: Job) -> list[Epoch]:
    with np.load(job["path"]) as stored:
        data, edges = stored["data"].tobytes(), stored["edges"][: job["num_images"] + 1].tolist()
    values = [data[start:stop] for start, stop in itertools.pairwise(edges)]
    decode = _decoder(job["library"])
    if decode(values[0]) != (SIDE, SIDE, 3):
        raise ValueError(f"the picture is {decode(values[0])}")
    found = [decode_all(lambda row, _: decode(values[row]), len(values), job["num_threads"]) for _ in range(2)]
    return found[1:]


def _decoder(name: str) -> Callable[[bytes], tuple[int, ...]]:
    """Decodes with a library, as RGB; returns the picture's height, width and channels."""
    if name == "simplejpeg":
        import simplejpeg

        return lambda value: simplejpeg.decode_jpeg(value).shape
    if name == "imagecodecs":
        import imagecodecs

        return lambda value: imagecodecs.jpeg8_decode(value).shape
    if name == "opencv":
        import cv2

        cv2.setNumThreads(0)
        return lambda value: cv2.imdecode(np.frombuffer(value, np.uint8), cv2.IMREAD_COLOR_RGB).shape
    if name == "torchvision":
        import torch
        import torchvision.io

        torch.set_num_threads(1)

        def decode(value: bytes) -> tuple[int, ...]:
            picture = torchvision.io.decode_jpeg(torch.frombuffer(value, dtype=torch.uint8))
            return (*picture.shape[1:], picture.shape[0])

        return decode
    import PIL.Image

    return lambda value: np.asarray(PIL.Image.open(io.BytesIO(value)).convert("RGB")).shape


def photographs(job: Job) -> list[Epoch]:
    """JPEGs cut out of photographs, as an array of bytes and the edges between them."""
    import skimage.data
    import sklearn.datasets
    from PIL import Image

    names = ("astronaut", "chelsea", "coffee", "rocket", "hubble_deep_field", "retina", "immunohistochemistry")
    pictures = [*sklearn.datasets.load_sample_images().images]
    for name in names:
        # Those that are not in the wheel would be fetched.
        with contextlib.suppress(Exception):
            pictures.append(getattr(skimage.data, name)())
    with contextlib.suppress(Exception):
        pictures += skimage.data.stereo_motorcycle()[:2]
    generator = np.random.default_rng(7)
    values, labels = [], []
    for _ in range(job["num_rows"]):
        label = int(generator.integers(len(pictures)))
        picture = pictures[label][..., :3]
        top, left = (int(generator.integers(side - SIDE + 1)) for side in picture.shape[:2])
        cut = picture[top : top + SIDE, left : left + SIDE]
        cut = cut[:, ::-1] if generator.integers(2) else cut
        stream = io.BytesIO()
        Image.fromarray(np.ascontiguousarray(cut)).save(stream, "JPEG", quality=QUALITY)
        values.append(stream.getvalue())
        labels.append(label)
    edges = np.cumsum([0, *map(len, values)])
    np.savez(job["path"], data=np.frombuffer(b"".join(values), np.uint8), edges=edges, labels=np.array(labels))
    return []


def petastorm_describe(job: Job) -> list[Epoch]:
    """What Petastorm wants beside the files; it then takes the JPEGs in them as its codec's."""
    import pickle

    import pyarrow.parquet
    from petastorm.codecs import CompressedImageCodec, ScalarCodec
    from petastorm.etl import dataset_metadata
    from petastorm.unischema import Unischema, UnischemaField
    from pyspark.sql.types import IntegerType

    codec = CompressedImageCodec("jpeg", QUALITY)
    schema = Unischema(
        "Pictures",
        [
            UnischemaField("image", np.uint8, (SIDE, SIDE, 3), codec, False),
            UnischemaField("label", np.int32, (), ScalarCodec(IntegerType()), False),
        ],
    )
    paths = sorted(Path(job["path"]).glob("*.parquet"))
    counts = {path.name: pyarrow.parquet.read_metadata(path).num_row_groups for path in paths}
    known = {
        dataset_metadata.UNISCHEMA_KEY: pickle.dumps(schema),
        dataset_metadata.ROW_GROUPS_PER_FILE_KEY: json.dumps(counts).encode(),
    }
    plain = pyarrow.parquet.read_schema(paths[0])
    pyarrow.parquet.write_metadata(plain.with_metadata(known), os.path.join(job["path"], "_common_metadata"))
    return []


def petastorm(job: Job) -> list[Epoch]:
    import torch
    from petastorm import make_reader
    from petastorm.pytorch import DataLoader

    # Measured: 2.2 k rows/s; with torch's threads, which wait for each other beside those that decode, 0.6 k.
    torch.set_num_threads(1)

    def batches() -> Iterator[Any]:
        with make_reader(
            f"file://{os.path.abspath(job['path'])}",
            num_epochs=1,
            reader_pool_type="thread",
            workers_count=NUM_THREADS,
            shuffle_row_groups=True,
        ) as reader:
            yield from checked(DataLoader(reader, BATCH_SIZE, shuffling_queue_capacity=PETASTORM_BUFFER))

    return epochs_of(batches, job)


def mosaic_write(job: Job) -> list[Epoch]:
    import PIL.Image
    from streaming import MDSWriter

    with np.load(job["source"]) as stored, tempfile.TemporaryDirectory() as folder:
        data, edges, labels = stored["data"].tobytes(), stored["edges"].tolist(), stored["labels"].tolist()
        with MDSWriter(out=job["path"], columns={"image": "jpeg", "label": "int"}, progress_bar=False) as writer:
            for number, label in enumerate(labels):
                # From a file it takes the bytes as they are; else it would encode the pixels once more.
                path = f"{folder}/one.jpg"
                Path(path).write_bytes(data[edges[number] : edges[number + 1]])
                with PIL.Image.open(path) as picture:
                    writer.write({"image": picture, "label": label})
    return []


def mosaic(job: Job) -> list[Epoch]:
    import streaming
    import torch

    class Pictures(streaming.StreamingDataset):  # type: ignore[misc]
        def __getitem__(self, row: Any) -> Any:
            found = super().__getitem__(row)
            return {"image": torch.from_numpy(np.array(found["image"])), "label": found["label"]}

    streaming.base.util.clean_stale_shared_memory()
    dataset = Pictures(local=job["path"], shuffle=True, batch_size=BATCH_SIZE)
    loader = torch.utils.data.DataLoader(dataset, batch_size=BATCH_SIZE, **workers())
    return epochs_of(lambda: checked(loader), job)


def datasets(job: Job) -> list[Epoch]:
    import torch
    from datasets import Image, disable_progress_bars, load_dataset

    disable_progress_bars()
    files = sorted(map(str, Path(job["path"]).glob("*.parquet")))
    stored = load_dataset("parquet", data_files=files, split="train", cache_dir=f"{job['path']}-datasets")
    # Pillow's pictures become tensors of (channels, height, width).
    pictures = stored.cast_column("image", Image()).with_format("torch")
    loader = torch.utils.data.DataLoader(pictures, batch_size=BATCH_SIZE, shuffle=True, **workers())
    return epochs_of(lambda: checked(loader), job)


def ray(job: Job) -> list[Epoch]:
    import ray
    import ray.data

    ray.init(num_cpus=NUM_THREADS, object_store_memory=2 << 30, include_dashboard=False, log_to_driver=False)
    ray.data.DataContext.get_current().enable_progress_bars = False

    def decode(batch: dict[str, Any]) -> dict[str, Any]:
        # Where this runs nothing else has imported it.
        import PIL.Image

        pictures = [np.asarray(PIL.Image.open(io.BytesIO(value))) for value in batch["image"]]
        return {"image": np.stack(pictures), "label": batch["label"]}

    def batches(path: str = job["path"]) -> Iterable[Any]:
        dataset = ray.data.read_parquet(path, shuffle="files").map_batches(decode, batch_size=BATCH_SIZE)
        return checked(
            dataset.iter_torch_batches(
                batch_size=BATCH_SIZE,
                prefetch_batches=4,
                local_shuffle_buffer_size=RAY_BUFFER,
                local_shuffle_seed=0,
            )
        )

    # An epoch that is left keeps the CPUs from the next one, so a file is read to be warm, and then all of them.
    timed_epoch(lambda: batches(str(next(Path(job["path"]).glob("*.parquet")))))
    found = counted(batches, job | {"max_seconds": 60.0})
    ray.shutdown()
    return found


def deltatorch(job: Job) -> list[Epoch]:
    from deltatorch import FieldSpec, create_pytorch_dataloader

    if job["is_jpeg"]:
        image, shape = FieldSpec("image", load_image_using_pil=True, transform=np.array), (SIDE, SIDE, 3)
    else:
        image, shape = FieldSpec("image", decode_numpy_and_apply_shape=(28, 28)), (28, 28)
    loader = create_pytorch_dataloader(
        job["path"],
        id_field="id",
        fields=[image, FieldSpec("label")],
        batch_size=BATCH_SIZE,
        shuffle=True,
        **workers(),
        # deltalake refuses to work in a process that was forked.
        multiprocessing_context="spawn",
    )
    return epochs_of(lambda: checked(loader, shape), job)


JOBS: dict[str, tuple[Callable[[Job], list[Epoch]], tuple[str, ...]]] = {
    "ours": (ours, ("simplejpeg", "pillow")),
    "limit": (limit, ("simplejpeg", "pillow")),
    "np_load": (np_load, ("simplejpeg", "pillow")),
    "library": (library, ("simplejpeg", "imagecodecs", "opencv-python-headless", "torchvision", "pillow")),
    "photographs": (photographs, ("scikit-learn", "scikit-image", "pillow")),
    "petastorm_describe": (petastorm_describe, ()),
    "petastorm": (petastorm, ("petastorm", "opencv-python-headless", "pyarrow", "numpy", "torch")),
    "mosaic_write": (mosaic_write, ()),
    "mosaic": (mosaic, ("mosaicml-streaming", "pillow", "numpy", "torch")),
    "datasets": (datasets, ("datasets", "pillow", "pyarrow", "numpy", "torch")),
    "ray": (ray, ("ray", "pillow", "pyarrow", "numpy", "torch")),
    "deltatorch": (deltatorch, ("deltatorch", "deltalake", "pillow", "pyarrow", "numpy", "torch")),
}
"""What each does, and the packages whose versions are told."""


def do_job(job: Job) -> None:
    """Print what a job found as one line of JSON, the last of the output."""
    run, packages = JOBS[job["name"]]
    epochs = run(job)
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in packages)
    print(json.dumps({"epochs": epochs, "versions": f"{versions}, Python {platform.python_version()}"}))


# --- The environments -------------------------------------------------------------------------------------------------

OWN = "own"
PEERS = {
    "petastorm_images": "Petastorm",
    "images_mosaic": "Mosaic Streaming",
    "images_datasets": "Hugging Face datasets",
    "images_ray": "Ray Data",
    "images_deltatorch": "DeltaTorch",
}
TOOLS = {"images_photographs": "The photographs", "images_libraries": "The libraries"}


def enter_requirements() -> None:
    """Name the environments to read.py, which makes them."""
    with_ours = read.REQUIREMENTS["deltatorch"][-3:]
    read.TITLES.update(PEERS | TOOLS | {OWN: "Ours"})
    read.REQUIREMENTS.update(
        petastorm_images=[*read.REQUIREMENTS["petastorm"], "opencv-python-headless==4.11.0.86"],
        images_mosaic=["mosaicml-streaming==0.13.0", "pillow==13.0.0", with_ours[0]],
        images_datasets=["datasets==5.2.0", "pillow==13.0.0", *with_ours],
        images_ray=["ray[data]==2.60.0", "pydantic", "pillow==13.0.0", *with_ours],
        images_deltatorch=[*read.REQUIREMENTS["deltatorch"], "pillow==13.0.0"],
        images_photographs=["scikit-learn==1.9.1", "scikit-image==0.26.0", "pillow==13.0.0"],
        images_libraries=[
            *("pillow==13.0.0", "simplejpeg==1.9.0", "opencv-python-headless==5.0.0.93", "imagecodecs==2026.3.6"),
            *("torchvision==0.29.2", *with_ours[:2]),
        ],
    )


@dataclass(slots=True)
class Bench:
    """What every section needs."""

    options: argparse.Namespace
    folder: str
    versions: dict[str, str] = field(default_factory=dict)
    _peers: Any = None
    _tools: Any = None

    def __post_init__(self) -> None:
        self._peers = Peers(self.options)
        # The photographs are wanted without peers too.
        self._tools = Peers(argparse.Namespace(**vars(self.options) | {"without_peers": False}))

    def run(self, environment: str, name: str, **options: Any) -> list[Epoch]:
        """Do a job in a fresh process of an environment."""
        if environment == OWN:
            python = sys.executable
        else:
            python = (self._tools if environment == "images_photographs" else self._peers)._python(environment)
        max_seconds = self.options.peer_seconds if environment in PEERS or name == "np_load" else 300.0
        usual = {"is_delta": False, "is_cache": False, "shapes": {}, "decode": {}}
        job = {"name": name, "max_seconds": max_seconds} | usual | options
        variables = read.clean_environment() | {"HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore"}
        if environment == OWN:
            # That of this program, wherever it came from.
            variables["PYTHONPATH"] = os.path.dirname(os.path.dirname(os.path.abspath(converter.__file__)))
        with tempfile.TemporaryFile("w+") as errors:
            process = subprocess.Popen(
                [python, os.path.abspath(__file__), "--job", json.dumps(job)],
                env=variables,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                start_new_session=True,
            )
            try:
                output, _ = process.communicate(timeout=2 * max_seconds + 120)
            except subprocess.TimeoutExpired:
                raise UnavailableError(f"did not end within {2 * max_seconds + 120:.0f} seconds") from None
            finally:
                # What it started too.
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            errors.seek(0)
            if process.returncode:
                said = errors.read()
                if self.options.verbose:
                    print(said, file=sys.stderr)
                raise UnavailableError(last_line(said) or f"ended with {process.returncode}")
        found = json.loads(last_line(output))
        self.versions[environment] = found["versions"]
        return found["epochs"]

    def way(self, environment: str, name: str, num_rows: int, **options: Any) -> Way:
        run = functools.partial(self.run, environment, name, **options)
        return Way(run=run, num_rows=num_rows, warms_itself=True)

    def size(self, num_rows: int) -> int:
        return num_rows if not self.options.quick else num_rows // 40


# --- The rows ---------------------------------------------------------------------------------------------------------


def write_parquet(folder: str, table: pa.Table, row_bytes: float, num_files: int = 4) -> str:
    """Write rows as Spark would: compressed with snappy, bytes without a dictionary."""
    if not os.path.exists(folder):
        unfinished = f"{folder}.unfinished"
        shutil.rmtree(unfinished, ignore_errors=True)
        os.makedirs(unfinished)
        rows = -(-len(table) // num_files)
        for number in range(num_files):
            pq.write_table(
                table.slice(number * rows, rows),
                f"{unfinished}/part-{number}.parquet",
                row_group_size=max(1, int(ROW_GROUP_BYTES / row_bytes)),
                compression="snappy",
                use_dictionary=False,
            )
        # A folder that is there is whole.
        os.rename(unfinished, folder)
    return folder


def write_delta(folder: str, table: pa.Table, row_bytes: float) -> str:
    """A Delta table of the rows, with an id, which DeltaTorch asks for."""
    import deltalake

    if not os.path.exists(f"{folder}/_delta_log"):
        numbered = table.append_column("id", pa.array(range(len(table)), pa.int64()))
        write_parquet(folder, numbered, row_bytes)
        deltalake.convert_to_deltalake(folder)
    return folder


def make_pictures(bench: Bench) -> tuple[str, pa.Table, float]:
    """The JPEGs as they are in an .npz file, as a table, and the mean of their bytes."""
    stored = f"{bench.folder}/pictures.npz"
    if not os.path.exists(stored):
        say("cutting pictures out of photographs")
        unfinished = f"{bench.folder}/unfinished.npz"
        bench.run("images_photographs", "photographs", path=unfinished, num_rows=bench.size(20_000))
        os.rename(unfinished, stored)
    with np.load(stored) as found:
        data, edges, labels = found["data"].tobytes(), found["edges"].tolist(), found["labels"]
    values = [data[start:stop] for start, stop in itertools.pairwise(edges)]
    table = pa.table({"image": pa.array(values, pa.binary()), "label": pa.array(labels, pa.int32())})
    return stored, table, len(data) / len(values)


def make_digits(bench: Bench, kind: pa.DataType) -> pa.Table:
    """Rows of 28×28 bytes and a label."""
    num_rows = bench.size(200_000)
    generator = np.random.default_rng(3)
    numbers = pa.py_buffer(generator.integers(0, 256, num_rows * 784, np.uint8))
    fixed = pa.Array.from_buffers(pa.binary(784), num_rows, [None, numbers])
    labels = pa.array(generator.integers(0, 10, num_rows), pa.int32())
    return pa.table({"image": fixed.cast(kind), "label": labels})


# --- The sections -----------------------------------------------------------------------------------------------------

LIMIT = "limit: simplejpeg alone"
OURS, OURS_CHW, OURS_SMALL = "ours", 'ours, layout="CHW"', "ours, size=(112, 112)"


def jpeg(bench: Bench) -> None:
    """20,000 JPEGs of 224×224 and a label, shuffled."""
    stored, table, mean_bytes = make_pictures(bench)
    folder = write_parquet(f"{bench.folder}/jpeg", table, mean_bytes)
    num_rows = len(table)
    print(f"A JPEG has {mean_bytes / 1000:.1f} kB on average; {len(set(table['label'].to_pylist()))} photographs.\n")

    def of_size(side: int, layout: str = "HWC") -> Way:
        decode = {"image": {"size": (side, side), "layout": layout}}
        return bench.way(OWN, "ours", num_rows, path=folder, decode=decode)

    ways = {
        LIMIT: bench.way(OWN, "limit", num_rows, path=folder),
        OURS: of_size(SIDE),
        OURS_CHW: of_size(SIDE, "CHW"),
        OURS_SMALL: of_size(112),
    }
    goals = [Goal(OURS, LIMIT, 0.9), Goal(OURS_CHW, OURS), Goal(OURS_SMALL, OURS)]
    for environment, prepare, name, least in (
        ("petastorm_images", petastorm_folder, "petastorm", 3),
        ("images_mosaic", mosaic_folder, "mosaic", 2),
        ("images_datasets", None, "datasets", 2),
        ("images_ray", None, "ray", 2),
        ("images_deltatorch", None, "deltatorch", 5),
    ):
        title = PEERS[environment]
        goals.append(Goal(OURS, title, least))
        path = folder
        try:
            if name == "deltatorch" and not bench.options.without_peers:
                path = write_delta(f"{bench.folder}/jpeg-delta", table, mean_bytes)
            elif prepare is not None:
                path = prepare(bench, folder, stored)
        except UnavailableError as error:
            ways[title] = unavailable(str(error))
            continue
        ways[title] = bench.way(environment, name, num_rows, path=path, is_jpeg=True)
    in_turns(ways, bench.options.repeats)
    print_ways(ways)
    print_ratios(ways, goals)


def decode_at(bench: Bench) -> None:
    """The same JPEGs written by Spark into a cache: as they are, or as the tensors that executors make of them."""
    _, table, mean_bytes = make_pictures(bench)
    df = converter.start_local_spark("images").read.parquet(write_parquet(f"{bench.folder}/jpeg", table, mean_bytes))
    ways, written = {}, []
    with contextlib.ExitStack() as entries:
        for when in ("read", "write"):
            seconds = []
            for turn in range(bench.options.repeats + 1):
                begin = time.perf_counter()
                made = converter.make_spark_converter(
                    df,
                    cache_dir=f"{bench.folder}/cache",
                    cache_key=f"{when} {turn}",
                    decode={"image": converter.Image(size=(SIDE, SIDE))},
                    decode_at=when,
                )
                seconds.append(time.perf_counter() - begin)
                num_bytes = sum(
                    path.stat().st_size for path in Path(made.url.removeprefix("file://")).rglob("*.parquet")
                )
                if turn < bench.options.repeats:
                    made.delete()
            entries.callback(made.delete)
            # The first is to be warm.
            written.append([f"{when!r}", f"{np.median(seconds[1:]):.2f}", f"{num_bytes / 1e6:,.0f}"])
            ways[f"decode_at={when!r}"] = bench.way(OWN, "ours", len(table), path=made.url, is_cache=True)
        in_turns(ways, bench.options.repeats)
    print_table(["decode_at", "seconds to write", "MB"], written)
    print_ways(ways)
    print_ratios(ways, [Goal("decode_at='write'", "decode_at='read'")])


def unavailable(why: str) -> Way:
    def run() -> list[Epoch]:
        raise UnavailableError(why)

    return Way(run=run, num_rows=0)


def petastorm_folder(bench: Bench, folder: str, stored: str) -> str:
    """The same files, with what Petastorm wants beside them."""
    own = f"{folder}-petastorm"
    if not os.path.exists(f"{own}/_common_metadata"):
        os.makedirs(own, exist_ok=True)
        for path in Path(folder).glob("*.parquet"):
            with contextlib.suppress(FileExistsError):
                os.link(path, f"{own}/{path.name}")
        bench.run("petastorm_images", "petastorm_describe", path=own)
    return own


def mosaic_folder(bench: Bench, folder: str, stored: str) -> str:
    """The same JPEGs in shards of MDS."""
    own = f"{folder}-mosaic"
    if not os.path.exists(f"{own}/index.json"):
        shutil.rmtree(own, ignore_errors=True)
        bench.run("images_mosaic", "mosaic_write", path=own, source=stored)
    return own


def libraries(bench: Bench) -> None:
    """4,000 JPEGs of 224×224 decoded to RGB."""
    stored, num_rows = make_pictures(bench)[0], bench.size(4000)
    names = {
        "simplejpeg": "simplejpeg",
        "imagecodecs": "imagecodecs",
        "opencv": "OpenCV",
        "torchvision": "torchvision.io",
        "pillow": "Pillow",
    }
    ways = {
        (name, count): bench.way(
            "images_libraries", "library", num_rows, path=stored, num_images=num_rows, library=name, num_threads=count
        )
        for name in names
        for count in (1, NUM_THREADS)
    }
    in_turns({f"{names[name]}, {count} at once": way for (name, count), way in ways.items()}, bench.options.repeats)
    rows = []
    for name, title in names.items():
        alone, together = ways[name, 1], ways[name, NUM_THREADS]
        if alone.epochs and together.epochs:
            figures = [f"{alone.cpu:.0f}", *(read.short(way.rate) for way in (alone, together))]
            rows.append([title, *figures, f"{together.rate / alone.rate:.2f}", ""])
        else:
            rows.append([title, "–", "–", "–", "–", alone.problem or together.problem])
    head = ["", "CPU µs for each image, one thread", "images/s, one thread", f"images/s, {NUM_THREADS} threads"]
    print_table([*head, f"{NUM_THREADS} threads / one", "note"], rows)


def npy(bench: Bench) -> None:
    """200,000 rows of `.npy` bytes of float32 (28, 28), shuffled."""
    num_rows = bench.size(200_000)
    generator = np.random.default_rng(5)
    folder = f"{bench.folder}/npy"
    if not os.path.exists(folder):
        say("writing .npy bytes")
        stream = io.BytesIO()
        np.save(stream, np.zeros((28, 28), np.float32))
        header = np.frombuffer(stream.getvalue()[: -28 * 28 * 4], np.uint8)
        rows = np.empty((num_rows, len(header) + 28 * 28 * 4), np.uint8)
        rows[:, : len(header)] = header
        rows[:, len(header) :] = generator.random((num_rows, 784), np.float32).view(np.uint8)
        fixed = pa.Array.from_buffers(pa.binary(rows.shape[1]), num_rows, [None, pa.py_buffer(rows)])
        write_parquet(folder, pa.table({"x": fixed.cast(pa.binary())}), rows.shape[1])
    own, loop = "ours, decode=NumPy()", "np.load in a loop, stacked"
    ways = {
        own: bench.way(OWN, "ours", num_rows, path=folder, decode={"x": "npy"}),
        loop: bench.way(OWN, "np_load", num_rows, path=folder),
    }
    in_turns(ways, bench.options.repeats)
    print_ways(ways)
    print_ratios(ways, [Goal(own, loop, 10)])


def raw(bench: Bench) -> None:
    """200,000 rows of 28×28 bytes of uint8 and a label, shuffled."""
    ways = {}
    for title, kind in (("BINARY", pa.binary()), ("FIXED_LEN_BYTE_ARRAY", pa.binary(784))):
        table = make_digits(bench, kind)
        folder = write_parquet(f"{bench.folder}/raw-{title.lower()}", table, 784)
        ways[title] = bench.way(OWN, "ours", len(table), path=folder, shapes={"image": (28, 28)})
    in_turns(ways, bench.options.repeats)
    print_ways(ways)
    print_ratios(ways, [Goal("BINARY", "FIXED_LEN_BYTE_ARRAY", 0.8)])


def digits(bench: Bench) -> None:
    """200,000 rows of 28×28 bytes, a label and an id in a Delta table, shuffled."""
    table = make_digits(bench, pa.binary())
    folder = write_delta(f"{bench.folder}/digits-delta", table, 784)
    title = PEERS["images_deltatorch"]
    ways = {
        OURS: bench.way(OWN, "ours", len(table), path=folder, is_delta=True, shapes={"image": (28, 28)}),
        title: bench.way("images_deltatorch", "deltatorch", len(table), path=folder, is_jpeg=False),
    }
    in_turns(ways, bench.options.repeats)
    print_ways(ways)
    print_ratios(ways, [Goal(OURS, title)])


SECTIONS: dict[str, Callable[[Bench], None]] = {
    "jpeg": jpeg,
    "decode_at": decode_at,
    "libraries": libraries,
    "npy": npy,
    "raw": raw,
    "deltatorch": digits,
}


def main(arguments: Any = None) -> None:
    """Run everything and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--only", nargs="+", choices=SECTIONS, metavar="NAME", help=f"of {', '.join(SECTIONS)} (default: all)")
    add("--repeats", type=int, help="turns of each way (default: 3)")
    add("--data", help="where the rows are kept and taken from again (default: nowhere)")
    add("--quick", action="store_true", help="a fortieth of the rows, one turn, no peers unless --peers says where")
    add("--peers", help="where the environments are (default: in the user's cache folder)")
    add("--without-peers", action="store_true", help="leave the peers and the libraries out")
    add("--peer-seconds", type=float, default=10.0, help="most seconds of a peer's epoch (default: %(default)s)")
    add("--petastorm-python", help=f"a Python of Petastorm's time: {', '.join(read.PETASTORM_PYTHONS)}")
    add("--ray-python", default=sys.executable, help="a Python for the other environments (default: this one)")
    add("--verbose", action="store_true", help="show all that a failed job said")
    options = parser.parse_args(arguments)
    options.repeats = options.repeats or (1 if options.quick else 3)
    options.without_peers = options.without_peers or (options.quick and options.peers is None)
    options.peers = options.peers or platformdirs.user_cache_path("spark-tensor-converter-bench")
    enter_requirements()
    wanted = [name for name in SECTIONS if name in (options.only or SECTIONS)]
    print(f"{read.machine()}, {options.repeats} turns{', a fortieth of the rows' * options.quick}\n", flush=True)
    with contextlib.ExitStack() as stack:
        folder = options.data or stack.enter_context(tempfile.TemporaryDirectory())
        folder = os.path.join(os.path.abspath(folder), "quick" if options.quick else "whole")
        os.makedirs(folder, exist_ok=True)
        bench = Bench(options, folder)
        for name in wanted:
            before = os.getloadavg()[0]
            print(f"### {name}: {SECTIONS[name].__doc__}\n", flush=True)
            SECTIONS[name](bench)
            print(f"Load of the machine: {before:.1f} before, {os.getloadavg()[0]:.1f} after.\n", flush=True)
    for environment, versions in bench.versions.items():
        print(f"{read.TITLES[environment]} ran with {versions}.")


if __name__ == "__main__":
    if IS_JOB:
        do_job(json.loads(sys.argv[-1]))
    else:
        main()
