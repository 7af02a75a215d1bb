"""The HTTP side of the daemon: health, metrics, and the page. Messages do not pass through here."""
