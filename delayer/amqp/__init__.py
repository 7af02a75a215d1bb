"""The hot path's AMQP 0-9-1: framing, content headers read and spliced in place, one connection and its channels."""
