"""The three pools of one model, as admission sees them, and whether one has room for a request."""

from __future__ import annotations

from epd.config import ClassConfig
from epd.coordinator.admission.stage_meter import StageMeter
from epd.coordinator.admission.ticket import StageWork
from epd.types import RequestClass, Stage

# Of each worker's requests: one at work and one that follows it.
_MIN_PER_WORKER = {RequestClass.INTERACTIVE: 2, RequestClass.BATCH: 1}


class ModelPools:
    """The pools of a model.

    Args:
        model_id: its name.
        now_s: monotonic time.
    """

    def __init__(self, model_id: str, now_s: float) -> None:
        self.model_id = model_id
        self.meters = {stage: StageMeter(now_s) for stage in Stage}

    def cost_s(self, work: StageWork) -> float:
        """Seconds that work takes of the stage it takes most of; the currency of fair shares.

        This is the dominant share of "Multi-Resource Fair Queueing for Packet Processing" (Ghodsi
        et al., SIGCOMM 2012), of the two stages that compute. Stages not yet measured do not count.
        """
        computing = (Stage.ENCODE, Stage.PREFILL)
        return max(self.meters[stage].seconds(work.of(stage)) for stage in computing)

    def is_full(
        self, stage: Stage, work: StageWork, request_class: RequestClass, config: ClassConfig
    ) -> bool:
        """Whether a stage has no room for a request now.

        What batch has been given does not count against interactive; all counts against batch.
        """
        meter, tokens = self.meters[stage], work.of(stage)
        is_batch = request_class is RequestClass.BATCH
        num = meter.num_given if is_batch else meter.num_by_class[request_class]
        given = meter.tokens_given if is_batch else meter.tokens_by_class[request_class]
        # Without a worker nothing is to be waited for: the request goes on, and is told.
        if not num or not meter.num_workers:
            return False
        if stage is Stage.DECODE:
            max_ratio = config.max_kv_ratio
            if max_ratio is None or not meter.capacity_tokens:
                return False
            return given + tokens > max_ratio * meter.capacity_tokens
        if num < _MIN_PER_WORKER[request_class] * meter.num_workers:
            return False
        if meter.capacity is None:
            return is_batch
        return given + tokens > config.max_backlog_s * meter.capacity
