"""The HTTP side of the daemon: health, metrics, the page with its buttons, and the API, which also sends messages."""
