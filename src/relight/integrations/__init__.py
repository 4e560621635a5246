"""Other frameworks and formats: they save in Relight's own format, and their files are read without executing anything.

Invariants: no pickle is written. Foreign pickles are read opcode by opcode, through an allow-list, and nothing in them is
ever called. May import: every room below but those of ``demo``'s line; and torch, so no other room imports this one: users
import it themselves. The plug-ins (``lightning`` and so on) import their framework at the top, use its own extension
points, and replace nothing of it.
"""
