"""Values like the index's, of a few active runs, for tests of pages. Every name can be made hostile."""

from __future__ import annotations

import math
import time
from typing import Any

from relight.errors import CheckpointNotFound, CorruptCheckpoint
from relight.serve import values as v

NOW = time.time()
EVIL = "<script>alert(1)</script>\"'&{{7*7}}\u202e"


def rows(evil: str = "", count: int = 6) -> list[Any]:
    """Return runs in every state of health."""
    kinds = ["failed", "late", "good", "good", "idle", "good"]
    names = ["llama-8b-sft", "ablation-lr-3e4", "gpt2-small", "vit-l-pretrain", "old-baseline", "moe-16x"]
    return [
        v.RunRow(store="main", run=f"{names[i % 6]}{'' if i < 6 else f'-{i}'}{evil}", newest=f"{i:012x}", step=12_000 + 410 * i, last_step=12_000 + 410 * i, age_s=[9000.0, 2400.0, 41.0, 133.0, 8e5, 12.0][i % 6],
             good=kinds[i % 6] != "failed", health=kinds[i % 6], goodput=[0.71, 0.93, 0.971, 0.964, None, 0.988][i % 6], risk=[0.62, 0.11, 0.01, 0.0, None, 0.03][i % 6],
             checkpoints=[4, 17, 31, 100, 3, 88][i % 6], bytes=[48e9, 210e9, 1.5e9, 88e9, 5e9, 1.2e12][i % 6], incident=["hang 2 h ago", None, None, "killed 1 day ago", None, None][i % 6],
             state=["given up", "running", "running", "starting", "finished", "running"][i % 6], state_why="relight run stopped the job" + evil if i % 6 == 0 else "",
             duration_s=[86_400.0, 7200.0, 93_000.0, 40.0, 3600.0, 5e5][i % 6], host=f"node-{i}" + evil, metrics={"loss": 2.05 + i, "grad_norm": 1.3} if i != 4 else {},
             config={"lr": f"{3 - i % 2}e-4" + evil, "model.width": "768", "schedule": "cosine" if i else "linear"},
             why=(["its last save failed: no space", "the newest checkpoint is older than its saves are apart"][i % 6] if i % 6 < 2 else "every 1000 steps") + evil)
        for i in range(count)
    ]  # fmt: skip


def stores(evil: str = "") -> list[Any]:
    """Return a store that was read, and one that was not."""
    return [v.StoreRow(id="main", name="/data/runs" + evil, runs=6, bytes=1_552_500_000_000, state="ok", read_at=NOW - 3),
            v.StoreRow(id="far", name="s3://team/runs" + evil, runs=0, bytes=0, state="store_unavailable: no answer within 20 s" + evil, read_at=NOW - 400)]  # fmt: skip


def detail(evil: str = "") -> Any:
    """Return one run with every kind of detail."""
    losses = [
        (step, 4.2 * math.exp(-step / 4000) + 1.9 + 0.12 * math.sin(step / 37) + (1.6 if 7200 < step < 7260 else 0))
        for step in range(0, 12_000, 10)
    ]
    kinds = [
        ("snapshot", 0.0, 0.21),
        ("wait", 0.21, 0.4),
        ("hash", 0.4, 0.9),
        ("write", 0.5, 2.6),
        ("ready", 2.6, 2.62),
        ("commit", 2.7, 2.78),
        ("drain", 2.8, 6.1),
    ]
    spans = [
        v.SpanRow(rank=rank, kind=kind, begin_s=begin + 0.03 * rank, end_s=end + 0.05 * rank * (kind == "write"))
        for rank in range(4)
        for kind, begin, end in kinds
    ]
    parts = [
        ("training", "", 81_000.0),
        ("starting", "", 240.0),
        ("saving", "", 60.0),
        ("stuck", "hang" + evil, 910.0),
        ("again", "hang" + evil, 420.0),
        ("restoring", "killed", 66.0),
    ]
    return v.RunDetail(
        row=rows(evil)[2], series={"loss" + evil: losses, "grad_norm": [(step, 1 + math.cos(step / 300) ** 2) for step in range(0, 12_000, 40)]},
        saves=[v.SaveRow(id="00000000000a", step=12_000, at=NOW - 60, seconds=2.78, bytes=1.49e9, spans=spans)],
        incidents=incidents(evil), goodput=[v.GoodputPart(kind=kind, cause=cause, seconds=seconds) for kind, cause, seconds in parts],
        tags=[("best" + evil, 9000)], branches=[], stages=[],
    )  # fmt: skip


