"""What breaks a fleet, and heals it again: one coroutine for each kind of fault, returning when it is over.

Each looks at what it broke, and raises Missed if that was nothing: a fault that met nobody proves nothing.
"""
