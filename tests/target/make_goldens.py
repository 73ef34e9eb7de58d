"""Makes `goldens.npz`: what transformers computes for the tiny checkpoints of `folders.py`.

    python -m tests.target.make_goldens            from the root of the repository; needs torch and transformers

For each checkpoint: logits and the residual after every block at three positions of one text, and the
table of rotary frequencies. The tests compare with the file; where torch is installed they also run
the functions here and compare with what those give then and there.
"""

from __future__ import annotations

import hashlib
import json
import pathlib
import tempfile
from typing import Any

import numpy as np

from tests.target import folders

FILE = pathlib.Path(__file__).parent / "goldens.npz"


def digest(name: str) -> str:
    """Tells whether a checkpoint is the one that its golden was made for."""
    made = hashlib.sha256(json.dumps(folders.CONFIGS[name], sort_keys=True).encode())
    for tensor, array in sorted(folders.tensors(folders.CONFIGS[name]).items()):
        made.update(tensor.encode() + array.tobytes())
    return made.hexdigest()[:16]


def reference(folder: pathlib.Path) -> dict[str, np.ndarray]:
    """Runs a checkpoint in transformers, float32: `logits [3, V]`, `taps [3, L, D]`, one `inv_freq` a layer kind."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    config = model.config.get_text_config()
    restore = _cap_gemma3(config)
    taps: list[Any] = []
    inner = next(part for part in model.modules() if hasattr(part, "layers"))
    for layer in inner.layers:
        layer.register_forward_hook(lambda _, __, out: taps.append(out[0] if isinstance(out, tuple) else out))
    with torch.no_grad():
        logits = model(torch.from_numpy(folders.text()).long()[None]).logits
    restore()
    at = list(folders.POSITIONS)
    made = {"logits": logits[0, at].numpy(), "taps": np.stack([tap[0, at].numpy() for tap in taps], axis=1)}
    for name, value in inner.rotary_emb.named_buffers():
        if name.endswith("inv_freq") and "original" not in name:
            made[name] = value.numpy()
    return made


def _cap_gemma3(config: Any) -> Any:
    """Hands Gemma 3's cap on scores to transformers' attention, which has it; its model leaves it out."""
    import functools

    if config.model_type != "gemma3_text" or config.attn_logit_softcapping is None:
        return lambda: None
    from transformers.models.gemma3 import modeling_gemma3 as module

    whole = module.eager_attention_forward
    module.eager_attention_forward = functools.partial(whole, softcap=config.attn_logit_softcapping)
    return lambda: setattr(module, "eager_attention_forward", whole)


def main() -> None:
    import transformers

    table: dict[str, Any] = {"transformers": transformers.__version__}
    with tempfile.TemporaryDirectory() as place:
        for name, config in folders.CONFIGS.items():
            folder = folders.write(pathlib.Path(place) / name, config, folders.tensors(config))
            table |= {f"{name}/{key}": value for key, value in reference(folder).items()}
            table[f"{name}/digest"] = digest(name)
            print(name, np.abs(table[f"{name}/logits"]).max(), flush=True)
    np.savez_compressed(FILE, **table)
    print(f"{FILE.name}: {FILE.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
