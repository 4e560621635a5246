"""Keeping a job alive: see what is wrong, decide what to do, do it, and write down what was done and why.

Always holds: what a failure means and what follows from it are pure functions of facts and a time; the sentence that says why reaches the
terminal, the incident and the test unchanged. Only ``agent``, ``joining`` and ``launch`` may import torch.
"""
