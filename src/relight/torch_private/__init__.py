"""Private names of torch: all that Relight uses, each with its reason and a fall-back.

torch may change names that begin with an underscore, and names in such modules, in any release. No other room uses
them. ``table.py`` lists all of them. A function here works without its names, slower or with less, or raises an error
that has the name and torch's version. The first use of a fall-back emits the event ``torch.name_missing``.

Names in files are not uses, and stay where the files are read and written. Pickles name functions such as
``torch._utils._rebuild_tensor_v2``, and state dicts have keys such as ``_extra_state``.

May import torch, ``observe``, ``errors``.
"""
