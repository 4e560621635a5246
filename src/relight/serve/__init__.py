"""The dashboard and its API: an index of what stores say, pages and JSON made of it, who may do what, and actions that are commands.

Always holds: everything shown can be read again from the stores; a page asks the index, never a store; nobody without a token writes; what
somebody may not see is not there for him. May import everything below it. Torch-free.
"""
