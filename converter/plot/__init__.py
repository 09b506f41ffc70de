"""Pictures of data and of loaders, by matplotlib: they are drawn on your Axes or on new ones, which are returned.

```python
from converter import plot

age, y = plot.columns(converter, ["age", "y"])  # what they hold
ax = plot.layout(converter)  # how the rows lie in files and row groups
with converter.make_batch_reader(batch_size=64, shuffle=True) as loader:
    ax = plot.shuffle(loader)  # where the rows of a batch come from
```

It needs `pip install 'spark-tensor-converter[plot]'`. Importing it does not load matplotlib.
"""

from __future__ import annotations

from converter.plot.distributions import columns
from converter.plot.layouts import layout
from converter.plot.shuffles import shuffle
from converter.plot.timelines import Stats, timeline

__all__ = ["Stats", "columns", "layout", "shuffle", "timeline"]
