"""Where rows come from: each source turns its input into a `Manifest`, and nothing below knows which it was."""
