"""Warnings of one checkpointer, each given once for its cause."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping

from t5ckpt.core.call_site import CallSite
from t5ckpt.errors import MissingMetricWarning, T5CkptWarning, UnshardedTemplateWarning

__all__ = ['Notices']


class Notices:
    """Remembers what was said.

    Notes: where a filter makes the warning an error, it is raised each time, since nobody has been warned yet. It may be
      given in the thread of a save, which then fails before its commit.
    """

    def __init__(self) -> None:
        self._given: set[Hashable] = set()

    def is_new(self, cause: Hashable) -> bool:
        """Whether nobody was warned of it yet."""
        return cause not in self._given

    def add(self, cause: Hashable) -> None:
        """Notes that it was said, as part of another warning."""
        self._given.add(cause)

    def warn(self, cause: Hashable, warning: T5CkptWarning, site: CallSite | None = None) -> None:
        """Warns, unless that was done for this cause; in another thread than the caller's at the ``site`` it called from."""
        if cause in self._given:
            return
        (CallSite.here() if site is None else site).warn(warning)
        self._given.add(cause)

    def unsharded(self, text: str) -> None:
        """Warns of a template without shardings, once for a checkpointer, and says how to attach them."""
        cure = (
            'Attach shardings to the template: jax.eval_shape(jax.jit(init, out_shardings=...)), or '
            'jax.ShapeDtypeStruct(shape, dtype, sharding=...). If one device is meant: '
            'sharding=jax.sharding.SingleDeviceSharding(jax.devices()[0]).'
        )
        self.warn('unsharded', UnshardedTemplateWarning(f'{text} {cure}'))

    def missing_metrics(self, missing: Mapping[str, tuple[int, Collection[str]]]) -> None:
        """Warns of metrics that a keep policy looks at: by name, a step that lacks it and the metrics that it has."""
        for name, (step, held) in missing.items():
            text = (
                f'step {step} has no metric {name!r}, which the keep policy looks at; it has: {", ".join(held) or "none"}. '
                f'Pass metrics={{{name!r}: ...}} to save, or name another metric in the policy.'
            )
            self.warn(('keep_policy', name), MissingMetricWarning(text))
