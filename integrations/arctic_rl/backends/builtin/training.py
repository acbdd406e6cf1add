"""Batches on their way through the ranks of a model: split, sent, computed, and put together again."""

from __future__ import annotations

import asyncio

from ...errors import RequestError
from ...server.offload import PARTS, WEIGHTS
from ...wire.body import decode_answer, encode
from ...zorro.cost import CostModel
from ..base import Batch
from ..sharding import RankPlan, plan_ranks
from ..turns import Turns
from .calls import Calls
from .workers import Workers


class Ranks:
    """Training workers that compute on rows."""

    def __init__(self, workers: Workers, calls: Calls, turns: Turns) -> None:
        self._workers = workers
        self._calls = calls
        self._turns = turns
        self._sharing: dict[str, tuple[CostModel, bool]] = {}

    async def forward(self, job: str, server: str, batch: Batch, meta: dict, processing: dict) -> dict:
        """See ``RemoteBackend.fwd_no_grad``; ``server`` is the job whose workers serve this one."""
        plan, outputs = await self._run(job, server, batch, meta, processing, backward=False)
        return {"batch": plan.join([output["batch"] for output in outputs]), "metrics": {}}

    async def backward(self, job: str, batch: Batch, meta: dict, processing: dict) -> dict:
        """See ``RemoteBackend.fwd_bwd``."""
        plan, outputs = await self._run(job, job, batch, meta, processing, backward=True)
        result = {"avg_loss": outputs[0]["avg_loss"], "metrics": outputs[0]["metrics"]}
        result["micro_batches"] = [output["micro_batches"] for output in outputs]
        result["lr"] = await self._calls.call(f"{job}-0", "learning_rate")
        if "batch" in outputs[0]:
            result["batch"] = plan.join([output["batch"] for output in outputs])
        return result

    async def _run(
        self, job: str, server: str, batch: Batch, meta: dict, processing: dict, *, backward: bool
    ) -> tuple[RankPlan, list[dict]]:
        meta = dict(meta)
        max_tokens = meta.pop("max_token_len_per_gpu")
        names = self._workers.names(server)
        if meta.get("dp_size") not in (None, len(names)):
            raise RequestError(f"meta['dp_size']={meta['dp_size']}, but the job {job!r} has {len(names)} ranks")
        if server not in self._sharing:
            self._sharing[server] = await self._calls.call(names[0], "sharing_cost")
        cost, can_share = self._sharing[server]
        plan = plan_ranks(batch, len(names), cost, shared=can_share and meta["zorro_train_enable"] is not False)
        shards = plan.split(batch)
        bodies = await asyncio.gather(*(asyncio.to_thread(encode, {}, shard) for shard in shards))
        async with self._turns.turn(server, PARTS if backward else [WEIGHTS]):
            calls = {
                name: self._workers.actors[name].run_rows.remote(
                    rows,
                    meta,
                    processing,
                    backward=backward,
                    max_tokens_per_mb=max_tokens,
                    base_only=server != job,
                )
                for name, rows in zip(names, bodies, strict=True)
            }
            outputs = await self._calls.gather(calls)
        answers = zip(outputs, shards, strict=True)
        return plan, [
            result if rows is None else result | {"batch": decode_answer(rows, shard)[1]}
            for (result, rows), shard in answers
        ]
