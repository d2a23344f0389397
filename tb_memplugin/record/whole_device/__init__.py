"""Read what fills a whole device: `card.py` a GPU, `host.py` the machine, `window.py` both for a window."""
