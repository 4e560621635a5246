"""Other frameworks and formats: what they save goes into Relight's own format, what they have saved is read without running any of it.

Always holds: no pickle is written; foreign pickles are read opcode by opcode, through a list of what is allowed, and nothing of them is
ever called. May import: ``capture``, ``commit``, ``catalog``, ``log``, ``store``, ``format``, ``layout``, ``observe``, ``errors``; and
torch, so nothing else imports this room: it is there for those who ask for it.
"""
