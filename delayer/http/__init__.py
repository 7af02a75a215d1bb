"""What the daemon shows over HTTP: health, metrics, and the page. Nothing here is on the way of a message."""
