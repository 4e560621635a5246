"""The dashboard and its API: an index of the stores, pages and JSON made from it, roles, and actions that correspond to commands.

Always holds: everything shown can be read again from the stores; a page queries the index, never a store; writing needs a token; objects
outside a caller's scope are absent from its answers. May import everything below it. Torch-free.
"""