MORE_SERIES: dict[str, list[Any]] = {
    "gap": [(step, None if 3000 < step < 6000 else 1 + step / 1e4) for step in range(0, 12_000, 100)],
    "single": [(9000, 0.7)],
}
"""Metrics with values that are not finite, and with one point."""


def checkpoints(evil: str = "", count: int = 12) -> list[Any]:
    """Return checkpoints of that run."""
    return [
        v.CheckpointRow(
            id=f"{0xABC000 + i:012x}",
            step=12_000 - 1000 * i,
            at=NOW - 60 - 3600 * i,
            bytes=1.49e9,
            seconds=2.5 + 0.1 * (i % 3),
            good=i not in (3, 4),
            state={3: "suspect", 4: "damaged"}.get(i, "good"),
            why={
                3: "suspect: when it was saved, ranks differed in what they should have in common",
                4: "damaged: chunk 3 is not what was committed" + evil,
            }.get(i, ""),
            tags=["best" + evil] if i == 3 else [],
        )
        for i in range(count)
    ]


def incidents(evil: str = "") -> list[Any]:
    """Return three incidents."""
    return [
        v.IncidentRow(
            id=f"6b107{i}",
            store="main",
            run="gpt2-small" + evil,
            at=NOW - 7300 * (i + 1),
            kind=kind,
            why=why + evil,
            rank=i or 1,
            step=7210 - 900 * i,
            action=action,
            reason="the newest checkpoint is good" + evil,
            steps_lost=i * 3,
            seconds=3.7 + i,
            clues=[
                ("killed", "rank 0 was ended by SIGKILL" + evil, 50),
                ("memory", "95 % of the memory was in use" + evil, 30),
            ],
            stacks={"1": "File train.py, line 40 in step" + evil},
            words="RuntimeError: boom" + evil,
            host="node-1" + evil,
            workers=[
                {"rank": 0, "exit": -9, "phase": "training", "step": 7210, "tail": ["step 7210"]},
                {
                    "rank": i or 1,
                    "exit": 1,
                    "phase": "training",
                    "step": 7209,
                    "error": "RuntimeError: boom" + evil,
                    "tail": [
                        "step 7209",
                        "Traceback (most recent call last):",
                        '  File "train.py", line 40, in <module>',
                        "    step()",
                        "RuntimeError: boom" + evil,
                        "bye",
                    ],
                },
            ],
        )
        for i, (kind, why, action) in enumerate(
            [
                ("killed", "rank 0 was ended by SIGKILL", "resume"),
                ("hang", "rank 2 stood still for 905 s in all_reduce", "resume"),
                ("diverged", "the loss jumped from 2.1 to 3.7", "roll back"),
            ]
        )
    ]


