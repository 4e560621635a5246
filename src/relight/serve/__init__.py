"""The dashboard and its API: an index of the stores, pages and JSON made from it, roles, and actions that correspond to commands.

Invariants: everything shown can be read again from the stores. A page queries the index, never a store. Writing needs a
token. Objects outside a caller's scope are absent from its answers. May import all rooms below it. Torch-free.
"""
