"""AMQP 0-9-1 for the hot path: framing, content headers edited in place, one connection and its channels. The package
knows nothing of delayer: it imports only itself, pamqp and the standard library."""