def checkpoint(evil: str = "", layers: int = 12) -> Any:
    """Return a checkpoint of GPT-2 small with its optimizer."""
    tensors = []
    for part, dtype, codec in (
        ("model", "bf16", "zstd, planes"),
        ("optimizer/exp_avg", "f32", None),
        ("optimizer/exp_avg_sq", "f32", None),
    ):
        wide = 2 if dtype == "bf16" else 4
        for name, of in [
            ("wte.weight", (50257, 768)),
            ("wpe.weight", (1024, 768)),
            ("ln_f.weight", (768,)),
            ("step", ()),
        ] + [
            (f"h.{i}.{name}", of)
            for i in range(layers)
            for name, of in (
                ("attn.c_attn.weight", (768, 2304)),
                ("attn.c_proj.weight", (768, 768)),
                ("mlp.c_fc.weight", (768, 3072)),
                ("mlp.c_proj.weight", (3072, 768)),
                ("ln_1.weight", (768,)),
            )
        ]:
            tensors.append(
                v.TensorRow(
                    path=f"{part}/{name}{evil}",
                    shape=of,
                    dtype=dtype,
                    bytes=math.prod(of) * wide,
                    codec=codec,
                    ratio=0.71 if codec else 1.0,
                )
            )
    return v.CheckpointDetail(
        row=checkpoints(evil)[3],
        tensors=tensors,
        residency=[
            v.TierRow(name="main" + evil, there=True, bytes=1.4e9),
            v.TierRow(name="s3://far/gpt2", there=False, bytes=None),
        ],
        metrics={"loss": 2.1},
        facts=[("world", "4"), ("metadata.note" + evil, "before the ablation" + evil)],
        verified_at=NOW - 4000,
    )


def diff(evil: str = "") -> Any:
    """Return a comparison: most tensors have changed, one was added, one was removed."""
    rows = [
        v.DiffRow(
            name=tensor.path,
            kind="changed" if tensor.path.startswith("model") and len(tensor.shape) == 2 else "same",
            share=(0.97 - 0.004 * i) if tensor.path.startswith("model") and len(tensor.shape) == 2 else 0.0,
            largest=0.013 / (i + 1),
            bytes=tensor.bytes,
        )
        for i, tensor in enumerate(checkpoint(evil).tensors[:64])
    ]
    rows += [
        v.DiffRow(name="model/lora.a" + evil, kind="added", share=None, largest=None, bytes=5),
        v.DiffRow(name="model/head.bias" + evil, kind="removed", share=None, largest=None, bytes=5),
    ]
    return v.DiffDetail(
        a="gpt2-small@step=9000" + evil,
        b="gpt2-small@latest",
        tensors=rows,
        values=[("scheduler.last_epoch" + evil, 9000, "12000" + evil)],
    )


def lineage(evil: str = "") -> list[Any]:
    """Return a run, its branch, that branch's branch, and another run."""
    return [v.LineageRow(run="gpt2-small" + evil, parent=None, at_step=None, steps=list(range(1000, 13_000, 1000)), tags=[(9000, "best" + evil)]),
            v.LineageRow(run="gpt2-small-lr" + evil, parent="gpt2-small" + evil, at_step=6000, steps=[7000, 8000, 9000], tags=[]),
            v.LineageRow(run="gpt2-small-lr-b", parent="gpt2-small-lr" + evil, at_step=8000, steps=[9000, 10_000, 11_000, 12_000], tags=[(12_000, "shipped")]),
            v.LineageRow(run="vit", parent=None, at_step=None, steps=[2000, 4000], tags=[])]  # fmt: skip


def storage(evil: str = "") -> Any:
    """Return two tiers, a month of sizes, and three checkpoints to delete."""
    return v.StorageDetail(
        tiers=[
            v.TierUse(name="near (NVMe)" + evil, used=1.1e12, limit=1.2e12, free=1e11),
            v.TierUse(name="s3://far", used=1.5e12, limit=None, free=None),
        ],
        trend=[(NOW - 86400 * (30 - i), 4e11 + 3.7e10 * i) for i in range(31)],
        full_at=NOW + 2.7 * 86400,
        retention=[
            v.PlanRow(
                run="gpt2-small" + evil,
                id=f"00000000000{i}",
                step=1000 * i,
                what="delete",
                why="not among the last 3, and not each 5000th" + evil,
                bytes=1.49e9,
            )
            for i in range(1, 4)
        ],
    )


def risks(evil: str = "") -> list[Any]:
    """Return two predicted failures."""
    return [v.RiskRow(store="main", run="llama-8b-sft" + evil, node="node-17" + evil, at=NOW - 40, detector="forest", risk=0.62, why="link errors rise: 4 in an hour, 0 the day before" + evil),
            v.RiskRow(store="main", run="gpt2-small", node="node-3", at=NOW - 400, detector="rules", risk=0.11, why="warm: 84 °C, usually 71")]  # fmt: skip


