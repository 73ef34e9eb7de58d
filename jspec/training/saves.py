"""States of a run on disk, by orbax: each whole or not there, the newest few kept.

Tensors are saved by name, in a flat dictionary, so any number of devices can restore them, and people can look.
"""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Any

import jax
import orbax.checkpoint as ocp

from jspec.training.step import State


class Saves:
    """The saved states in a folder. Saving goes on in the background; leaving the context waits for it."""

    def __init__(self, folder: Path, keep: int = 2) -> None:
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, cleanup_tmp_directories=True)
        self.manager = ocp.CheckpointManager(folder.absolute(), options=options)

    def __enter__(self) -> Saves:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.manager.wait_until_finished()
        self.manager.close()

    def save(self, state: State) -> None:
        """Saves a state under the number of steps that it has done."""
        step = int(state.step)
        if step not in self.manager.all_steps():
            self.manager.save(step, args=ocp.args.StandardSave(_flat(state)))

    def latest(self, like: State) -> State | None:
        """The newest complete state, laid out over devices as `like` is; None if there is none."""
        step = self.manager.latest_step()
        if step is None:
            return None
        shapes = {
            name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
            for name, leaf in _flat(like).items()
        }
        found = self.manager.restore(step, args=ocp.args.StandardRestore(shapes))
        return jax.tree.unflatten(jax.tree.structure(like), [found[name] for name in _flat(like)])


def _flat(state: State) -> dict[str, Any]:
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(state)[0]}
