"""The formats that delayer writes and must still read years later, and the rules for changing them.

============  ===================================================================  ==================
module        writes                                                               its number
============  ===================================================================  ==================
rows          the rows of ``message`` and ``held`` in the store                     column ``format``
envelope      messages in the cascade, the due queue and the strays queue           ``x-delayer-envelope``
lines         JSON lines of exports, which imports read                             field ``v``
refusal       messages in the refused queue, and their way back to the intake       none: see 5
release       messages on their way to their destination                            none: see 5
============  ===================================================================  ==================

Segments of the store follow the same rules (store/segments/codec.py; core/segment.py has the number).

Stored messages outlive many versions of this program, because a row may wait ten years. To change a format:

1. Never change the meaning of bytes under a released number. Raise the number by one.
2. Keep reading every number from 1 on. Add branches to the reader, and never remove one.
3. Add a fixture of stored bytes of the new format to tests/unit/format, and leave the old fixtures alone.
4. Upgrade every daemon before the first one writes the new number. An older daemon sets such messages aside: it holds
   rows and refuses envelopes.
5. Headers without a number are a contract with users (docs/headers.md). Add headers, and keep those that exist.

``reading`` formats messages for operators.
"""