def audit(evil: str = "") -> list[Any]:
    """Return audit entries."""
    return [
        v.AuditRow(
            seq=3 - i,
            at=NOW - 100 * (i + 1),
            who="anna" + evil,
            role="operator",
            what=what,
            on="main/gpt2-small@step=9000" + evil,
            how=how,
        )
        for i, (what, how) in enumerate([("tag", "ok"), ("prune", "refused"), ("verify", "")])
    ]


def settings(evil: str = "") -> Any:
    """Return tokens, an alert rule and a policy."""
    return v.SettingsDetail(
        tokens=[
            v.TokenRow(
                id="rl_7Q2",
                name="grafana" + evil,
                role="viewer",
                scope="main" + evil,
                made_at=NOW - 9e5,
                ends_at=NOW + 9e6,
                state="valid",
            ),
            v.TokenRow(
                id="rl_9ZZ", name="anna", role="operator", scope="", made_at=NOW - 9e6, ends_at=None, state="revoked"
            ),
        ],
        alerts=[v.AlertRow(name="no good checkpoint" + evil, says="none for 30 min", severity="page", firing=True)],
        policies=[("gpt2-small" + evil, "the last 3, and each 5000th" + evil)],
    )


class MadeIndex:
    """An index that returns the values above."""

    def __init__(self, evil: str = "", count: int = 6) -> None:
        self.evil, self.count = evil, count

    def stores(self) -> list[Any]:
        """Return both stores."""
        return stores(self.evil)

    def runs(self, after: str | None, limit: int, find: str = "", state: str = "", sort: str = "") -> Any:
        """Return all runs in one piece."""
        return v.ListPage(rows=rows(self.evil, self.count), next=None, total=self.count)

    def run(self, store: str, run: str) -> Any:
        """Return the same run for every name."""
        return detail(self.evil)

    def series(self, store: str, run: str) -> Any:
        """Return metrics with a gap, a single point, and more points than are kept."""
        made: dict[str, list[Any]] = {**detail(self.evil).series, **MORE_SERIES}
        return {
            name: v.SeriesDetail(
                name,
                [step for step, _ in points],
                [NOW - 40_000 + 3.0 * step for step, _ in points],
                [value for _, value in points][:: -1 if run == "vit" else 1],
                40_000 if name == "grad_norm" else len(points),
            )
            for name, points in made.items()
        }

    def checkpoints(self, store: str, run: str, after: str | None, limit: int) -> Any:
        """Return a piece of the list, with a next one."""
        return v.ListPage(rows=checkpoints(self.evil), next=None if after else "older" + self.evil, total=24)

    def log(self, store: str, run: str, after: str | None, limit: int) -> Any:
        """Return records of each kind: plain, void and damaged; with a next piece."""
        rows = [
            v.LogRow(12, NOW - 30, "COMMIT", "000000abc003 step 12000, every 1000 steps, loss=2.9" + self.evil),
            v.LogRow(11, NOW - 60, "COMMIT", "000000abc002 step 11000", "void: attempt 2 took charge" + self.evil),
            v.LogRow(10, None, "damaged", "000000000010.json", "its hash differs" + self.evil),
            v.LogRow(9, NOW - 90, "FENCE", "attempt 2 takes charge: node-3:4121 (resumed)" + self.evil),
        ]
        return v.ListPage(rows=rows, next=None if after else "9", total=12)

    def checkpoint(self, store: str, run: str, which: str) -> Any:
        """Return the checkpoint of GPT-2 small."""
        return checkpoint(self.evil)

    def values(self, store: str, run: str, which: str, path: str) -> Any:
        """Return the values of most tensors at once. One is still being read, and one is damaged."""
        if "wpe" in path:
            return v.Working(0.4, "its values are being read" + self.evil)
        if "ln_f" in path:
            raise CorruptCheckpoint("chunk 3 is not what was committed" + self.evil)
        return v.Statistics(
            numbers=[("least", -0.41), ("mean", 0.0002), ("largest", 0.52)],
            edges=[-0.5 + 0.05 * i for i in range(21)],
            counts=[int(1e6 * math.exp(-((i - 9.5) ** 2) / 9)) for i in range(20)],
            says="all 38 597 376 values" + self.evil,
        )

    def diff(self, a: str, b: str) -> Any:
        """Return the comparison. ``slow`` is still running, and ``missing`` is unknown."""
        if a == "missing":
            raise CheckpointNotFound("no checkpoint 'missing' in run gpt2-small" + self.evil)
        return v.Working(0.4) if a == "slow" else diff(self.evil)

    def sides(self, a: str, b: str) -> list[Any]:
        """Return a suspect checkpoint and a damaged one."""
        return checkpoints(self.evil)[3:5]

    def lineage(self, store: str) -> list[Any]:
        """Return the lineage of the store ``main``."""
        return lineage(self.evil) if store == "main" else []

    def storage(self, store: str) -> Any:
        """Return the storage of the store ``main``."""
        return storage(self.evil) if store == "main" else v.StorageDetail()

    def incidents(self, after: str | None, limit: int) -> Any:
        """Return three incidents."""
        return v.ListPage(rows=incidents(self.evil), next=None, total=3)

    def incident(self, store: str, run: str, which: str) -> Any:
        """Return the first incident."""
        return incidents(self.evil)[0]

    def firing(self) -> list[Any]:
        """Return an alert of a run, and one of a store."""
        return [
            v.FiringRow("no_good_checkpoint", "critical", "main", "llama-8b-sft" + self.evil, "the last good checkpoint is 2 h 30 min old" + self.evil, NOW - 900, "relight doctor llama-8b-sft"),
            v.FiringRow("unreadable", "warning", "far", "", "no answer within 20 s" + self.evil, NOW - 400, "relight doctor STORE"),
        ]  # fmt: skip

    def risk(self) -> list[Any]:
        """Return two predicted failures."""
        return risks(self.evil)

    def audit(self, after: str | None, limit: int) -> Any:
        """Return three audit entries, with more to follow."""
        return v.ListPage(rows=audit(self.evil), next="3", total=9)

    def settings(self) -> Any:
        """Return the settings for an admin."""
        return settings(self.evil)


