"""What breaks a fleet, and heals it again: one coroutine for each kind of fault, returning when it is over.

One that had to wait before it broke anything returns when that was, in epoch milliseconds.

Each looks at what it broke, and raises Missed if that was nothing: a fault that met nobody proves nothing.
"""
