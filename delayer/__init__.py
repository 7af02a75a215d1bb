"""delayer: delayed messages for RabbitMQ. Its daemon delivers each message of the ``delays`` queue when it is due."""

__version__ = "0.1.0"
