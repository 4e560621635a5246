"""Supervision of a job: detect a failure, classify it, decide what to do, do it, and record the decision with its
reason.

Always holds: classification and decision are pure functions of the evidence and a time. The sentence that gives the
reason reaches the terminal, the incident and the test unchanged. Only the files that talk to torch's elastic agent and
its rendezvous import torch.
"""
