"""The HTTP side of the daemon: health, metrics, and the page. No message passes through here."""
