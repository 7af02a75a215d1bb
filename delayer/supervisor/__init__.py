"""``workers = N``: one process that runs N daemons, each an interpreter of its own, and starts the dead ones again.

The workers know nothing of each other: broker and store share the work out between them, as between machines. They
speak to the supervisor as they would to systemd, in the words of ``NOTIFY_SOCKET``.
"""
