"""Records kept about a run: requested saves, held checkpoints, verification results, fresh starts, incidents, proofs.

Most are NOTEs in the run's log. Their topics are registered in ``format/topics.py``. May import ``log`` and everything below it.
"""
