"""Names the argument of t5ckpt for a keyword of another library, in the TypeError for the unexpected keyword.

The signatures do not change, because inspect, gin and editors read them. With a parameter ``**others`` they would
accept every misspelling.
"""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import ParamSpec, TypeVar

_P = ParamSpec('_P')
_R = TypeVar('_R')
_C = TypeVar('_C', bound=type)

_ONE_TREE = 'A checkpoint holds one tree: pass the state'
_POLICY = 'Pass save_policy=SaveEvery(n)'
# The keywords of Orbax's CheckpointManager, its options and its checkpointers, and of flax.training.checkpoints.
OF_CONSTRUCTOR: Mapping[str, str] = {
    'best_fn': "Pass keep_policy=KeepBest(count, 'eval/loss', 'min'), and metrics= to save.",
    'best_mode': "Pass keep_policy=KeepBest(count, 'eval/loss', 'min'), and metrics= to save.",
    'checkpointers': f'{_ONE_TREE} as the first argument.',
    'ckpt_dir': 'Pass checkpoints_dir=.',
    'directory': 'Pass checkpoints_dir=.',
    'item_handlers': f'{_ONE_TREE} as the first argument.',
    'item_names': f'{_ONE_TREE} as the first argument.',
    'keep_every_n_steps': 'Pass keep_policy=KeepLatest(count) | KeepEvery(n).',
    'keep_period': 'Pass keep_policy=KeepLatest(count) | KeepEvery(n).',
    'max_to_keep': 'Pass keep=.',
    'metadata': 'Pass custom_metadata= to save.',
    'options': 'They are arguments of their own: keep=, keep_policy=, save_policy=, read_only=.',
    'save_interval_steps': f'{_POLICY}, and call maybe_save at every step.',
    'save_on_steps': 'Pass save_policy=SaveAt(steps), and call maybe_save at every step.',
    'should_save_fn': f'{_POLICY} or a SavePolicy of your own, and call maybe_save at every step.',
    'step_prefix': 'Steps are named checkpoint_<step>, as in T5X.',
}
OF_SAVE: Mapping[str, str] = {
    'args': 'Pass the state itself: save(step, state).',
    'force': 'overwrite=True replaces an existing step. save does not ask the save policy; maybe_save does.',
    'item': 'Pass the state itself: save(step, state).',
    'items': 'Pass the state itself: save(step, state).',
    'keep': 'Pass it to the constructor: Checkpointer(state, keep=3).',
    'target': 'Pass the state itself: save(step, state).',
}
_TEMPLATE = 'The structure to restore goes to the constructor: Checkpointer(state, checkpoints_dir=...).'
OF_RESTORE: Mapping[str, str] = {
    'args': _TEMPLATE,
    'directory': 'Pass path=.',
    'item': _TEMPLATE,
    'items': _TEMPLATE,
    'restore_args': f'{_TEMPLATE} Shardings and dtypes are those of its leaves.',
    'restore_kwargs': f'{_TEMPLATE} Shardings and dtypes are those of its leaves.',
    'target': _TEMPLATE,
    'verify': "Pass it to the constructor: Checkpointer(state, verify='quick').",
}


OF_ATTRIBUTES: Mapping[str, str] = {
    'directory': 'It is checkpoints_dir.',
    'is_saving_in_progress': 'save_async returns a PendingSave: call its done().',
    'item_metadata': 'open_checkpoint(path) has the shapes and dtypes of all leaves.',
    'max_to_keep': 'It is keep.',
    'metadata': 'open_checkpoint(path).custom_metadata has that of a step.',
    'reload': 'all_steps() and latest_step() look at the storage each time.',
}


def explains_names(names: Mapping[str, str]) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Decorates a function so that its TypeError for an unknown keyword has a hint; ``names`` has one for each foreign name."""

    def decorate(function: Callable[_P, _R]) -> Callable[_P, _R]:
        signature = inspect.signature(function)
        parameters = frozenset(signature.parameters)

        @functools.wraps(function)
        def checked(*args: _P.args, **given: _P.kwargs) -> _R:
            if not parameters.issuperset(given):
                unknown = next(name for name in given if name not in parameters)
                near = difflib.get_close_matches(unknown, signature.parameters, 1)
                hint = names.get(unknown) or (f'Did you mean {near[0]}=?' if near else '')
                raise TypeError(
                    f'{function.__qualname__}() got an unexpected keyword argument {unknown!r}. {hint}'.rstrip()
                )
            return function(*args, **given)

        # For readers of signatures that do not follow __wrapped__, such as inspect.getfullargspec and gin.
        vars(checked)['__signature__'] = signature
        return checked

    return decorate


def explains_fields(kind: _C) -> _C:
    """Decorates a dataclass so that its TypeError for an unknown field names the nearest one."""
    kind.__init__ = explains_names({})(kind.__init__)
    return kind
