"""Pictures are drawn without a screen, and closed after each test."""

from __future__ import annotations

from collections.abc import Iterator

import matplotlib as mpl
import pytest

mpl.use("Agg")


@pytest.fixture(autouse=True)
def figures_are_drawn_and_closed() -> Iterator[None]:
    """Each figure is drawn whole: matplotlib lays out and looks for signs in fonts only then."""
    import matplotlib.pyplot as plt

    yield
    try:
        for number in plt.get_fignums():
            plt.figure(number).canvas.draw()
    finally:
        plt.close("all")
