"""AMQP 0-9-1 for the hot path: framing, content headers edited in place, one connection and its channels."""
