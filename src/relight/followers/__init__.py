"""Followers: processes that take each new checkpoint of a run while it trains: into live tensors, to a command, or to an export.

Invariants: outside a switch, which happens in the caller's own call, the live tensors have the bytes of one committed checkpoint.
Every byte is verified before the switch. A follower of live tensors writes nothing to the store; a command's results are records of the
run's log, one for each checkpoint. May import: ``restore`` and the rooms below. Only the follower of live tensors imports torch.
"""
