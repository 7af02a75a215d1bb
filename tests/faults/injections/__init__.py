"""What breaks a fleet, and heals it again: one coroutine for each kind of fault, returning when it is over."""
