"""delayer: gives every message of RabbitMQ's ``delays`` queue back on time."""

__version__ = "0.1.0"
