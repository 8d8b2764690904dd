"""Failures that every restart would repeat are told from those of the moment."""

from __future__ import annotations

import pytest

from asyncrl.checks.permanent import is_permanent, lacks_kernel, raised_in, refused_if_permanent
from asyncrl.errors import CheckpointError, ConfigError, ModelMismatchError

REPEATED = [
    ("ValueError", "Model architectures ['NoSuchForCausalLM'] are not supported for now"),
    ("KeyError", "'layers.0.mlp.shared_expert.gate_proj.weight'"),
    ("WeightsError", "an update brought nothing for 'model.layers.0.mlp.shared_expert.gate' of vLLM's model"),
    ("RuntimeError", "\"addmm_impl_cpu_\" not implemented for 'Half'"),
    ("RuntimeError", "mat1 and mat2 must have the same dtype, but got Float and BFloat16"),
    ("RuntimeError", "CUDA error: no kernel image is available for execution on the device"),
    ("NotImplementedError", "Could not run 'aten::_foo' with arguments from the 'CPU' backend"),
    ("ImportError", "flash_attn.so: undefined symbol: _ZN3c105ErrorC2"),
    ("ValidationError", "1 validation error for ModelConfig"),
]
OF_THE_MOMENT = [
    ("ValueError", "Free memory on device (12.1/79.2 GiB) on startup is less than desired GPU memory utilization"),
    ("OutOfMemoryError", "CUDA out of memory. Tried to allocate 2 GiB"),
    ("RuntimeError", "CUDA error: an illegal memory access was encountered"),
    ("RuntimeError", "NCCL error: unhandled system error"),
    ("OSError", "[Errno 98] Address already in use"),
    ("DistNetworkError", "The client socket has timed out after 60000ms"),
    ("EngineDeadError", "EngineCore encountered an issue"),
    ("", ""),
]


@pytest.mark.parametrize(("kind", "message"), REPEATED)
def test_what_depends_on_settings_and_code_is_permanent(kind: str, message: str) -> None:
    assert is_permanent(kind, message)


@pytest.mark.parametrize(("kind", "message"), OF_THE_MOMENT)
def test_what_depends_on_the_machine_is_not(kind: str, message: str) -> None:
    assert not is_permanent(kind, message)


LOG = """\
(EngineCore_DP0 pid=7) ERROR 11-29 10:00:00 [core.py:842] Traceback (most recent call last):
(EngineCore_DP0 pid=7) ERROR 11-29 10:00:00 [core.py:842]   File "core.py", line 1, in run
(EngineCore_DP0 pid=7) ERROR 11-29 10:00:00 [core.py:842] NotImplementedError: no attention backend for head size 7
RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}
a line without an error
"""


def test_the_reason_of_another_process_is_read_from_the_log() -> None:
    found = raised_in(LOG, besides="ngine core initialization failed")
    assert found == ("NotImplementedError", "no attention backend for head size 7")
    assert raised_in("all is well\n") == ("", "")


def test_a_permanent_failure_is_refused_and_others_are_raised_as_they_are() -> None:
    refused = pytest.raises(ConfigError, match=r"model.path=m cannot be trained: KeyError: 'nosuch'")
    with refused, refused_if_permanent("model.path=m cannot be trained"):
        raise KeyError("nosuch")
    for error in (MemoryError("host"), CheckpointError("damaged"), ModelMismatchError("other"), KeyboardInterrupt()):
        with pytest.raises(type(error)) as raised, refused_if_permanent("model.path=m"):
            raise error
        assert raised.value is error


def test_an_engine_without_a_kernel_is_told_from_one_without_memory() -> None:
    assert lacks_kernel("request '1' was not finished: RuntimeError(\"mm not implemented for 'Half'\")")
    assert not lacks_kernel("request '1' was not finished: OutOfMemoryError('CUDA out of memory')")
