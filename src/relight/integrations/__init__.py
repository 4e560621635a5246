"""Other frameworks and formats: what they save goes into Relight's own format, what they have saved is read without running any of it.

Always holds: no pickle is written; foreign pickles are read opcode by opcode, through a list of what is allowed, and nothing of them is
ever called. May import: every room below but those of ``demo``'s line; and torch, so nothing else imports this room: it is there for those
who ask for it. The plug-ins (``lightning`` and so on) import their framework at their head, use its own extension points, and replace
nothing of it.
"""
