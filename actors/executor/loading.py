"""Choice of the decoder: the native decoder if it supports the model and device, else transformers on torch.

torch is imported only if the native decoder is not used.
"""

from __future__ import annotations

from cuelight.actors.executor.batch import Batch
from cuelight.actors.executor.device import Device
from cuelight.actors.executor.native import loading as native
from cuelight.actors.executor.options import CannotLoad, LoadOptions, current_phases, may_have_gpu
from cuelight.kernel import get_logger

log = get_logger("cuelight.executor")


def load_device(options: LoadOptions) -> Device[Batch]:
    """Load the model onto its device, with the fastest decoder that supports it there. Blocks. Raises CannotLoad."""
    native_option = _native_option(options)
    # Only the transformers decoder has attention backends, so naming a backend selects that decoder.
    is_other = options.decoder == "transformers" or options.attention != "auto"
    if native_option and is_other:
        other = "decoder 'transformers'" if options.attention == "auto" else f"attention {options.attention!r}"
        raise CannotLoad(f"{native_option} needs the native decoder, not {other}")
    if not is_other and _is_cpu(options.device):
        try:
            return native.load(options)
        except native.Unsuitable as reason:
            if native_option:
                raise CannotLoad(f"the native decoder cannot serve this model: {reason}") from reason
            log.warning("native_decoder_unsuitable", instead="transformers", reason=str(reason))
    elif native_option:
        raise CannotLoad(f"{native_option} runs on the CPU only: give device='cpu', not {options.device!r}")
    with current_phases(options.now)("imports"):
        from cuelight.actors.executor.runner import load_runner

    return load_runner(options)


def _native_option(options: LoadOptions) -> str:
    """Return an option that only the native decoder supports, with its value, or "" if none is set."""
    if options.quantization == "int4":
        return "quantization 'int4'"
    if options.kv_cache_dtype != "auto":
        return f"kv_cache_dtype {options.kv_cache_dtype!r}"
    return "decoder 'native'" if options.decoder == "native" else ""


def _is_cpu(device: str) -> bool:
    if device != "auto":
        return device == "cpu"
    if not may_have_gpu():
        return True
    import torch

    return not torch.cuda.is_available()