class Empty(MadeIndex):
    """An index without data, as of a new server."""

    def stores(self) -> list[Any]:
        """Return nothing."""
        return []

    def runs(self, after: str | None, limit: int, find: str = "", state: str = "", sort: str = "") -> Any:
        """Return nothing."""
        return v.ListPage(rows=[], next=None, total=0)

    def series(self, store: str, run: str) -> Any:
        """Return nothing."""
        return {}

    def run(self, store: str, run: str) -> Any:
        """Return a run that has just begun."""
        return v.RunDetail(row=v.RunRow("main", "new"))

    def checkpoints(self, store: str, run: str, after: str | None, limit: int) -> Any:
        """Return nothing."""
        return v.ListPage(rows=[], next=None, total=0)

    def log(self, store: str, run: str, after: str | None, limit: int) -> Any:
        """Return nothing."""
        return v.ListPage(rows=[], next=None, total=0)

    def checkpoint(self, store: str, run: str, which: str) -> Any:
        """Return a checkpoint without tensors."""
        return v.CheckpointDetail(row=checkpoints()[0])

    def incidents(self, after: str | None, limit: int) -> Any:
        """Return nothing."""
        return v.ListPage(rows=[], next=None, total=0)

    def firing(self) -> list[Any]:
        """Return nothing."""
        return []

    def risk(self) -> list[Any]:
        """Return nothing."""
        return []

    def audit(self, after: str | None, limit: int) -> Any:
        """Return nothing."""
        return v.ListPage(rows=[], next=None, total=0)

    def settings(self) -> Any:
        """Return nothing."""
        return v.SettingsDetail()
