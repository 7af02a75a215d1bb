"""A simulated RabbitMQ 3.10 that speaks AMQP 0-9-1 in bytes, inside any event loop."""
