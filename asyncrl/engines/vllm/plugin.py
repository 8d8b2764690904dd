"""The vLLM plugin, which vLLM imports into each of its worker processes. It registers our weight transfer
(`TransferEngine`) and adds calls to vLLM's worker (`WorkerExtension`).

Imports little on purpose: it is imported before vLLM has set the process up, in some processes twice.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

from asyncrl.engines.vllm.names import BACKEND, PROTOCOL, shape_of

OWNER_VARIABLE = "ASYNCRL_ENGINE_OWNER"
"""Environment variable: process id of the rollout worker; the engine ends when that process does."""


def register() -> None:
    """Entry point of `vllm.general_plugins`; may be called any number of times."""
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, "asyncrl.engines.vllm.transfer", "TransferEngine")


# A user's VLLM_PLUGINS="" turns entry points off; as `worker_extension_cls` this module is imported anyway.
register()


class WorkerExtension:
    """Methods added to vLLM's worker, for `collective_rpc`. They return errors instead of raising them: an exception
    from one of several workers would leave the answers of the others in their queues, where the next call would take
    them for its own."""

    weight_transfer_engine: Any
    model_runner: Any

    def asyncrl_model(self) -> dict[str, Any]:
        """Return a description of the served model, for a run that did not start it; see `names.shape_of`."""
        told = {"protocol": PROTOCOL, "seat": import_module("asyncrl.engines.vllm.receiver").SEAT}
        return shape_of(self.model_runner.model_config.hf_config) | told

    def asyncrl_wanted(self, tensors: list[list[Any]]) -> list[Any] | str:
        """Return the parts of `tensors` ([name, shape, dtype]) that this process keeps, from `sliced.wanted_to_wire`;
        or why they are not known."""
        try:
            return self.weight_transfer_engine.find_wanted(tensors)
        except Exception as error:  # process boundary, see the class
            return f"{type(error).__name__}: {error}"

    def asyncrl_begin(self, kind: str, payload: dict[str, Any]) -> str:
        """Start `receive` or `read` on the side thread; generation continues. Returns an empty string, or why it cannot
        start."""
        return self.weight_transfer_engine.begin(kind, payload)

    def asyncrl_poll(self) -> list[Any]:
        """Return [done, fingerprints, error] of the last job."""
        return self.weight_transfer_engine.poll()

    def asyncrl_staged(self) -> int:
        """Bytes of staging that it holds."""
        return self.weight_transfer_engine.staged_bytes()

    def asyncrl_leave(self) -> str:
        self.weight_transfer_engine.shutdown()
        return ""

    def asyncrl_load(self) -> str:
        """Load the staged weights; generation must be paused. Returns an empty string, or why it failed: then the
        weights are mixed, and only another load repairs them."""
        try:
            self.start_weight_update()  # pyright: ignore[reportAttributeAccessIssue]
            self.update_weights({})  # pyright: ignore[reportAttributeAccessIssue]
            self.finish_weight_update()  # pyright: ignore[reportAttributeAccessIssue]
        except Exception as error:  # process boundary, see the class: returned to the engine as an answer
            self._weight_update_active = False
            self.weight_transfer_engine.reset()
            return f"{type(error).__name__}: {error}"
        return ""

    def asyncrl_add_adapter(self, lora_id: int) -> str:
        """Add the staged adapter. Returns an empty string, or why it failed: then nothing has changed."""
        adapters = import_module("asyncrl.engines.vllm.adapters")
        try:
            adapters.add_adapter(self.model_runner.lora_manager, self.weight_transfer_engine.staged(), lora_id)
        except Exception as error:  # process boundary, see the class
            return f"{type(error).__name__}: {error}"
        return ""

    def asyncrl_drop_adapters(self, lora_ids: list[int]) -> str:
        import_module("asyncrl.engines.vllm.adapters").drop_adapters(self.model_runner.lora_manager, lora_ids)
        return ""
