#!/usr/bin/env python3
"""Draws figure.svg, the picture in the README: `python notebooks/figure.py`. A test holds the file against this."""

from __future__ import annotations

from pathlib import Path

WIDTH, HEIGHT = 920, 300
FIGURE = Path(__file__).with_suffix(".svg")
INK, SOFT, OURS, THEIRS = "#1f2937", "#6b7280", "#dbeafe", "#f3f4f6"


def box(x: int, y: int, width: int, height: int, title: str, *lines: str, fill: str = OURS) -> str:
    """A rectangle with a title and lines of small text, all centred."""
    center, top = x + width / 2, y + height / 2 - 9 * len(lines) + 5
    parts = [
        f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="8" fill="{fill}" stroke="{SOFT}"/>',
        f'<text x="{center}" y="{top}" font-weight="600" text-anchor="middle" fill="{INK}">{title}</text>',
    ]
    parts += [
        f'<text x="{center}" y="{top + 18 * (1 + index)}" font-size="12" text-anchor="middle" fill="{SOFT}">{line}</text>'
        for index, line in enumerate(lines)
    ]
    return "\n".join(parts)


def arrow(*points: tuple[int, int], label: str = "", dashed: bool = False) -> str:
    """A line through points, with a head at its end and a label above its first piece."""
    path = " ".join(f"{x},{y}" for x, y in points)
    dash = ' stroke-dasharray="5 4"' if dashed else ""
    line = f'<polyline points="{path}" fill="none" stroke="{INK}" stroke-width="1.5" marker-end="url(#head)"{dash}/>'
    (x, y), (end, _) = points[0], points[1]
    text = f'<text x="{(x + end) / 2}" y="{y - 7}" font-size="12" text-anchor="middle" fill="{SOFT}">{label}</text>'
    return line + (f"\n{text}" if label else "")


def draw() -> str:
    """The whole figure as SVG."""
    parts = [
        box(16, 24, 150, 74, "Spark DataFrame", "classic or Connect", fill=THEIRS),
        box(16, 132, 150, 60, "Parquet files", "as they are", fill=THEIRS),
        box(16, 216, 150, 60, "Delta version", "deletions applied", fill=THEIRS),
        box(272, 24, 150, 74, "cache", "Parquet + one manifest", "local, HDFS, abfs, S3"),
        box(272, 174, 150, 60, "manifest", "files and row groups"),
        box(502, 84, 120, 130, "plan", "which rows,", "in what order:", "shard, shuffle,", "resume"),
        box(672, 84, 100, 130, "readers", "threads:", "fetch, decode,", "permute rows"),
        box(804, 24, 108, 60, "PyTorch", "DataLoader", fill=THEIRS),
        box(804, 119, 108, 60, "TensorFlow", "tf.data", fill=THEIRS),
        box(804, 214, 108, 60, "NumPy", "JAX", fill=THEIRS),
        arrow((166, 61), (268, 61), label="executors write"),
        arrow((166, 162), (219, 162), (219, 196), (268, 196), label="no copy", dashed=True),
        arrow((166, 246), (219, 246), (219, 212), (268, 212), label="no copy", dashed=True),
        arrow((422, 61), (460, 61), (460, 128), (498, 128)),
        arrow((422, 204), (460, 204), (460, 170), (498, 170)),
        arrow((622, 149), (668, 149)),
        arrow((772, 149), (800, 149)),
        arrow((772, 120), (786, 120), (786, 54), (800, 54)),
        arrow((772, 178), (786, 178), (786, 244), (800, 244)),
    ]
    head = (
        '<defs><marker id="head" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" orient="auto">'
        f'<path d="M0,0 L10,5 L0,10 z" fill="{INK}"/></marker></defs>'
    )
    return "\n".join([
        (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}"'
        ' font-family="sans-serif" font-size="14">'),
        "<title>Rows go in from Spark, Parquet or Delta; tensors come out</title>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" rx="10" fill="white"/>',
        head,
        *parts,
        "</svg>\n",
    ])  # fmt: skip


if __name__ == "__main__":
    FIGURE.write_text(draw())
