"""Supervises a job: detects and classifies failures, decides what to do, does it, and records it with its reason.

Invariants: Classification and decision are pure functions of the evidence and a time. The sentence with the reason
reaches the terminal, the incident and the test unchanged. Only the files that use torch's elastic agent and its
rendezvous import torch.
"""
